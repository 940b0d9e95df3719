"""SHARP: each agent's Shapley value (2602.08335).

With v(S) what the team earns when only the agents in S speak, n trained agents and S ⊆ N without i,

    φ_i = Σ_S |S|! (n − |S| − 1)! / n! · (v(S ∪ {i}) − v(S)).

v(N) is the episode's own return; every other v(S) is the mean of `continuations` in which the others of N are absent: they say nothing (`absent: silent`; `ccpo` says what that is), or their base model
speaks for them as it was before training (`absent: reference`), so that a coalition is worth what training it alone has made of the team. Up to `exact` agents every
coalition is played, 2ⁿ − 1 of them; beyond, those of `permutations` orders in which agents join, drawn by the episode's seed, and φ_i is the mean of what i adds in them.
`SHARP.judged` gives that mean's standard error.

`use: baseline` (default) is unbiased: D_i = R(τ) − Σ_S |S|! (n − |S| − 1)! / n! · v(S), S without i, compared with the mean of D_i in the group's other attempts. Nothing that is subtracted depends on
what i says.

`use: reward` is the paper's: φ_i is the agent's reward, compared with the mean of its group's. It follows another objective than J unless the team is additive: v(S ∪ {i}) pays
i for what its words are worth in teams that never play (a game of two agents in `tests/algorithms/test_expected_replays.py`, where it learns the worse word).

`tool_reward` adds the paper's third part, for the use of tools: that many times the share of an agent's calls that were carried out, on the agent's own return. A call that is malformed, names no tool,
violates a schema, fails or takes too long is not; without a call it is 0. It is a reward of its own: what is learned is the gradient of the team's return plus that, also where a call is of no use.

Deviations from the paper, whose abstract we know: `use: baseline`, `absent: silent` and no reward for tools unless set; how much of a reward for tools the paper gives for what is our reading.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import factorial, sqrt
from statistics import fmean
from typing import Literal, NamedTuple

from pydantic import Field

from kapelle.algorithm import Algorithm, Change, Credit
from kapelle.algorithms.shared.groups import Earlier
from kapelle.algorithms.shared.monte_carlo import spread
from kapelle.algorithms.shared.replays import Replays, against_others, by_agent_of, team_return
from kapelle.algorithms.signals.stand_ins import StandIn, stand_in
from kapelle.errors import ConfigError
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
    absent: Literal["silent", "reference"] = "silent"
    """Agents outside a coalition say nothing, or their base model speaks for them, without its adapter."""
    tool_reward: float = Field(default=0.0, ge=0.0)
    """Paid to an agent whose calls of tools were all carried out, in proportion otherwise; 0 pays nothing."""
    exact: int = Field(default=5, ge=1, le=10)
    """Most trained agents of whom every coalition is played."""
    permutations: int = Field(default=8, ge=2)
    """Orders that are drawn where there are more."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        row = self.replaying(self.name, self.credit, self.changes, self.earned)
        return replace(row, needs=(*row.needs, StandIn())) if self.absent == "reference" else row

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
        """Return the absence of everybody outside each coalition that is asked for, the greatest coalitions first."""
        episode = group.episodes[number]
        joinings = self.joinings(episode)
        names = dict.fromkeys(joining.agent for joining in joinings)
        asked = {joining.before for joining in joinings} | {each.before | {each.agent} for each in joinings}
        removed = [
            tuple(agent for agent in episode.agents if agent in names and agent not in coalition)
            for coalition in asked
        ]
        removed.sort(key=lambda gone: (len(gone), [episode.agents.index(agent) for agent in gone]))
        if self.absent == "silent":
            return [Change("remove", gone) for gone in removed if gone]
        return [Change("swap", gone, by=stand_in(team.policy(gone[0]).base)) for gone in removed if gone]

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the team's return less what it earns without the agent, or the agent's Shapley value less that of others."""
        if self.tool_reward:
            need_calls(groups)
        judged = {id(episode): self.judged(episode) for group in groups for episode in group.valid}

        def value(episode: Episode, agent: str) -> tuple[float, str] | None:
            earned = self.earned(episode)[agent]
            called = self.tool_reward * carried_out(episode, agent)
            if agent not in judged[id(episode)]:
                return (earned + called, "earned") if self.use == "baseline" else None
            worth, without, _ = judged[id(episode)][agent]
            return (
                (earned - without + called, "added") if self.use == "baseline" else (worth + called, "value")
            )

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


def carried_out(episode: Episode, agent: str) -> float:
    """Return the share of an agent's calls of tools that were carried out; 0 without a call."""
    done, faults = (_count(episode, what, agent) for what in ("calls_done", "call_faults"))
    return done / (done + faults) if done + faults else 0.0


def _count(episode: Episode, what: str, agent: str) -> int:
    found = episode.info.get(what)
    count = found.get(agent, 0) if isinstance(found, dict) else 0
    assert isinstance(count, int)
    return count


def need_calls(groups: Sequence[Group]) -> None:
    """Raise ConfigError if no episode says which calls of tools were carried out; in a mixture some need not."""
    valid = [episode for group in groups for episode in group.valid]
    if valid and not any("calls_done" in one.info or one.task.part for one in valid):
        raise ConfigError(
            "`algorithm.tool_reward` pays for calls of tools, and the environment's episodes say nothing of calls. Set "
            "`environment.name` to tools or tool_tasks, or remove `tool_reward`."
        )
