"""SHARP: credit from the Shapley value of each agent (arXiv:2602.08335).

Let v(S) be the team's return if only the agents in S act, n the number of trained agents, and N the set of trained agents.
The Shapley value of agent i is a sum over all S ⊆ N without i:

    φ_i = Σ_S |S|! (n − |S| − 1)! / n! · (v(S ∪ {i}) − v(S))

The value v(N) is the return of the episode itself. Every other v(S) is the mean return of `continuations` in which the agents
of N outside S are absent. With `absent: silent`, absent agents write nothing (see `ccpo`). With `absent: reference`, absent
agents are replaced by their base model as it was before training, so v(S) measures the effect of training the agents in S.

Up to `exact` agents, all 2ⁿ − 1 coalitions are sampled. For larger teams, coalitions are taken from `permutations` random
orders in which agents join (drawn with the episode's seed), and φ_i is the mean contribution of agent i.

The default, `use: baseline`, is unbiased. The difference D_i = R(τ) − Σ_S |S|! (n − |S| − 1)! / n! · v(S), with the sum over
all S without i, is compared with the mean D_i of the other episodes of the group. All terms that are subtracted are
independent of the completions of agent i.

The paper's form is `use: reward`: φ_i is the agent's reward and is compared with the mean of the group. The objective differs
from J unless contributions are additive, because v(S ∪ {i}) rewards agent i for its effect in coalitions that are never
deployed. A game of two agents in `tests/algorithms/test_expected_replays.py` shows this: with `use: reward`, the worse action
is learned.

The setting `tool_reward` adds the third part of the paper, a reward for tool use. The agent's own return increases by
`tool_reward` times the share of its tool calls that succeeded. A call does not succeed if it is malformed, names no tool,
violates a schema, fails or times out. The tool reward of an agent without calls is 0. The update follows the gradient of the
team's return plus the tool reward, even if the calls are of no use to the task.

Deviations from the paper (only its abstract was available):

- The defaults are `use: baseline`, `absent: silent` and no tool reward.
- The size of the tool reward and its conditions are an interpretation.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import factorial
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
    """A term of a Shapley value: an agent joins a coalition."""

    agent: str
    before: Coalition
    weight: float
    """The weight of this contribution in the agent's Shapley value."""


class SHARP(Replays):
    """Settings of SHARP: credit from Shapley values."""

    name: Literal["sharp"] = "sharp"
    use: Literal["baseline", "reward"] = "baseline"
    """What the returns of coalitions are used for: an unbiased baseline of the agent's return (`baseline`), or the Shapley
    value as the agent's reward (`reward`)."""
    absent: Literal["silent", "reference"] = "silent"
    """The behaviour of agents outside a coalition: they write empty messages (`silent`), or their base model without adapter
    replaces them (`reference`)."""
    tool_reward: float = Field(default=0.0, ge=0.0)
    """The tool reward of an agent whose tool calls all succeed. The tool reward is proportional to the share of calls that
    succeed. With 0, there is no tool reward."""
    exact: int = Field(default=5, ge=1, le=10)
    """The maximum number of trained agents for which all coalitions are sampled."""
    permutations: int = Field(default=8, ge=2)
    """The number of random orders from which coalitions are taken if the team has more trained agents than `exact`."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        row = self.replaying(self.name, self.credit, self.changes, self.earned)
        return replace(row, needs=(*row.needs, Substitute())) if self.absent == "reference" else row

    def joinings(self, episode: Episode) -> list[Joining]:
        """Return the terms of all Shapley values of an episode. Each term states which agent joins which coalition."""
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
        """Return one change per coalition, which makes all other trained agents absent. The largest coalitions come first."""
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
        """Return, for each agent, D_i (or φ_i with `use: reward`) minus its mean in the other episodes of the group."""
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

    def judged(self, episode: Episode) -> dict[str, tuple[float, float]]:
        """Return, for each agent, its Shapley value and the team's weighted return without the agent.

        The result does not contain agents with a coalition that was not sampled.
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
        found: dict[str, tuple[float, float]] = {}
        for agent in names:
            own = [joining for joining in joinings if joining.agent == agent]
            if all(term.before in value_of and term.before | {agent} in value_of for term in own):
                added = [value_of[term.before | {agent}] - value_of[term.before] for term in own]
                value = sum(term.weight * add for term, add in zip(own, added, strict=True))
                without = sum(term.weight * value_of[term.before] for term in own)
                found[agent] = value, without
        return found


def carried_out(episode: Episode, agent: str) -> float:
    """Return the share of an agent's tool calls that succeeded, or 0 if the agent made no call."""
    done, faults = (_count(episode, key, agent) for key in ("calls_done", "call_faults"))
    return done / (done + faults) if done + faults else 0.0


def _count(episode: Episode, key: str, agent: str) -> int:
    found = episode.info.get(key)
    count = found.get(agent, 0) if isinstance(found, dict) else 0
    assert isinstance(count, int)
    return count


def need_calls(groups: Sequence[Group]) -> None:
    """Raise ConfigError if no episode reports tool calls. In a mixture, parts without tool calls are allowed."""
    valid = [episode for group in groups for episode in group.valid]
    if valid and not any("calls_done" in one.info or one.task.part for one in valid):
        raise ConfigError(
            "`algorithm.tool_reward` needs tool calls, but the environment's episodes report none. Set `environment.name` to "
            "tools or tool_tasks, or remove `tool_reward`."
        )
