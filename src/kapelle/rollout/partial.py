"""Data types for unfinished episodes, which a resumed run continues (`training.asynchronous`).

An episode is determined by its task, its seed and its turns (`interventions.py`), so only the sampled turns are stored. A resumed run
replays these turns in a new episode state and continues sampling after them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kapelle.engines.rollout.protocol import joined_runs
from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.types import Episode, Group, Json, RewardEvent, Task, Turn


@dataclass(frozen=True, slots=True)
class PartialEpisode:
    """The recorded turns of one unfinished episode."""

    seed: int
    turns: tuple[Turn, ...] = ()
    """Recorded turns, in time order."""
    drafts: tuple[Turn, ...] = ()
    """Complete turns of a moment at which other agents are still sampling."""
    begun: tuple[Turn, ...] = ()
    """Turns that were requested, with the tokens sampled so far. Their prompts and the numbers of turns that they have seen are fixed."""
    reward_events: tuple[RewardEvent, ...] = ()
    """Rewards that agents received so far."""

    @property
    def sampled(self) -> tuple[Turn, ...]:
        """All turns with sampled tokens."""
        return (*self.turns, *self.drafts, *self.begun)


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """The episodes of one task, some of which may be unfinished."""

    task: Task
    number: int
    """Number of the step that started the group."""
    episodes: tuple[Episode | PartialEpisode, ...]

    @property
    def group(self) -> Group:
        """The group of finished episodes, which exists only after every episode has ended."""
        return Group(self.task, tuple(each for each in self.episodes if isinstance(each, Episode)))


def continued(begun: Turn, more: Turn) -> Turn:
    """Return an unfinished turn with the tokens of `more`, which were sampled after its own tokens."""
    last = begun if begun.completion_ids and not more.completion_ids else more
    runs = begun.runs if last is begun else joined_runs(begun.runs if begun.completion_ids else (), more.runs)
    return replace(
        begun,
        version=runs[-1][0],
        weights_hash=last.weights_hash,
        completion_ids=(*begun.completion_ids, *more.completion_ids),
        logprobs=(*begun.logprobs, *more.logprobs),
        versions=runs if len(runs) > 1 else (),
        finish_reason=more.finish_reason,
        text=more.text,
        routing=more.routing,
        constraint=more.constraint,
        thoughts=more.thoughts,
    )


def as_recorded(
    left: PartialEpisode, turns: Sequence[Turn], reward_events: Sequence[RewardEvent]
) -> tuple[tuple[Turn, ...], tuple[RewardEvent, ...]]:
    """Return the turns and reward events of a continued episode, with the replayed turns in their recorded order.

    During a replay, the episode does not wait for the sampler. Turns of agents that act independently may therefore be recorded in a
    different order.
    """
    known = dict(numbered(turns))
    before = [known.pop(key) for key, _ in numbered(left.turns) if key in known]
    ordered = tuple(replace(turn, index=index) for index, turn in enumerate((*before, *known.values())))
    return ordered, (*left.reward_events, *reward_events[len(left.reward_events) :])


def numbered(turns: Iterable[Turn]) -> list[tuple[tuple[str, int], Turn]]:
    """Return every turn with its key: the name of its agent and its index among the turns of this agent, from 0."""
    taken: Counter[str] = Counter()
    found = []
    for turn in turns:
        found.append(((turn.agent, taken[turn.agent]), turn))
        taken[turn.agent] += 1
    return found


def dump_partial(groups: Iterable[PartialGroup]) -> str:
    """Return groups as JSON lines, with one line per episode."""
    lines: list[bytes] = []
    for place, group in enumerate(groups):
        for each in group.episodes:
            labels = {"group": place, "number": group.number}
            if not isinstance(each, Episode):
                labels["recorded"], labels["drafts"] = len(each.turns), len(each.drafts)
                each = Episode(group.task, each.seed, (), each.sampled, reward_events=each.reward_events)  # noqa: PLW2901 - its form
            lines.append(dump_episode(each, None, **labels))
    return b"".join(lines).decode("ascii")


def load_partial(text: str) -> list[PartialGroup]:
    """Return the groups that `dump_partial` wrote. Raises DataError if a row is invalid."""
    groups: dict[int, tuple[int, list[Episode | PartialEpisode]]] = {}
    tasks: dict[int, Task] = {}
    for line in text.splitlines():
        row: dict[str, Json] = json.loads(line)
        episode = load_episode(row)
        tasks[row["group"]] = episode.task
        _, members = groups.setdefault(row["group"], (row["number"], []))
        if "recorded" not in row:
            members.append(episode)
            continue
        one, two = row["recorded"], row["recorded"] + row["drafts"]
        parts = episode.turns[:one], episode.turns[one:two], episode.turns[two:]
        members.append(PartialEpisode(episode.seed, *parts, episode.reward_events))
    return [PartialGroup(tasks[place], number, tuple(own)) for place, (number, own) in groups.items()]


# -------- Groups that another process rolls out (`continuous.py`)


class GroupKey(NamedTuple):
    """The identity of a group that is rolled out."""

    step: int
    """Number of the step whose tasks contain the group's task."""
    place: int
    """Index of the task among the tasks of this step."""
    attempt: int = 0
    """Number of times that the task was replaced because its group had no variance."""


Wanted = Mapping[GroupKey, PartialGroup]
"""Groups by key."""


def dump_wanted(groups: Wanted) -> str:
    """Return groups as JSON lines, of which the first line contains the keys."""
    return json.dumps([list(key) for key in groups]) + "\n" + dump_partial(groups.values())


def load_wanted(text: str) -> dict[GroupKey, PartialGroup]:
    """Return the groups that `dump_wanted` wrote."""
    keys, _, rows = text.partition("\n")
    return dict(zip((GroupKey(*key) for key in json.loads(keys)), load_partial(rows), strict=True))


class Exchange(NamedTuple):
    """The groups that a sampling process returns."""

    finished: Wanted
    unfinished: Wanted
    """The other wanted groups with their turns so far, if they were requested. Episodes that have ended may still lack rewards that
    depend on the whole group."""
