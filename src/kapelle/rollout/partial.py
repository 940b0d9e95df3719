"""Data types for unfinished episodes, which the next step continues with newer weights.

An episode is determined by its task, its seed and its turns (`interventions.py`), so only the sampled turns are stored. The next step
replays these turns in a new episode state and continues sampling after them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    def done(self) -> bool:
        """Whether every episode has ended."""
        return all(isinstance(episode, Episode) for episode in self.episodes)

    @property
    def group(self) -> Group:
        """The group of finished episodes, which exists only after every episode has ended."""
        return Group(self.task, tuple(each for each in self.episodes if isinstance(each, Episode)))


@dataclass(frozen=True, slots=True)
class EndOfStep:
    """The condition under which a step may end with unfinished groups."""

    must: tuple[int, ...]
    """Indices of the groups that must finish in this step, because they would become too old."""
    most: int
    """Maximum number of groups that may stay unfinished."""

    def __call__(self, done: Sequence[bool]) -> bool:
        """Return whether the step may end. The argument `done` contains, for each group, whether the group is done."""
        return all(done[place] for place in self.must) and sum(done) >= len(done) - self.most


def grown(turn: Turn, ids: Sequence[int], logprobs: Sequence[float], version: int, weights_hash: str) -> Turn:
    """Return a turn to which completion tokens were added that these weights sampled."""
    if turn.completion_ids and not ids:
        return turn
    runs = turn.runs if turn.completion_ids else ()
    before = runs[-1][1] if runs and runs[-1][0] == version else 0
    runs = (*(runs[:-1] if before else runs), (version, before + len(ids)))
    return replace(
        turn,
        version=version,
        weights_hash=weights_hash,
        completion_ids=(*turn.completion_ids, *ids),
        logprobs=(*turn.logprobs, *logprobs),
        versions=runs if len(runs) > 1 else (),
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


def unfinished_turns(groups: Iterable[PartialGroup]) -> list[Turn]:
    """Return the trained turns of all episodes that have not failed."""
    found: list[Turn] = []
    for each in (episode for group in groups for episode in group.episodes):
        if isinstance(each, PartialEpisode):
            found += each.sampled
        elif each.error is None:
            found += each.turns
    return [turn for turn in found if turn.trained]


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
