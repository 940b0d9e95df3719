"""SHARP: credit from each agent's Shapley value (2602.08335).

With v(S) the team's return if only the agents in S act, n trained agents, and sums over S ⊆ N without i,

    φ_i = Σ_S |S|! (n − |S| − 1)! / n! · (v(S ∪ {i}) − v(S))

v(N) is the episode's own return. Every other v(S) is the mean of `continuations` in which the other agents of N are absent.
With `absent: silent` they write nothing (see `ccpo`). With `absent: reference` they are replaced by their base model as it
was before training, so that v(S) measures what training S alone has changed.

Up to `exact` agents, all 2ⁿ − 1 coalitions are sampled. For larger teams, coalitions come from `permutations` random orders
in which agents join (drawn with the episode's seed), and φ_i is the mean of i's contributions. `SHARP.judged` returns the
standard error.

`use: baseline` (the default) is unbiased. D_i = R(τ) − Σ_S |S|! (n − |S| − 1)! / n! · v(S), over all S without i, is
compared with the mean D_i of the group's other episodes. Everything that is subtracted is independent of i's completions.

`use: reward` is the paper's form: φ_i is the agent's reward, compared with the mean of its group. The objective differs from J
unless the team is additive, because v(S ∪ {i}) rewards i for its effect in coalitions that are never deployed. A game of
two agents in `tests/algorithms/test_expected_replays.py` shows this: with `use: reward`, the worse action is learned.

`tool_reward` adds the paper's third part, a reward for tool use: `tool_reward` times the share of an agent's calls that
succeeded is added to the agent's own return. A call does not succeed if it is malformed, names no tool, violates a schema,
fails or times out; an agent without calls gets 0. It is a separate reward: the update follows the gradient of the team's
return plus this reward, even if calls are of no use to the task.

Deviations from the paper (we know only its abstract):

- The defaults are `use: baseline`, `absent: silent` and no tool reward.
- The size of the tool reward, and what it is given for, are our interpretation.
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
from kapelle.algorithms.shared.replays import Replays, by_agent_of, spread_members, team_return
from kapelle.algorithms.signals.substitutes import Substitute, substitute_name
from kapelle.errors import ConfigError
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.randomness import derive_seed
from kapelle.team import Team
from kapelle.types import Episode, Group

Coalition = frozenset[str]


class Joining(NamedTuple):
    """An agent that joins a coalition."""

    agent: str
    before: Coalition
    weight: float
    """Weight of its contribution in the agent's Shapley value."""


class SHARP(Replays):
    """Settings of SHARP: Shapley credit."""

    name: Literal["sharp"] = "sharp"
    use: Literal["baseline", "reward"] = "baseline"
    """Use of the coalitions: for an unbiased baseline of the return, or for the Shapley value as the agent's reward."""
    absent: Literal["silent", "reference"] = "silent"
    """Behaviour of agents outside a coalition: empty messages, or their base model without its adapter."""
    tool_reward: float = Field(default=0.0, ge=0.0)
    """Reward of an agent whose tool calls all succeeded; it is proportional to the share of calls that did. 0 turns it
    off."""
    exact: int = Field(default=5, ge=1, le=10)
    """Maximum number of trained agents for which all coalitions are sampled."""
    permutations: int = Field(default=8, ge=2)
    """Number of random orders for larger teams."""

    def build(self) -> Algorithm:
        """Return the algorithm."""
        row = self.replaying(self.name, self.credit, self.changes, self.earned)
        return replace(row, needs=(*row.needs, Substitute())) if self.absent == "reference" else row

    def joinings(self, episode: Episode) -> list[Joining]:
        """Return the terms of all Shapley values of an episode: which agent joins which coalition."""
        acted = {turn.agent for turn in episode.turns if turn.trained}
        names = [agent for agent in episode.agents if agent in acted]
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
        """Return one change per coalition, which makes all other trained agents absent; the largest coalitions first."""
        episode = group.episodes[number]
        joinings = self.joinings(episode)
        names = dict.fromkeys(joining.agent for joining in joinings)
        coalitions = {joining.before for joining in joinings}
        coalitions |= {joining.before | {joining.agent} for joining in joinings}
        absent = [
            tuple(agent for agent in episode.agents if agent in names and agent not in coalition)
            for coalition in coalitions
        ]
        absent.sort(key=lambda agents: (len(agents), [episode.agents.index(agent) for agent in agents]))
        if self.absent == "silent":
            return [Change("remove", agents) for agents in absent if agents]
        return [
            Change("swap", agents, by=substitute_name(team.policy(agents[0]).base))
            for agents in absent
            if agents
        ]

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return D_i, or with `use: reward` φ_i, each minus the mean of the group's other episodes."""
        if self.tool_reward:
            need_calls(groups)

        def value(episode: Episode, agent: str) -> tuple[float, str] | None:
            earned = self.earned(episode)[agent]
            tools = self.tool_reward * carried_out(episode, agent)
            found = self.judged(episode).get(agent)
            if self.use == "reward":
                return None if found is None else (found[0] + tools, "value")
            return (earned + tools, "earned") if found is None else (earned - found[1] + tools, "added")

        members = [member for _, member in by_agent_of(groups, value)]
        return spread_members(self, groups, members, earlier)

    def judged(self, episode: Episode) -> dict[str, tuple[float, float, float]]:
        """Return each agent's Shapley value, the team's weighted return without it, and the value's standard error.

        Agents with a coalition that was not sampled are absent.
        """
        joinings = self.joinings(episode)
        names = dict.fromkeys(joining.agent for joining in joinings)
        value_of: dict[Coalition, float] = {
            frozenset(names): team_return(episode, self.team_reward, self.forms)
        }
        for intervention in episode.interventions:
            returns = [next(iter(by_agent.values())) for by_agent in intervention.returns if by_agent]
            if returns:
                value_of[frozenset(names) - set(intervention.agents)] = fmean(returns)
        found: dict[str, tuple[float, float, float]] = {}
        for agent in names:
            own = [joining for joining in joinings if joining.agent == agent]
            if all(term.before in value_of and term.before | {agent} in value_of for term in own):
                added = [value_of[term.before | {agent}] - value_of[term.before] for term in own]
                value = sum(term.weight * add for term, add in zip(own, added, strict=True))
                without = sum(term.weight * value_of[term.before] for term in own)
                error = 0.0
                if len(names) > self.exact:
                    error = sqrt(sum((add - value) ** 2 for add in added) / (len(added) - 1) / len(added))
                found[agent] = value, without, error
        return found


def carried_out(episode: Episode, agent: str) -> float:
    """Return the share of an agent's tool calls that succeeded; 0 without a call."""
    done, faults = (_count(episode, key, agent) for key in ("calls_done", "call_faults"))
    return done / (done + faults) if done + faults else 0.0


def _count(episode: Episode, key: str, agent: str) -> int:
    found = episode.info.get(key)
    count = found.get(agent, 0) if isinstance(found, dict) else 0
    assert isinstance(count, int)
    return count


def need_calls(groups: Sequence[Group]) -> None:
    """Raise ConfigError if no episode reports tool calls; in a mixture, some parts may report none."""
    valid = [episode for group in groups for episode in group.valid]
    if valid and not any("calls_done" in one.info or one.task.part for one in valid):
        raise ConfigError(
            "`algorithm.tool_reward` needs tool calls, but the environment's episodes report none. Set `environment.name` to "
            "tools or tool_tasks, or remove `tool_reward`."
        )
