"""M-GRPO: GRPO for a main agent that calls sub-agents any number of times, with a separate normalisation per level (arXiv:2511.13288).

    A = (R − mean) / (std + ε),    for a sub-agent with k calls in the episode: k̄/k · A

The return of an agent is compared with the returns of the same agent in the other episodes of the task. Levels differ in how
often their agents act and in their returns, so returns of different levels are never compared.

The number of calls of a sub-agent varies between episodes. The paper aligns the trajectories: it duplicates some trajectories
of an episode with few calls and drops some of an episode with many calls, until all episodes have the same number. In this
implementation, every call of an episode with k calls has the weight k̄/k, where k̄ is the mean number of calls over the
step's episodes with calls. The weight is the expectation of the paper's resampling, without the noise of resampling. Each
episode counts once for an agent, however often the agent is called.

A call is the set of an agent's turns that one turn of another agent requested (`Turn.caller`). If the caller is unknown, a
call consists of the agent's turns until an agent of a higher level moves again. The return of a call is the agent's whole
return in the episode.

With `compare: main`, every call has the advantage of the main agent. With `align: none` and one policy for all agents, this
is the idea of MATPO (arXiv:2510.04678): workers have no separate score, and the score of the planner's answer applies to
every rollout. MATPO's code normalises over all rollouts, including those of workers; in this implementation, each episode
counts once.

Deviations from the paper:

- Weights of calls replace the resampling of trajectories.
- There can be any number of levels and of agents per level; the paper has two agents.
- Rewards come from the environment, and `team_reward: mean` gives all agents the same reward. The paper adds an expert's
  score for the sub-agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from pydantic import model_validator

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import BY_SCALE, Earlier, by_agent, compare, valid_episodes
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.errors import ConfigError, need_known
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.team import Team
from kapelle.types import Episode, Group

Levels = tuple[tuple[str, ...], ...]


class MGRPO(MonteCarlo):
    """Settings of M-GRPO, which is GRPO for a main agent and its sub-agents."""

    name: Literal["m_grpo"] = "m_grpo"
    levels: Levels = ()
    """The names of the agents by level: first the main agent, then the agents that the main agent calls, then the agents that
    these call, and so on (for example `[[planner], [search, code]]`). If the list is empty, the team's first agent is the
    main agent and calls all others."""
    align: Literal["weights", "none"] = "weights"
    """The weight of a call of a sub-agent in an episode with k calls: k̄/k (`weights`), where k̄ is the mean number of calls,
    or 1 (`none`)."""
    compare: Literal["level", "main"] = "level"
    """The advantage of a sub-agent: computed from its own returns (`level`), or the advantage of the main agent (`main`, as
    in MATPO)."""
    scale: Literal["std", "none"] = "std"
    """How advantages are scaled: `std` divides the differences from the mean by the standard deviation, and `none` does not
    scale them."""

    @model_validator(mode="after")
    def _one_main_agent(self) -> MGRPO:
        named = [name for level in self.levels for name in level]
        if self.levels and (len(self.levels) < 2 or len(self.levels[0]) != 1 or not all(self.levels)):
            raise ValueError(
                "`levels` needs one main agent in its first level and at least one level below it, for example "
                "`[[planner], [search, code]]`"
            )
        if repeated := [name for name in named if named.count(name) > 1]:
            raise ValueError(f"`levels` names '{repeated[0]}' twice; list each agent once")
        return self

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        check = partial(_check_levels, levels=self.levels, by_main=self.compare == "main")
        return self.row(self.name, judge=self.credit, checks=(check,))

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the advantage of each turn. For sub-agents, the advantage is multiplied by the weight of the turn."""
        members = by_agent(groups, self.rewards(groups, signals))
        if self.compare == "main":
            turns: dict[tuple[int, int], list[TurnKey]] = {}
            for key, _ in turns_of(groups):
                turns.setdefault((key.group, key.episode), []).append(key)
            mains = []
            for member in members:
                g, e, _ = member.keys[0]
                if member.place[1] == self._levels_of(groups[g].episodes[e])[0][0]:
                    mains.append(member._replace(keys=tuple(turns[g, e])))
            members = mains
        advantage = compare(members, BY_SCALE[self.scale], earlier)
        weight = self._weights(groups) if self.align == "weights" else {}
        return spread(self, groups, {key: weight.get(key, 1.0) * a for key, a in advantage.items()})

    def _levels_of(self, episode: Episode) -> Levels:
        return self.levels or (episode.agents[:1], episode.agents[1:])

    def _weights(self, groups: Sequence[Group]) -> dict[TurnKey, float]:
        """Return the weight k̄/k of each turn of a sub-agent."""
        calls: dict[str, dict[tuple[int, int], int]] = {}
        for g, e, episode in valid_episodes(groups):
            for agent, count in self._calls(episode).items():
                calls.setdefault(agent, {})[g, e] = count
        mean = {agent: sum(counts.values()) / len(counts) for agent, counts in calls.items()}
        return {
            key: mean[turn.agent] / calls[turn.agent][key.group, key.episode]
            for key, turn in turns_of(groups)
            if turn.agent in calls
        }

    def _calls(self, episode: Episode) -> dict[str, int]:
        """Return the number of calls of each sub-agent that has a turn in the episode."""
        level_of = {name: n for n, level in enumerate(self._levels_of(episode)) for name in level}
        calls: dict[str, int] = {}
        active: set[str] = set()
        callers: set[tuple[str, int]] = set()
        for turn in episode.turns:
            level = level_of[turn.agent]
            active = {
                name for name in active if level_of[name] <= level
            }  # agents of lower levels have returned
            if level > 0 and turn.caller is not None:
                if (turn.agent, turn.caller) not in callers:
                    calls[turn.agent] = calls.get(turn.agent, 0) + 1
                    callers.add((turn.agent, turn.caller))
            elif level > 0 and turn.agent not in active:
                calls[turn.agent] = calls.get(turn.agent, 0) + 1
                active.add(turn.agent)
        return calls


def _check_levels(team: Team, levels: Levels, by_main: bool) -> None:
    """Raise ConfigError if the levels do not fit the team."""
    names = [agent.name for agent in team.agents]
    if len(names) < 2:
        raise ConfigError(
            "`m_grpo` needs a main agent and sub-agents. Add agents, or set `algorithm.name: grpo`."
        )
    for level in levels:
        for name in level:
            need_known("`algorithm.levels`", "agent", name, names)
    listed = [name for level in levels for name in level] or names
    if missing := [name for name in names if name not in listed]:
        raise ConfigError(
            f"`algorithm.levels` does not contain the agent '{missing[0]}'. Add it to the level at which it is called."
        )
    main = levels[0][0] if levels else names[0]
    if by_main and not team.policy(main).trained:
        raise ConfigError(
            f"`algorithm.compare: main` needs a trained main agent, but '{main}' is frozen. Remove `compare`."
        )
