"""Comparison sets: which returns of a group's episodes are compared with one another.

All episodes of a group are attempts at one task, so their first prompts are the same. From an agent's second turn
on they differ, by earlier turns: a set over later turns compares answers to different prompts, and its
baseline is then only an average over histories. Tree sampling (`at_grpo`) makes such sets exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kapelle.rows import TurnKey
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.types import Episode, Group, Turn

TurnRewards = Callable[[tuple[int, int], Episode], Mapping[int, float]]
"""What each turn of the episode at a place (group, episode) is paid, by its index."""

Estimator = Callable[[Tensor, Tensor, int], Tensor]
"""(value_B, set_B, sets) → advantage_B, as the group estimators of `functional.advantages`."""


class Member(NamedTuple):
    """One value in one comparison set, and the turns that get its advantage."""

    place: tuple[int | str, ...]
    """Names the set."""
    value: float
    tokens: int
    keys: tuple[TurnKey, ...]


Place = tuple[str, str, str]
"""Game (empty outside of a mixture), agent, and role (empty where the agent's name is its role)."""


def place_of(episode: Episode, agent: str) -> Place:
    """Return the game, agent and role of an episode: returns of different places have different odds and stakes."""
    return episode.task.part, agent, episode.roles.get(agent, "")


class Sets(Protocol):
    """Makes the members of all comparison sets of a step; pure."""

    def __call__(self, groups: Sequence[Group], rewards: TurnRewards) -> list[Member]:
        """Return one member per value; a turn is in one set at most."""
        ...


def by_agent(groups: Sequence[Group], rewards: TurnRewards) -> list[Member]:
    """One set per task and agent: the agent's return, for all its turns (GRPO with one policy per role)."""
    members = []
    for g, e, episode in _valid(groups):
        paid = rewards((g, e), episode)
        for agent, turns in _trained(episode).items():
            keys = tuple(TurnKey(g, e, turn.index) for turn in turns)
            tokens = sum(len(turn.completion_ids) for turn in turns)
            members.append(Member((g, agent), sum(paid[turn.index] for turn in turns), tokens, keys))
    return members


def by_episode(groups: Sequence[Group], rewards: TurnRewards) -> list[Member]:
    """One set per task: the episode's whole return, for every turn of every agent."""
    members = []
    for g, e, episode in _valid(groups):
        turns = [turn for turn in episode.turns if turn.trained]
        if turns:
            keys = tuple(TurnKey(g, e, turn.index) for turn in turns)
            tokens = sum(len(turn.completion_ids) for turn in turns)
            members.append(Member((g,), sum(rewards((g, e), episode).values()), tokens, keys))
    return members


def by_round(groups: Sequence[Group], rewards: TurnRewards) -> list[Member]:
    """One set per task and round: the team's return from that round on, the same for all agents (MAGRPO)."""
    members = []
    for g, e, episode in _valid(groups):
        paid = rewards((g, e), episode)
        rounds: dict[int, list[int]] = {}
        for turns in _trained(episode).values():
            for k, turn in enumerate(turns):
                rounds.setdefault(k, []).append(turn.index)
        to_go = 0.0
        for k in sorted(rounds, reverse=True):
            to_go += sum(paid[index] for index in rounds[k])
            keys = tuple(TurnKey(g, e, index) for index in rounds[k])
            tokens = sum(len(episode.turns[index].completion_ids) for index in rounds[k])
            members.append(Member((g, k), to_go, tokens, keys))
    return members


def by_agent_turn(groups: Sequence[Group], rewards: TurnRewards) -> list[Member]:
    """One set per task, agent and turn number: the agent's return from that turn on (AT-GRPO)."""
    members = []
    for g, e, episode in _valid(groups):
        paid = rewards((g, e), episode)
        for agent, turns in _trained(episode).items():
            to_go = 0.0
            for k in reversed(range(len(turns))):
                to_go += paid[turns[k].index]
                key = TurnKey(g, e, turns[k].index)
                members.append(Member((g, agent, k), to_go, len(turns[k].completion_ids), (key,)))
    return members


def by_turns_of_agent(groups: Sequence[Group], rewards: TurnRewards) -> list[Member]:
    """One set per task and agent over all its turns, each with the agent's return (Dr.MAS)."""
    return [
        Member(member.place, member.value, member.tokens, (key,))
        for member in by_agent(groups, rewards)
        for key in member.keys
    ]


def compare(members: Sequence[Member], estimate: Estimator) -> dict[TurnKey, float]:
    """Return each turn's advantage by an estimator over the sets."""
    if not members:
        return {}
    numbers: dict[tuple[int | str, ...], int] = {}
    set_B = torch.tensor([numbers.setdefault(member.place, len(numbers)) for member in members])
    value_B = torch.tensor([member.value for member in members], dtype=torch.float64)
    advantage_B = estimate(value_B, set_B, len(numbers)).tolist()
    return {key: a for member, a in zip(members, advantage_B, strict=True) for key in member.keys}


def _valid(groups: Sequence[Group]) -> list[tuple[int, int, Episode]]:
    return [
        (g, e, episode)
        for g, group in enumerate(groups)
        for e, episode in enumerate(group.episodes)
        if episode.error is None
    ]


def _trained(episode: Episode) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {}
    for turn in episode.turns:
        if turn.trained:
            turns.setdefault(turn.agent, []).append(turn)
    return turns
