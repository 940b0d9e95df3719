"""Assign the members of a league to roles: how likely each member is drawn, which members are loaded, and their roles in each task.

All episodes of a task have the same opponent, so that the episodes of a group are comparable.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kapelle.features.league.pool import EXPLOITER, MAIN, PARTNER, MatchScore, MemberPool
from kapelle.features.league.settings import LeagueConfig, PfspPopulation, PsroPopulation
from kapelle.runtime.randomness import derive_seed
from kapelle.types import Cast

Chances = Mapping[str, float]
"""Mapping from each member to the probability with which it is drawn. The probabilities sum to 1."""


def chances(
    settings: LeagueConfig, pool: MemberPool, learner: str, strategy: Chances | None = None
) -> Chances:
    """Return, for each member, the probability that a learner meets this member. The result is empty if there are no members.

    The argument `strategy` is the meta-strategy of `psro`; if it is given, only its members are drawn.
    """
    names, population = pool.names, settings.population
    match population:
        case PfspPopulation():
            points = [pool.scores.get((learner, name), MatchScore()).points for name in names]
            weights = [
                (1.0 - x) ** population.power if population.weight == "hard" else x * (1.0 - x)
                for x in points
            ]
        case PsroPopulation() if strategy is not None:
            # Drafts are in the strategy but not in the pool.
            names = list(dict.fromkeys([*names, *strategy]))
            weights = [strategy.get(name, 0.0) for name in names]
        case _:
            weights = [1.0] * len(names)
    total = sum(weights)
    if not total:
        weights, total = [1.0] * len(names), float(len(names))
    return {name: weight / total for name, weight in zip(names, weights, strict=True)}


def sampled_for_slots(drawn: Chances, past: Sequence[str], slots: int, seed: int) -> dict[str, float]:
    """Return the members that will be loaded, with their probabilities. At most `slots` of these members are past selves (`past`).

    If there are more past selves, some of them are chosen by systematic sampling, and the chosen past selves share the total
    probability of all past selves. On average over steps, each member is met with its own probability.
    """
    wanted = {name: chance for name, chance in drawn.items() if chance > 0.0}
    own = [name for name in wanted if name in past]
    if len(own) <= slots:
        return wanted
    total = sum(wanted[name] for name in own)
    found = {name: chance for name, chance in wanted.items() if name not in past}
    point, reached = random.Random(seed).random(), 0.0
    for name in own:
        reached += slots * wanted[name] / total
        while point < reached - 1e-12 and point < slots:
            found[name] = found.get(name, 0.0) + total / slots
            point += 1.0
    return found


@dataclass(frozen=True, slots=True)
class OpponentEntry:
    """A possible opponent, with the policies that act for it."""

    member: str
    chances: Mapping[str, float]
    """Mapping from each learning agent to the probability that it meets this member in a task against the pool."""
    policies: Mapping[str, str]
    """Mapping from each agent to the policy that takes its role. Empty if the opponent is the environment's own player `player`."""
    player: str = ""


@dataclass(frozen=True, slots=True)
class Follower:
    """An additional learner in a line of learners (pipeline PSRO)."""

    learner: str
    policies: Mapping[str, str]
    """Mapping from each agent to the policy that learns in its role."""
    opponents: tuple[OpponentEntry, ...]


@dataclass(frozen=True, slots=True)
class Assignments:
    """The rules by which roles are assigned in the tasks of the next steps."""

    homes: tuple[str, ...]
    """The learning agents. Each learning agent takes its own role in the same number of tasks."""
    opponents: tuple[OpponentEntry, ...]
    share: float
    """Share of the tasks in which the learners play against the pool."""
    agents: tuple[str, ...]
    exploiters: Mapping[str, str]
    """Mapping from each agent to the policy of the exploiter; empty if there is no exploiter."""
    exploited: float = 0.0
    """Share of the tasks in which the exploiter plays against the learners."""
    partners: tuple[Mapping[str, str], ...] = ()
    """Partners that learn first, by self-play. For each partner, a mapping from agents to policies."""
    partners_until: int = 0
    """Number of the last step in which the partners learn."""
    followers: tuple[Follower, ...] = ()
    """Additional learners. Each additional learner receives as many tasks as the learners of the team map."""

    def casts(self, seed: int, step: int, count: int) -> list[dict[str, Cast]]:
        """Return, for each of the `count` tasks of a step, a mapping from agents to the other policies or players that take their roles.

        The assignment follows shares and probabilities as exactly as `count` allows.
        """
        if step <= self.partners_until:
            before = (step - 1) * count
            return [
                {agent: Cast(policy, f"{PARTNER}{k}") for agent, policy in self.partners[k].items()}
                for k in ((before + place) % len(self.partners) for place in range(count))
            ]
        draw = random.Random(derive_seed(seed, "casts", step))
        offset = draw.random()
        points = [(place + offset) / count for place in range(count)]
        draw.shuffle(points)
        turn = draw.randrange(len(self.homes))
        return [
            self._cast(point, self.homes[(place + turn) % len(self.homes)])
            for place, point in enumerate(points)
        ]

    def _cast(self, point: float, home: str) -> dict[str, Cast]:
        if point < self.exploited:
            return {home: Cast(self.exploiters[home], EXPLOITER)}
        point = (point - self.exploited) / (1.0 - self.exploited)
        if not self.followers:
            return self._opposite(point, home, self.opponents)
        level, point = divmod(point * (len(self.followers) + 1), 1.0)
        if not level:
            return self._opposite(point, home, self.opponents)
        follower = self.followers[int(level) - 1]
        own = {agent: Cast(policy, follower.learner) for agent, policy in follower.policies.items()}
        met = self._opposite(point, home, follower.opponents)
        return {home: own[home], **met} if met else own

    def _opposite(self, point: float, home: str, entries: Sequence[OpponentEntry]) -> dict[str, Cast]:
        """Return the players in all roles except `home`. The result is empty if the learner plays against itself."""
        if not entries or point >= self.share:
            return {}
        reached = 0.0
        for entry in entries:
            reached += entry.chances[home] * self.share
            if point < reached:
                break
        others = [agent for agent in self.agents if agent != home]
        return {
            agent: Cast(entry.policies.get(agent, ""), entry.member if entry.policies else entry.player)
            for agent in others
        }


@dataclass(frozen=True, slots=True)
class Pairing:
    """The learner of a task and its opponent."""

    learner: str
    home: str
    """Name of the agent whose role the learner takes."""
    opponent: str
    """Name of the opponent, which is a member of the pool or a player of the environment."""
    speaks: bool = True
    """Whether the opponent is a policy, not a player of the environment."""


def met_in(cast: Mapping[str, Cast], agents: Sequence[str], learning: Sequence[str]) -> Pairing | None:
    """Return the learner and the opponent of a task, or None if learners play against themselves or each other.

    The argument `learning` contains the agents with a trained policy in the team map.
    """
    own = {
        agent: each.player
        for agent, each in cast.items()
        if each.policy.startswith(("exploiter:", "partner:", "follower:"))
    }
    if EXPLOITER in own.values():
        return Pairing(EXPLOITER, next(iter(own)), MAIN)
    if len(own) == len(cast):
        return None
    home = next(iter(own), "") or next(agent for agent in agents if agent not in cast and agent in learning)
    other = next(each for agent, each in cast.items() if agent != home)
    return Pairing(own.get(home, MAIN), home, other.player, bool(other.policy))
