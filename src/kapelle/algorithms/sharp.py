"""SHARP: each agent's Shapley value (2602.08335).

With v(S) what the team earns when only the agents in S speak, n trained agents and S ⊆ N without i,

    φ_i = Σ_S |S|! (n − |S| − 1)! / n! · (v(S ∪ {i}) − v(S)).

v(N) is the episode's own return; every other v(S) is the mean of `continuations` in which the others of N say nothing (`ccpo` says what that is). Up to `exact` agents every
coalition is played, 2ⁿ − 1 of them; beyond, those of `permutations` orders in which agents join, drawn by the episode's seed, and φ_i is the mean of what i adds in them.
`SHARP.judged` gives that mean's standard error.

`use: baseline` (default) is unbiased: D_i = R(τ) − Σ_S |S|! (n − |S| − 1)! / n! · v(S), S without i, compared with the mean of D_i in the group's other attempts. Nothing that is subtracted depends on
what i says.

`use: reward` is the paper's: φ_i is the agent's reward, compared with the mean of its group's. It follows another objective than J unless the team is additive: v(S ∪ {i}) pays
i for what its words are worth in teams that never play (a game of two agents in `tests/algorithms/test_expected_replays.py`, where it learns the worse word).

Deviations from the paper: agents that are absent say nothing, where the paper lets a reference policy speak (`swap` in `rollout.interventions` can); no reward for the use of
tools, which an environment pays (`tools`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import factorial, sqrt
from statistics import fmean
from typing import Literal, NamedTuple

from pydantic import Field

from kapelle.algorithm import Algorithm, Change, Credit
from kapelle.algorithms.shared.groups import Earlier
from kapelle.algorithms.shared.monte_carlo import spread
from kapelle.algorithms.shared.replays import Replays, against_others, by_agent_of, team_return
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.randomness import derive_seed
from kapelle.team import Team
from kapelle.types import Episode, Group

Coalition = frozenset[str]


class Joining(NamedTuple):
    """An agent joins a coalition."""

    agent: str
    before: Coalition
    weight: float
    """Of what it adds, in the agent's Shapley value."""


class SHARP(Replays):
    """Settings of Shapley credit."""

    name: Literal["sharp"] = "sharp"
    use: Literal["baseline", "reward"] = "baseline"
    """`baseline` subtracts what does not depend on the agent from the return; `reward` pays the agent its Shapley value."""
    exact: int = Field(default=5, ge=1, le=10)
    """Most trained agents of whom every coalition is played."""
    permutations: int = Field(default=8, ge=2)
    """Orders that are drawn where there are more."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.replaying(self.name, self.credit, self.changes, self.earned)

    def earned(self, episode: Episode) -> Mapping[str, float]:
        """Return what the team earned, as every agent's return."""
        return dict.fromkeys(episode.agents, team_return(episode, self.team_reward, self.forms))

    def joinings(self, episode: Episode) -> list[Joining]:
        """Return who joins which coalition, in the sums of all Shapley values of an episode."""
        spoke = {turn.agent for turn in episode.turns if turn.trained}
        names = [agent for agent in episode.agents if agent in spoke]
        count = len(names)
        if count <= self.exact:
            return [
                Joining(
                    agent, frozenset(before), factorial(size) * factorial(count - size - 1) / factorial(count)
                )
                for agent in names
                for size in range(count)
                for before in combinations([name for name in names if name != agent], size)
            ]
        drawn = random.Random(derive_seed(episode.seed, "shapley"))
        found = []
        for _ in range(self.permutations):
            order = drawn.sample(names, count)
            found += [
                Joining(agent, frozenset(order[:k]), 1 / self.permutations) for k, agent in enumerate(order)
            ]
        return found

    def changes(self, group: Group, number: int, team: Team) -> Sequence[Change]:
        """Return the removal of everybody outside each coalition that is asked for, the greatest coalitions first."""
        episode = group.episodes[number]
        joinings = self.joinings(episode)
        names = dict.fromkeys(joining.agent for joining in joinings)
        asked = {joining.before for joining in joinings} | {each.before | {each.agent} for each in joinings}
        removed = [
            tuple(agent for agent in episode.agents if agent in names and agent not in coalition)
            for coalition in asked
        ]
        removed.sort(key=lambda gone: (len(gone), [episode.agents.index(agent) for agent in gone]))
        return [Change("remove", gone) for gone in removed if gone]

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the team's return less what it earns without the agent, or the agent's Shapley value less that of others."""
        judged = {id(episode): self.judged(episode) for group in groups for episode in group.valid}

        def value(episode: Episode, agent: str) -> tuple[float, str] | None:
            earned = self.earned(episode)[agent]
            if agent not in judged[id(episode)]:
                return (earned, "earned") if self.use == "baseline" else None
            worth, without, _ = judged[id(episode)][agent]
            return (earned - without, "added") if self.use == "baseline" else (worth, "value")

        members = [member for _, member in by_agent_of(groups, value)]
        advantage: dict[TurnKey, float] = {}
        for member, better in zip(members, against_others(members, earlier), strict=True):
            advantage |= dict.fromkeys(member.keys, better)
        return spread(self, groups, advantage)

    def judged(self, episode: Episode) -> dict[str, tuple[float, float, float]]:
        """Return each agent's Shapley value, what the team earns without it (weighed alike), and the value's standard error.

        Agents with a coalition that was not played are left out.
        """
        joinings = self.joinings(episode)
        names = dict.fromkeys(joining.agent for joining in joinings)
        worth: dict[Coalition, float] = {frozenset(names): team_return(episode, self.team_reward, self.forms)}
        for each in episode.interventions:
            paid = [next(iter(one.values())) for one in each.returns if one]
            if paid:
                worth[frozenset(names) - set(each.agents)] = fmean(paid)
        found: dict[str, tuple[float, float, float]] = {}
        for agent in names:
            own = [joining for joining in joinings if joining.agent == agent]
            if all(one.before in worth and one.before | {agent} in worth for one in own):
                adds = [worth[one.before | {agent}] - worth[one.before] for one in own]
                value = sum(one.weight * add for one, add in zip(own, adds, strict=True))
                without = sum(one.weight * worth[one.before] for one in own)
                error = 0.0
                if len(names) > self.exact:
                    error = sqrt(sum((add - value) ** 2 for add in adds) / (len(adds) - 1) / len(adds))
                found[agent] = value, without, error
        return found
