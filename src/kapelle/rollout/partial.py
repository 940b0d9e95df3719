"""Episodes that a step has left before their end, as data: the next step continues them, with newer weights.

An episode is determined by its task, its seed and its turns (`interventions.py`). So what was sampled is all that is kept:
the next step plays it again in a fresh world, gives every agent its own tokens back, and samples on where they end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.types import Episode, Group, Json, Payment, Task, Turn


@dataclass(frozen=True, slots=True)
class PartialEpisode:
    """One episode that has not ended."""

    seed: int
    turns: tuple[Turn, ...] = ()
    """The recorded ones, in time order."""
    drafts: tuple[Turn, ...] = ()
    """Complete ones of a moment at which others still speak."""
    begun: tuple[Turn, ...] = ()
    """Those that have been asked for: what they have sampled so far, if anything. Their prompts are fixed, and so is what
    they have `seen`."""
    payments: tuple[Payment, ...] = ()
    """What was paid so far."""

    @property
    def sampled(self) -> tuple[Turn, ...]:
        """All that was sampled."""
        return (*self.turns, *self.drafts, *self.begun)


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """The episodes of one task, of which some may have ended."""

    task: Task
    number: int
    """The step whose play began it."""
    episodes: tuple[Episode | PartialEpisode, ...]

    @property
    def done(self) -> bool:
        """Whether every episode has ended."""
        return all(isinstance(episode, Episode) for episode in self.episodes)

    @property
    def group(self) -> Group:
        """The group, once every episode has ended."""
        return Group(self.task, tuple(each for each in self.episodes if isinstance(each, Episode)))


@dataclass(frozen=True, slots=True)
class EndOfStep:
    """When a step may leave the groups that are not done yet."""

    must: tuple[int, ...]
    """Places of the groups that are waited for: they would grow too old."""
    most: int
    """Most groups that may be left."""

    def __call__(self, done: Sequence[bool]) -> bool:
        """Return whether the step may end with these groups done."""
        return all(done[place] for place in self.must) and sum(done) >= len(done) - self.most


def grown(turn: Turn, ids: Sequence[int], logprobs: Sequence[float], version: int, weights_hash: str) -> Turn:
    """Return a turn with further completion tokens, sampled by these weights."""
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
    left: PartialEpisode, turns: Sequence[Turn], payments: Sequence[Payment]
) -> tuple[tuple[Turn, ...], tuple[Payment, ...]]:
    """Return turns and payments of an episode that was continued, the earlier ones in the order in which they were recorded.

    A replay does not wait for the sampler, so that agents that act independently may be recorded in another order.
    """
    known = dict(numbered(turns))
    before = [known.pop(key) for key, _ in numbered(left.turns) if key in known]
    ordered = tuple(replace(turn, index=index) for index, turn in enumerate((*before, *known.values())))
    return ordered, (*left.payments, *payments[len(left.payments) :])


def numbered(turns: Iterable[Turn]) -> list[tuple[tuple[str, int], Turn]]:
    """Return every turn with its agent and its number among the agent's, from 0."""
    taken: Counter[str] = Counter()
    found = []
    for turn in turns:
        found.append(((turn.agent, taken[turn.agent]), turn))
        taken[turn.agent] += 1
    return found


def unfinished_turns(groups: Iterable[PartialGroup]) -> list[Turn]:
    """Return what was sampled and is trained on, of episodes that have not failed."""
    found: list[Turn] = []
    for each in (episode for group in groups for episode in group.episodes):
        if isinstance(each, PartialEpisode):
            found += each.sampled
        elif each.error is None:
            found += each.turns
    return [turn for turn in found if turn.trained]


def dump_partial(groups: Iterable[PartialGroup]) -> str:
    """Return groups as JSON lines, one per episode, every field exact."""
    lines: list[bytes] = []
    for place, group in enumerate(groups):
        for each in group.episodes:
            labels = {"group": place, "number": group.number}
            if not isinstance(each, Episode):
                labels["recorded"], labels["drafts"] = len(each.turns), len(each.drafts)
                each = Episode(group.task, each.seed, (), each.sampled, payments=each.payments)  # noqa: PLW2901 - its form
            lines.append(dump_episode(each, None, **labels))
    return b"".join(lines).decode("ascii")


def load_partial(text: str) -> list[PartialGroup]:
    """Return what `dump_partial` has written; raises DataError for a row in another form."""
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
        members.append(PartialEpisode(episode.seed, *parts, episode.payments))
    return [PartialGroup(tasks[place], number, tuple(own)) for place, (number, own) in groups.items()]
