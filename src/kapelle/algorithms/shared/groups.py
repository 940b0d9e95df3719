"""Comparison sets: which returns of a group's episodes are compared with one another, and how.

All episodes of a group are attempts at one task, so their first prompts are the same. From an agent's second turn
on they differ, by earlier turns: a set over later turns compares answers to different prompts, and its
baseline is then only an average over histories. Tree sampling (`at_grpo`) makes such sets exact.

Sets differ in size where agents stop early, a router picks, or episodes fail. R − mean_g carries (n − 1)/n of what a
comparison with the others would, so the centred form of a set of n is n/(n − 1) · (N − 1)/N · (R − mean_g), N the most
attempts at one task: every set weighs alike, and a full one has the paper's own R − mean_g. Division by a set's spread is
left as the papers have it. A member that is alone in its set is compared with earlier returns (`Earlier`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kapelle.functional.advantages import group_centred, group_scaled, leave_one_out
from kapelle.rows import TurnKey
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.types import Episode, Group, Turn

Estimator = Callable[[Tensor, Tensor, int], Tensor]
"""(value_B, set_B, sets) → advantage_B, as the group estimators of `functional.advantages`."""


Like = tuple[int | str, ...]
"""What returns of different tasks have in common that can stand in for one another: game, agent, role, number of the turn."""


class Member(NamedTuple):
    """One value in one comparison set, and the turns that get its advantage."""

    place: tuple[int | str, ...]
    """Names the set."""
    value: float
    tokens: int
    keys: tuple[TurnKey, ...]
    like: Like = ()
    """Names the earlier returns that it is compared with if it is alone in its set."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the members of a set are compared with one another, and a member that is alone with earlier returns."""

    among: Estimator
    resized: bool = False
    """Whether advantages in a set of n are multiplied by n/(n − 1) · (N − 1)/N, for estimators that subtract the set's own
    mean: a small set gives smaller ones on average. N is what a full set has, the most members of a set or episodes of a task in
    the step; its factor is 1. A member that is alone is compared with earlier returns, and multiplied by (N − 1)/N."""
    scaled: bool = False
    """Whether differences are divided by a spread."""
    start: float | None = None
    """What a member that is alone is compared with before there are earlier returns; None takes the step's other tasks."""


CENTRED = Comparison(group_centred, resized=True)
SCALED = Comparison(group_scaled, scaled=True)
LEFT_OUT = Comparison(leave_one_out)
BY_SCALE = {"std": SCALED, "none": CENTRED}


Place = tuple[str, str, str]
"""Game (empty outside of a mixture), agent, and role (empty where the agent's name is its role)."""


def place_of(episode: Episode, agent: str) -> Place:
    """Return the game, agent and role of an episode: returns of different places have different odds and stakes."""
    return episode.task.part, agent, episode.roles.get(agent, "")


# -------- Comparison sets of a step; each function has one member per value, and a turn in one set at most
#
# `reward` has the rewards of all trained turns of valid episodes, by turn (`rewards.step_rewards`).


def by_agent(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """One set per task and agent: the agent's return, for all its turns (GRPO with one policy per role)."""
    members = []
    for g, e, episode, own in _trained(groups):
        for agent, turns in own.items():
            keys = tuple([TurnKey(g, e, turn.index) for turn in turns])
            tokens = sum([len(turn.completion_ids) for turn in turns])
            value = sum([reward[key] for key in keys])
            members.append(Member((g, agent), value, tokens, keys, place_of(episode, agent)))
    return members


def by_episode(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """One set per task: the episode's whole return, for every turn of every agent."""
    members = []
    for g, e, episode, own in _trained(groups):
        turns = sorted((turn for turns in own.values() for turn in turns), key=lambda turn: turn.index)
        if turns:
            keys = tuple(TurnKey(g, e, turn.index) for turn in turns)
            tokens = sum(len(turn.completion_ids) for turn in turns)
            members.append(Member((g,), sum(reward[key] for key in keys), tokens, keys, (episode.task.part,)))
    return members


def by_round(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """One set per task and round: the team's return from that round on, the same for all agents (MAGRPO)."""
    members = []
    for g, e, episode, own in _trained(groups):
        to_go = 0.0
        for k in reversed(range(max(map(len, own.values()), default=0))):
            turns = [turns[k] for turns in own.values() if k < len(turns)]
            keys = tuple(TurnKey(g, e, turn.index) for turn in turns)
            to_go += sum(reward[key] for key in keys)
            tokens = sum(len(turn.completion_ids) for turn in turns)
            members.append(Member((g, k), to_go, tokens, keys, (episode.task.part, k)))
    return members


def by_agent_turn(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """One set per task, agent and turn number: the agent's return from that turn on (AT-GRPO)."""
    members = []
    for g, e, episode, own in _trained(groups):
        for agent, turns in own.items():
            to_go = 0.0
            for k in reversed(range(len(turns))):
                key = TurnKey(g, e, turns[k].index)
                to_go += reward[key]
                like = (*place_of(episode, agent), k)
                members.append(Member((g, agent, k), to_go, len(turns[k].completion_ids), (key,), like))
    return members


def by_state(
    groups: Sequence[Group], reward: Mapping[TurnKey, float], *, gamma: float = 1.0, latest: bool = False
) -> list[Member]:
    """One set per task, agent and state: the agent's return from that turn on, γ from turn to turn (GiGPO).

    A state is what the agent read, token for token and picture for picture; with `latest` what it heard since its last turn.
    """
    numbers: dict[object, int] = {}
    members = []
    for g, e, episode, own in _trained(groups):
        for agent, turns in own.items():
            to_go = 0.0
            for turn in reversed(turns):
                key = TurnKey(g, e, turn.index)
                to_go = reward[key] + gamma * to_go
                state = turn.heard if latest else (turn.prompt_ids, turn.images)
                number = numbers.setdefault(state, len(numbers))
                place = place_of(episode, agent)
                members.append(Member((g, agent, number), to_go, len(turn.completion_ids), (key,), place))
    return members


def by_prompt(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """One set per task, policy, turn number and prompt: the agent's return from that turn on, also for several agents of one policy.

    Agents that read the same are then attempts at the same thing. Their mean is a baseline where what an agent is paid does not
    depend on what the others of its set said in its own episode.
    """
    members = []
    for member in by_agent_turn(groups, reward):
        g, _, k = member.place
        (key,) = member.keys
        turn = groups[key.group].episodes[key.episode].turns[key.turn]
        read: tuple[int | str, ...] = (*turn.prompt_ids, *(image.hash for image in turn.images))
        members.append(member._replace(place=(g, k, turn.policy, *read)))
    return members


def by_turns_of_agent(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """One set per task and agent over all its turns, each with the agent's return (Dr.MAS)."""
    return [member._replace(keys=(key,)) for member in by_agent(groups, reward) for key in member.keys]


def _trained(groups: Sequence[Group]) -> list[tuple[int, int, Episode, dict[str, list[Turn]]]]:
    """Return the trained turns of every valid episode (group, episode) by agent, each agent's in time order."""
    found = []
    for g, group in enumerate(groups):
        for e, episode in enumerate(group.episodes):
            if episode.error is None:
                own: dict[str, list[Turn]] = {}
                for turn in episode.turns:
                    if turn.trained:
                        own.setdefault(turn.agent, []).append(turn)
                found.append((g, e, episode, own))
    return found


# -------- Comparing: within a set, and with earlier returns where a member is alone in its set


class Moments(NamedTuple):
    """Mean and variance of returns."""

    mean: float
    variance: float


class Earlier:
    """Running mean and variance of the returns of earlier steps, by what they have in common (`Member.like`).

    A step's returns move them together, whatever their order: each takes `SHARE` of what is left to the earlier ones.
    """

    def __init__(self) -> None:
        self._known: dict[Like, Moments] = {}

    def of(self, like: Like) -> Moments | None:
        """Return what is known of returns like this; None before the first step that had any."""
        return self._known.get(like)

    def take_in(self, members: Sequence[Member]) -> None:
        """Move the means and variances by a step's returns."""
        values: dict[Like, list[float]] = {}
        for member in members:
            values.setdefault(member.like, []).append(member.value)
        for like, own in values.items():
            new = _moments(own)
            old = self._known.get(like, new)
            self._known[like] = _mixed(old, new, 1.0 - (1.0 - SHARE) ** len(own))

    def state(self) -> list[list[Any]]:
        """Return everything that is known, as rows of plain values."""
        return [[list(like), *moments] for like, moments in self._known.items()]

    def load_state(self, rows: Sequence[Sequence[Any]]) -> None:
        """Restore what `state` returned."""
        self._known = {tuple(like): Moments(mean, variance) for like, mean, variance in rows}


SHARE = 0.05
"""What one return has in the running mean and variance."""


def compare(
    members: Sequence[Member], how: Comparison | Estimator, earlier: Earlier | None = None
) -> dict[TurnKey, float]:
    """Return each turn's advantage: within its set, or over `earlier` returns, which then take in these ones.

    A plain estimator is taken as it is, without weighing sets of different size alike. Without earlier returns a member that
    is alone is compared with the step's other tasks, and gets 0 where they have none like it.
    """
    advantages = compared_values(members, how, earlier)
    return {key: a for member, a in zip(members, advantages, strict=True) for key in member.keys}


def compared_values(
    members: Sequence[Member], how: Comparison | Estimator, earlier: Earlier | None = None
) -> list[float]:
    """Return each member's advantage; see `compare`."""
    if not members:
        return []
    how = how if isinstance(how, Comparison) else Comparison(how)
    numbers: dict[tuple[int | str, ...], int] = {}
    set_B = torch.tensor([numbers.setdefault(member.place, len(numbers)) for member in members])
    value_B = torch.tensor([member.value for member in members], dtype=torch.float64)
    size_B = set_B.bincount()[set_B]
    advantage_B = how.among(value_B, set_B, len(numbers)).double()
    episodes: dict[int, set[int]] = {}
    for member in members:
        for key in member.keys:
            episodes.setdefault(key.group, set()).add(key.episode)
    most = max([int(size_B.max()), *map(len, episodes.values())])
    if how.resized:
        # Exactly 1 for a full set.
        advantage_B = advantage_B * (size_B * (most - 1)) / ((size_B - 1).clamp(min=1) * most)
    advantages: list[float] = advantage_B.tolist()
    alone = (size_B == 1).nonzero().flatten().tolist()
    if alone:
        lonely = [members[b] for b in alone]
        found = against_earlier(lonely, members, earlier or Earlier(), scaled=how.scaled, start=how.start)
        whole = (most - 1) / most if how.resized and most > 1 else 1.0
        for b, advantage in zip(alone, found, strict=True):
            advantages[b] = whole * advantage
    if earlier is not None:
        earlier.take_in(members)
    return advantages


def against_earlier(
    alone: Sequence[Member],
    members: Sequence[Member],
    earlier: Earlier,
    *,
    scaled: bool = False,
    start: float | None = None,
) -> list[float]:
    """Return how much better each return is than earlier ones like it; all of the step are `members`.

    Before there are any it is compared with `start`, or else with the others like it in this step, which are of other
    tasks; it gets 0 where there are none. With `scaled` the difference is divided by a spread that counts it too, so that
    it stays below 5.
    """
    likes = {member.like for member in alone}
    step: dict[Like, list[float]] = {}
    for member in members:
        if member.like in likes:
            step.setdefault(member.like, []).append(member.value)
    found = []
    for member in alone:
        moments = earlier.of(member.like)
        if moments is None and start is not None:
            moments = Moments(start, 0.0)
        if moments is None:
            others = list(step[member.like])
            others.remove(member.value)
            moments = _moments(others or [member.value])
        difference = member.value - moments.mean
        spread = math.sqrt(_mixed(moments, Moments(member.value, 0.0), SHARE).variance)
        found.append(difference / (spread + 1e-6) if scaled else difference)
    return found


def _moments(values: Sequence[float]) -> Moments:
    mean = math.fsum(values) / len(values)
    return Moments(mean, math.fsum((value - mean) ** 2 for value in values) / len(values))


def _mixed(old: Moments, new: Moments, share: float) -> Moments:
    """Return the moments of a mixture in which the new returns have `share`."""
    apart = new.mean - old.mean
    spread = (1.0 - share) * old.variance + share * new.variance
    return Moments(old.mean + share * apart, spread + share * (1.0 - share) * apart * apart)
