"""Comparison sets define which returns of a group are compared with one another, and how.

All episodes of a group have the same task, so the first prompts of an agent are equal. The later prompts of the agent differ,
because earlier turns differ. A set over later turns compares completions of different prompts, and its baseline is an average
over histories. With tree sampling (`at_grpo`), all prompts in a set are equal.

Sets differ in size, because agents stop early, a router selects agents, or episodes fail. In a set of size n, R − mean_g is
on average (n − 1)/n of the difference from the other members. The centred form of a set is therefore

    n/(n − 1) · (N − 1)/N · (R − mean_g),    N = size of a full set

With this factor, every set has the same weight, and a full set has R − mean_g as in the paper. Division by the standard
deviation of a set follows the papers. If a set has only one member, the member is compared with returns of earlier steps
(`Earlier`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kapelle.functional.advantages import group_centred, group_relative, group_scaled, leave_one_out
from kapelle.rows import TurnKey
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.types import Episode, Group, Turn

Estimator = Callable[[Tensor, Tensor, int], Tensor]
"""A function that maps values of shape (B,), their set labels of shape (B,) and the number of sets to advantages of shape
(B,), like the group estimators in `functional.advantages`."""


Like = tuple[int | str, ...]
"""The key of returns that are comparable across tasks, for example: game, agent, role, turn number."""


class Member(NamedTuple):
    """A member of a comparison set: one value, and the turns that get its advantage."""

    place: tuple[int | str, ...]
    """The key of the comparison set."""
    value: float
    tokens: int
    keys: tuple[TurnKey, ...]
    like: Like = ()
    """The key of the earlier returns with which the value is compared if the set has no other member."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the members of a set are compared with one another, and how a lone member is compared with earlier returns."""

    among: Estimator
    resized: bool = False
    """Whether the advantages in a set of size n are multiplied by n/(n − 1) · (N − 1)/N, and the advantage of a lone member
    by (N − 1)/N. The factor is needed for estimators that subtract the set's own mean. N is the size of a full set: the size
    of the largest set, or the largest number of episodes per task, in the step."""
    scale: Literal["none", "std", "mean"] = "none"
    """By what the differences from the mean are divided: by 1, by a standard deviation, or by a mean."""
    start: float | None = None
    """The value with which a lone member is compared as long as there are no earlier returns. With None, the member is
    compared with the other tasks of the step."""


CENTRED = Comparison(group_centred, resized=True)
SCALED = Comparison(group_scaled, scale="std")
RELATIVE = Comparison(group_relative, scale="mean")
LEAVE_ONE_OUT = Comparison(leave_one_out)
BY_SCALE = {"std": SCALED, "none": CENTRED, "mean": RELATIVE}


Place = tuple[str, str, str]
"""The key of an agent in an episode: the game (empty outside of a mixture), the agent, and the role (empty if the agent's
name is its role)."""


def place_of(episode: Episode, agent: str) -> Place:
    """Return the game, the name and the role of an agent in an episode. Returns are comparable only if all three are equal."""
    return episode.task.part, agent, episode.roles.get(agent, "")


# -------- Comparison sets of a step: each function returns one member per value, and puts a turn into at most one set
#
# `reward` holds the rewards of all trained turns of valid episodes, by turn (`rewards.step_rewards`).


def by_agent(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """Return members for one set per task and agent.

    The value is the agent's return, for all of its turns (GRPO with one policy per role).
    """
    members = []
    for g, e, episode, own in _trained(groups):
        for agent, turns in own.items():
            value = sum([reward[TurnKey(g, e, turn.index)] for turn in turns])
            members.append(_member(g, e, turns, (g, agent), value, place_of(episode, agent)))
    return members


def by_episode(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """Return members for one set per task. The value is the return of the whole episode, for every turn of every agent."""
    members = []
    for g, e, episode, own in _trained(groups):
        turns = sorted((turn for turns in own.values() for turn in turns), key=lambda turn: turn.index)
        if turns:
            value = sum([reward[TurnKey(g, e, turn.index)] for turn in turns])
            members.append(_member(g, e, turns, (g,), value, (episode.task.part,)))
    return members


def by_round(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """Return members for one set per task and round. The value is the team's return from that round on, for all agents (MAGRPO)."""
    members = []
    for g, e, episode, own in _trained(groups):
        to_go = 0.0
        for k in reversed(range(max(map(len, own.values()), default=0))):
            turns = [turns[k] for turns in own.values() if k < len(turns)]
            to_go += sum([reward[TurnKey(g, e, turn.index)] for turn in turns])
            members.append(_member(g, e, turns, (g, k), to_go, (episode.task.part, k)))
    return members


def by_agent_turn(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """Return members for one set per task, agent and turn number. The value is the agent's return from that turn on (AT-GRPO)."""
    members = []
    for g, e, episode, k, turn, to_go in _returns_to_go(groups, reward):
        like = (*place_of(episode, turn.agent), k)
        members.append(_member(g, e, [turn], (g, turn.agent, k), to_go, like))
    return members


def by_state(
    groups: Sequence[Group], reward: Mapping[TurnKey, float], *, gamma: float = 1.0, latest: bool = False
) -> list[Member]:
    """Return members for one set per task, agent and state.

    The value is the agent's return from the turn on, discounted by γ per turn (GiGPO). A state is the whole prompt of the
    agent: all tokens and images must be equal. With `latest`, a state is the messages that the agent has observed since its
    last turn.
    """
    numbers: dict[object, int] = {}
    members = []
    for g, e, episode, _, turn, to_go in _returns_to_go(groups, reward, gamma):
        state = turn.new_messages if latest else (turn.prompt_ids, turn.images)
        number = numbers.setdefault(state, len(numbers))
        place = place_of(episode, turn.agent)
        members.append(_member(g, e, [turn], (g, turn.agent, number), to_go, place))
    return members


def by_prompt(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """Return members for one set per task, policy, turn number and prompt. The value is the agent's return from that turn on.

    Several agents of one policy can share a set, because their completions are samples for the same prompt. The mean is a
    valid baseline if an agent's reward is independent of the other members' completions in its own episode.
    """
    members = []
    for member in by_agent_turn(groups, reward):
        g, _, k = member.place
        (key,) = member.keys
        turn = groups[key.group].episodes[key.episode].turns[key.turn]
        prompt: tuple[int | str, ...] = (*turn.prompt_ids, *(image.hash for image in turn.images))
        members.append(member._replace(place=(g, k, turn.policy, *prompt)))
    return members


def by_turns_of_agent(groups: Sequence[Group], reward: Mapping[TurnKey, float]) -> list[Member]:
    """Return members for one set per task and agent. Each turn is one member, and its value is the agent's return (Dr.MAS)."""
    return [member._replace(keys=(key,)) for member in by_agent(groups, reward) for key in member.keys]


def valid_episodes(groups: Sequence[Group]) -> list[tuple[int, int, Episode]]:
    """Return every valid episode as a tuple (group number, episode number, episode)."""
    return [
        (g, e, episode)
        for g, group in enumerate(groups)
        for e, episode in enumerate(group.episodes)
        if episode.error is None
    ]


def _trained(groups: Sequence[Group]) -> list[tuple[int, int, Episode, dict[str, list[Turn]]]]:
    """Return the trained turns of every valid episode, as a mapping from agents to their turns in time order."""
    found = []
    for g, e, episode in valid_episodes(groups):
        own: dict[str, list[Turn]] = {}
        for turn in episode.turns:
            if turn.trained:
                own.setdefault(turn.agent, []).append(turn)
        found.append((g, e, episode, own))
    return found


def _returns_to_go(
    groups: Sequence[Group], reward: Mapping[TurnKey, float], gamma: float = 1.0
) -> Iterator[tuple[int, int, Episode, int, Turn, float]]:
    """Yield tuples (group number, episode number, episode, number among the agent's turns, turn, return from that turn on)."""
    for g, e, episode, own in _trained(groups):
        for turns in own.values():
            to_go = 0.0
            for k in reversed(range(len(turns))):
                to_go = reward[TurnKey(g, e, turns[k].index)] + gamma * to_go
                yield g, e, episode, k, turns[k], to_go


def _member(
    g: int, e: int, turns: Sequence[Turn], place: tuple[int | str, ...], value: float, like: Like
) -> Member:
    tokens = sum([len(turn.completion_ids) for turn in turns])
    return Member(place, value, tokens, tuple([TurnKey(g, e, turn.index) for turn in turns]), like)


# -------- Comparison within a set, and comparison of a lone member with earlier returns


class Moments(NamedTuple):
    """The mean and variance of returns."""

    mean: float
    variance: float


class Earlier:
    """The running mean and variance of the returns of earlier steps, by `Member.like`.

    All returns of a step update the mean and variance at once, in any order: n returns together have the weight 1 − (1 −
    `SHARE`)ⁿ.
    """

    def __init__(self) -> None:
        self._known: dict[Like, Moments] = {}

    def of(self, like: Like) -> Moments | None:
        """Return the mean and variance of earlier returns with this key, or None if there have been no such returns."""
        return self._known.get(like)

    def take_in(self, members: Sequence[Member]) -> None:
        """Update the means and variances with the returns of a step."""
        values: dict[Like, list[float]] = {}
        for member in members:
            values.setdefault(member.like, []).append(member.value)
        for like, own in values.items():
            new = _moments(own)
            old = self._known.get(like, new)
            self._known[like] = _mixed(old, new, 1.0 - (1.0 - SHARE) ** len(own))

    def state(self) -> list[list[Any]]:
        """Return all keys, means and variances as rows of plain values."""
        return [[list(like), *moments] for like, moments in self._known.items()]

    def load_state(self, rows: Sequence[Sequence[Any]]) -> None:
        """Restore the state that a call of `state` returned."""
        self._known = {tuple(like): Moments(mean, variance) for like, mean, variance in rows}


SHARE = 0.05
"""The weight of one return in the running mean and variance."""


def compare(
    members: Sequence[Member], how: Comparison | Estimator, earlier: Earlier | None = None
) -> dict[TurnKey, float]:
    """Return the advantage of each turn within its set. A lone member is compared with `earlier` returns.

    The returns of the step are then added to `earlier`. If there are no earlier returns, a lone member is compared with
    members of other tasks that have the same `like`; without such members, its advantage is 0. A plain estimator does not
    correct for different sizes of sets.
    """
    advantages = compared_values(members, how, earlier)
    return {key: a for member, a in zip(members, advantages, strict=True) for key in member.keys}


def compared_values(
    members: Sequence[Member], how: Comparison | Estimator, earlier: Earlier | None = None
) -> list[float]:
    """Return the advantage of each member. See `compare`."""
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
        # The factor is exactly 1 for a full set.
        advantage_B = advantage_B * (size_B * (most - 1)) / ((size_B - 1).clamp(min=1) * most)
    advantages: list[float] = advantage_B.tolist()
    alone = (size_B == 1).nonzero().flatten().tolist()
    if alone:
        found = against_earlier(
            [members[b] for b in alone], members, earlier or Earlier(), scale=how.scale, start=how.start
        )
        factor = (most - 1) / most if how.resized and most > 1 else 1.0
        for b, advantage in zip(alone, found, strict=True):
            advantages[b] = factor * advantage
    if earlier is not None:
        earlier.take_in(members)
    return advantages


def against_earlier(
    alone: Sequence[Member],
    members: Sequence[Member],
    earlier: Earlier,
    *,
    scale: Literal["none", "std", "mean"] = "none",
    start: float | None = None,
) -> list[float]:
    """Return the value of each lone member minus the mean of earlier returns with the same `like`.

    The argument `members` contains all members of the step. If there are no earlier returns, a value is compared with
    `start`. Without `start`, the value is compared with the step's other members of the same `like`, which belong to other
    tasks; without such members, the result is 0. With `scale`, the difference is divided by a standard deviation or mean that
    includes the value, so that the result stays below 5 for `std` and at most 20 for `mean`.
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
        mixed = _mixed(moments, Moments(member.value, 0.0), SHARE)
        if scale == "std":
            difference /= math.sqrt(mixed.variance) + 1e-6
        elif scale == "mean" and difference:
            difference /= mixed.mean
        found.append(difference)
    return found


def _moments(values: Sequence[float]) -> Moments:
    mean = math.fsum(values) / len(values)
    return Moments(mean, math.fsum((value - mean) ** 2 for value in values) / len(values))


def _mixed(old: Moments, new: Moments, share: float) -> Moments:
    """Return the moments of a mixture in which the new returns have the weight `share`."""
    difference = new.mean - old.mean
    variance = (1.0 - share) * old.variance + share * new.variance
    return Moments(old.mean + share * difference, variance + share * (1.0 - share) * difference * difference)
