"""M-GRPO: a main agent that calls sub-agents 0, 1 … k times, normalised by level (2511.13288).

An agent's return is compared with its own in the task's other attempts, so that the levels, which differ in how
often they act and what they earn, are never mixed. Sub-agents are called a varying number of times. The paper aligns
their trajectories: from an attempt with few calls some are drawn again, from one with many some are dropped, until all have as many.
Here every call of an attempt with k calls weighs k̄/k, k̄ the mean number of calls of the step's attempts that have any: what drawing does
on average, without its noise. An attempt then counts once for an agent, however often it was called.

A call is an agent's turns that the same turn of another agent called for (`Turn.caller`); where that is unknown, its turns until
somebody of a higher level speaks again. It is worth the agent's whole return in the attempt.

`compare: main` gives every call the main agent's advantage, which with `align: none` and one policy for all agents is MATPO's idea
(2510.04678): workers have no score of their own, the planner's answer judges every rollout. Its code normalises over all
rollouts, workers' included; here each attempt counts once.

Deviations from the paper: weights in place of drawing; any number of levels and of agents in them, where the paper has two agents;
rewards are the environment's (`team_reward: mean` pays all the same), where the paper's sub-agent is also judged by an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from pydantic import model_validator

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import BY_SCALE, Earlier, by_agent, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.errors import ConfigError, need_known
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.team import Team
from kapelle.types import Episode, Group

Levels = tuple[tuple[str, ...], ...]


class MGRPO(MonteCarlo):
    """Settings of multi-agent GRPO for teams with a main agent."""

    name: Literal["m_grpo"] = "m_grpo"
    levels: Levels = ()
    """Agents by level: the main agent alone, then those that it calls, then those that they call, such as
    `[[planner], [search, code]]`. Empty: the team's first agent calls all others."""
    align: Literal["weights", "none"] = "weights"
    """`weights`: of k calls each weighs 1/k, over the mean of 1/k; `none`: a call weighs as much in any attempt."""
    compare: Literal["level", "main"] = "level"
    """`level`: an agent's return with its own in other attempts; `main`: all get the main agent's advantage (MATPO)."""
    scale: Literal["std", "none"] = "std"
    """`std`: divided by the spread of the returns that are compared; `none`: differences from their mean alone."""

    @model_validator(mode="after")
    def _one_main_agent(self) -> MGRPO:
        named = [name for level in self.levels for name in level]
        if self.levels and (len(self.levels) < 2 or len(self.levels[0]) != 1 or not all(self.levels)):
            raise ValueError(
                "`levels` begins with the main agent alone and has at least one level below it, such as "
                "`[[planner], [search, code]]`"
            )
        if twice := [name for name in named if named.count(name) > 1]:
            raise ValueError(f"`levels` names '{twice[0]}' twice; every agent has one level")
        return self

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        check = partial(_check_levels, levels=self.levels, by_main=self.compare == "main")
        return self.row(self.name, judge=self.credit, checks=(check,))

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return each turn's advantage, a sub-agent's times its weight."""
        members = by_agent(groups, self.rewards(groups, signals))
        if self.compare == "main":
            turns: dict[tuple[int, int], list[TurnKey]] = {}
            for key, _ in turns_of(groups):
                turns.setdefault((key.group, key.episode), []).append(key)
            mains = []
            for member in members:
                group, episode, turn = member.keys[0]
                played = groups[group].episodes[episode]
                if played.turns[turn].agent == self._levels_of(played)[0][0]:
                    mains.append(member._replace(keys=tuple(turns[group, episode])))
            members = mains
        advantage = compare(members, BY_SCALE[self.scale], earlier)
        weight = self._weights(groups) if self.align == "weights" else {}
        return spread(self, groups, {key: weight.get(key, 1.0) * a for key, a in advantage.items()})

    def _levels_of(self, episode: Episode) -> Levels:
        return self.levels or (episode.agents[:1], episode.agents[1:])

    def _weights(self, groups: Sequence[Group]) -> dict[TurnKey, float]:
        """Return the weight k̄/k of every turn of a sub-agent."""
        calls: dict[str, dict[tuple[int, int], int]] = {}
        for g, group in enumerate(groups):
            for e, episode in enumerate(group.episodes):
                if episode.error is None:
                    for agent, count in self._calls(episode).items():
                        calls.setdefault(agent, {})[g, e] = count
        mean = {agent: sum(counts.values()) / len(counts) for agent, counts in calls.items()}
        return {
            key: mean[turn.agent] / calls[turn.agent][key.group, key.episode]
            for key, turn in turns_of(groups)
            if turn.agent in calls
        }

    def _calls(self, episode: Episode) -> dict[str, int]:
        """Return how often each sub-agent that spoke was called."""
        level_of = {name: n for n, level in enumerate(self._levels_of(episode)) for name in level}
        calls: dict[str, int] = {}
        called: set[str] = set()
        callers: set[tuple[str, int]] = set()
        for turn in episode.turns:
            level = level_of[turn.agent]
            called = {name for name in called if level_of[name] <= level}  # those below have returned
            if level > 0 and turn.caller is not None:
                if (turn.agent, turn.caller) not in callers:
                    calls[turn.agent] = calls.get(turn.agent, 0) + 1
                    callers.add((turn.agent, turn.caller))
            elif level > 0 and turn.agent not in called:
                calls[turn.agent] = calls.get(turn.agent, 0) + 1
                called.add(turn.agent)
        return calls


def _check_levels(team: Team, levels: Levels, by_main: bool) -> None:
    """Raise ConfigError unless every agent of the team has a level, and the main agent learns where all get its advantage."""
    names = [agent.name for agent in team.agents]
    if len(names) < 2:
        raise ConfigError(
            "`m_grpo` is for a main agent and those that it calls. Add agents, or set `algorithm.name: grpo`."
        )
    for level in levels:
        for name in level:
            need_known("`algorithm.levels`", "agent", name, names)
    listed = [name for level in levels for name in level] or names
    if missing := [name for name in names if name not in listed]:
        raise ConfigError(
            f"`algorithm.levels` leaves out '{missing[0]}'. Add it to the level of those that are called with it."
        )
    main = levels[0][0] if levels else names[0]
    if by_main and not team.policy(main).trained:
        raise ConfigError(
            f"`algorithm.compare: main` gives all agents the advantage of '{main}', which is frozen and has none. Leave `compare` out."
        )
