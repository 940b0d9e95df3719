"""Stores and summarises the results of `kapelle blame`: the probability of success before and after each turn of an episode.

    RUN/blame/eval-step60-8x-1a2b3c4d.jsonl    the first line describes the measurement, each later line is an episode

The module `evaluation.blame` measures and appends one episode at a time, so that an interrupted measurement can be
continued. A run does not need the folder, which can be deleted at any time. An episode whose line cannot be read counts
as not measured.

This module does not import torch, because the viewer reads these files too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from kapelle.runtime.files import plain_bytes, write_all, writing
from kapelle.types import Episode, as_table

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]

FORMAT = 1
FOLDER = "blame"
COSTLIEST = 10
"""The number of turns that are quoted."""
QUOTED = 100
"""The maximum number of characters of a quoted turn."""


# -------- Results for a turn, an episode and all episodes


@dataclass(frozen=True, slots=True)
class SampledInstead:
    """A completion that was sampled in place of a turn, and its success."""

    text: str
    times: Count
    """The number of continuations that begin with exactly this completion."""
    success: Share | None
    """The mean success of the continuations with this completion, or None if all of them ended with an error."""


@dataclass(frozen=True, slots=True)
class BlamedTurn:
    """A turn of an episode, with the probability of success before and after the turn.

    Each probability is the mean success of continuations, which an environment may grade with any number in [0, 1].
    """

    agent: str
    index: Count
    """The position of the turn in the episode, from 0."""
    number: Count
    """The position of the turn among the turns of its agent, from 1."""
    moment: Count
    """The moment of the turn, from 0. Agents that act simultaneously have the same moment."""
    text: str
    before: Share | None
    """The success probability if this turn and all later turns are resampled, while the turns of other agents at the same
    moment are kept."""
    after: Share | None
    """The success probability if all turns of this moment are kept and later turns are resampled. For the last moment, the
    value is the outcome of the episode."""
    error: Share
    """The standard error of the drop; see `uncertainty`."""
    instead: tuple[SampledInstead, ...] = ()
    """The alternatives that were sampled, the most frequent first. The number of alternatives is limited."""

    @property
    def drop(self) -> float | None:
        """The probability of success before the turn minus the probability after the turn, or None if one of them is unknown."""
        return None if self.before is None or self.after is None else self.before - self.after


@dataclass(frozen=True, slots=True)
class BlamedEpisode:
    """An evaluation episode, measured turn by turn."""

    task: str
    sample: Count
    seed: Count
    tokens_hash: str
    """A hash of the sampled tokens, which distinguishes conversations about the same task."""
    question: str
    agents: tuple[str, ...]
    success: Share
    values: tuple[Share | None, ...]
    """The probability of success before each moment, followed by the outcome."""
    turns: tuple[BlamedTurn, ...]
    continuations: Count
    failed: Count
    """The number of continuations that ended with an error. These continuations are excluded from means."""
    tokens: Count
    """The number of tokens sampled in the continuations."""

    @property
    def solved(self) -> bool:
        """Whether the success of the episode is 1."""
        return self.success >= 1.0

    @property
    def key(self) -> tuple[str, int, int, str]:
        """The key that identifies the episode in a file."""
        return self.task, self.sample, self.seed, self.tokens_hash

    @property
    def culprit(self) -> BlamedTurn | None:
        """The turn with the largest positive drop (the first one if several drops are equal), or None if no drop is positive."""
        known = [turn for turn in self.turns if (turn.drop or 0.0) > 0.0]
        return max(known, key=lambda turn: turn.drop or 0.0, default=None)


@dataclass(frozen=True, slots=True)
class MeanDrop:
    """The mean drop of a turn of an agent over episodes."""

    episodes: int
    before: float | None
    """The mean probability of success before the turn."""
    drop: float | None
    error: float | None
    """The standard error of the mean drop over episodes. For a single episode, it is the standard error of the episode's drop."""


@dataclass(frozen=True, slots=True)
class Blame:
    """The turns that made episodes fail. When printed, the object shows a line for each turn of each agent."""

    measured: Mapping[str, Any]
    """The settings of the measurement, which are `step`, `split`, `samples`, `seed` and the other entries in the first line of the file."""
    episodes: tuple[BlamedEpisode, ...]
    """The failed episodes, followed by the solved episodes, each in the order of the evaluation."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Mapping from a reason to the number of episodes that could not be replayed for this reason."""
    file: Path | None = None
    """The file with the measurement, or None if nothing was written."""

    @property
    def failed(self) -> tuple[BlamedEpisode, ...]:
        """The episodes with a success below 1."""
        return tuple(each for each in self.episodes if not each.solved)

    @property
    def solved(self) -> tuple[BlamedEpisode, ...]:
        """The episodes with a success of 1."""
        return tuple(each for each in self.episodes if each.solved)

    @property
    def lost_by(self) -> dict[str, int]:
        """Mapping from an agent to the number of failed episodes whose largest drop is at a turn of this agent.

        The mapping contains every agent.
        """
        found = dict.fromkeys((agent for each in self.episodes for agent in each.agents), 0)
        for each in self.failed:
            if (turn := each.culprit) is not None:
                found[turn.agent] += 1
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each turn of each agent, with the mean drops over failed and solved episodes and the number of lost episodes."""
        culprits = [each.culprit for each in self.failed]
        rows = []
        for agent in self.lost_by:
            turns = (turn for each in self.episodes for turn in each.turns if turn.agent == agent)
            for number in sorted({turn.number for turn in turns}):
                lost = sum(t is not None and (t.agent, t.number) == (agent, number) for t in culprits)
                drops = {
                    "failed": asdict(mean_drop(self.failed, agent, number)),
                    "solved": asdict(mean_drop(self.solved, agent, number)),
                }
                rows.append({"agent": agent, "turn": number, **drops, "lost": lost})
        return rows

    def costliest(self, most: int = COSTLIEST) -> list[tuple[BlamedEpisode, BlamedTurn]]:
        """Return the `most` turns with the largest drops, each with its episode."""
        turns = [(each, turn) for each in self.episodes for turn in each.turns if (turn.drop or 0.0) > 0.0]
        return sorted(turns, key=lambda pair: -(pair[1].drop or 0.0))[:most]

    def row(self) -> dict[str, Any]:
        """Return the whole result as plain JSON values."""
        return {
            **self.measured,
            "file": None if self.file is None else str(self.file),
            "continuations": sum(each.continuations for each in self.episodes),
            "tokens": sum(each.tokens for each in self.episodes),
            "failed_episodes": len(self.failed),
            "solved_episodes": len(self.solved),
            "excluded": dict(self.excluded),
            "lost_by": self.lost_by,
            "turns": self.rows(),
            "costliest": [
                {"task": each.task, "question": each.question, "success": each.success}
                | {key: value for key, value in turn_row(turn).items() if key != "instead"}
                for each, turn in self.costliest()
            ],
            "episodes": [episode_row(each) for each in self.episodes],
        }

    def __str__(self) -> str:
        """Return a text with the number of episodes that each agent lost, and a line for each turn of each agent."""
        lost = ", ".join(f"{agent} {count}" for agent, count in self.lost_by.items())
        lines = [
            f"{len(self.failed)} failed and {len(self.solved)} solved episodes; lost by: {lost or 'no agent'}"
        ]
        for row in self.rows():
            own = [f"{kind} {drop_text(row[kind])}" for kind in ("failed", "solved") if row[kind]["episodes"]]
            lines.append(f"  {row['agent']}, turn {row['turn']}: mean drop {', '.join(own)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the same content as an HTML table, for notebooks."""
        rows = [
            (f"{row['agent']}, turn {row['turn']}", f"{drop_text(row['failed'])} failed, {drop_text(row['solved'])} solved")
            for row in self.rows()
        ]  # fmt: skip
        return as_table([("lost by", ", ".join(f"{a} {n}" for a, n in self.lost_by.items())), *rows])


def drop_text(row: Mapping[str, Any]) -> str:
    """Format a mean drop, for example as `+0.412 ± 0.050`. A missing drop is formatted as a dash."""
    return "–" if row["drop"] is None else f"{row['drop']:+.3f} ± {row['error']:.3f}"


def mean_drop(episodes: Iterable[BlamedEpisode], agent: str, number: int) -> MeanDrop:
    """Return the mean drop of the agent's turn with the given number (from 1), over the episodes in which the drop is known."""
    found = [
        turn
        for each in episodes
        for turn in each.turns
        if (turn.agent, turn.number) == (agent, number) and turn.drop is not None
    ]
    drops = [turn.drop for turn in found if turn.drop is not None]
    if not drops:
        return MeanDrop(0, None, None, None)
    error = stdev(drops) / math.sqrt(len(drops)) if len(drops) > 1 else found[0].error
    before = fmean(turn.before for turn in found if turn.before is not None)
    return MeanDrop(len(drops), before, fmean(drops), error)


def uncertainty(successes: Sequence[float]) -> float:
    """Return the standard error, in (0, 0.5), of a probability that is estimated from the given successes.

    The result is the standard deviation of the posterior for a uniform prior, Beta(1 + s, 1 + n − s). This standard
    deviation equals √(p(1 − p) / (n + 3)) with p = (s + 1) / (n + 2). Unlike the sample standard deviation, this value
    is not 0 if a few continuations all have the same result. For graded successes, this value is an upper bound,
    because a number in [0, 1] has the largest variance if it is always 0 or 1.
    """
    p = (sum(successes) + 1.0) / (len(successes) + 2.0)
    return math.sqrt(p * (1.0 - p) / (len(successes) + 3.0))


def said_in(episode: Episode) -> str:
    """Return a hash of the sampled tokens of an episode."""
    return tokens_hash((turn.agent, turn.completion_ids) for turn in episode.turns)


def tokens_hash(turns: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return a hash of the agents and the sampled token ids of all turns."""
    tokens = [[agent, list(ids)] for agent, ids in turns]
    return blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()


# -------- Files


def turn_row(turn: BlamedTurn) -> dict[str, Any]:
    """Return a turn, including its drop, as plain JSON values."""
    return {**asdict(turn), "instead": [asdict(each) for each in turn.instead], "drop": turn.drop}


def episode_row(episode: BlamedEpisode) -> dict[str, Any]:
    """Return an episode as plain JSON values."""
    return {**asdict(episode), "turns": [turn_row(turn) for turn in episode.turns]}


@cache
def _form() -> TypeAdapter[BlamedEpisode]:
    return TypeAdapter(BlamedEpisode)


def episode_of(row: Mapping[str, Any]) -> BlamedEpisode:
    """Convert a row to an episode. Raises ValueError if the row has an unknown format."""
    found = _form().validate_json(json.dumps(row), strict=True)
    if not all(turn.moment < len(found.values) - 1 and turn.agent in found.agents for turn in found.turns):
        raise ValueError("a turn with an unknown moment or agent")
    return found


class BlameFile:
    """The file with the episodes that were measured with one set of settings."""

    def __init__(self, run: Path, measured: Mapping[str, Any]) -> None:
        """Determine the file for a run and the settings of the measurement. Each set of settings has its own file."""
        self.head = {"format": FORMAT, **measured}
        digest = blake2b(json.dumps(self.head, sort_keys=True).encode(), digest_size=4).hexdigest()
        name = f"{measured['split']}-step{measured['step']}-{measured['samples']}x-{digest}.jsonl"
        self.path = run / FOLDER / name

    def read(self) -> dict[tuple[str, int, int, str], BlamedEpisode]:
        """Return the measured episodes by key. Lines that cannot be read are omitted."""
        return {episode.key: episode for episode in read_blamed(self.path)[1]}

    def append(self, episodes: Sequence[BlamedEpisode]) -> None:
        """Append episodes after removing an incomplete last line. Raises RunDirectoryError if writing to the disk fails."""
        with writing(self.path):
            self.path.parent.mkdir(exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o666)
            try:
                size = os.fstat(descriptor).st_size
                whole = plain_bytes(self.path).rfind(b"\n") + 1 if size else 0
                if whole < size:
                    os.ftruncate(descriptor, whole)
                rows = ([] if whole else [self.head]) + [episode_row(each) for each in episodes]
                write_all(descriptor, b"".join(json.dumps(row).encode("ascii") + b"\n" for row in rows))
            finally:
                os.close(descriptor)


def read_blamed(path: Path) -> tuple[dict[str, Any], list[BlamedEpisode]]:
    """Return the settings and the episodes in a file. Both results are empty if the file cannot be read."""
    head: dict[str, Any] = {}
    found: dict[tuple[str, int, int, str], BlamedEpisode] = {}
    with suppress(OSError):
        for number, line in enumerate(plain_bytes(path).split(b"\n")[:-1]):
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                row = json.loads(line)
                if number == 0:
                    known = row["format"] == FORMAT and isinstance(row["settings"], list)
                    head = row if known and {"step", "split", "samples"} <= row.keys() else {}
                elif head:
                    episode = episode_of(row)
                    found[episode.key] = episode
    return head, list(found.values())


def blame_files(run: Path) -> list[Path]:
    """Return the files with the measurements of a run, newest first."""
    known: list[tuple[float, Path]] = []
    with suppress(OSError):
        for path in (run / FOLDER).glob("*.jsonl"):
            with suppress(OSError):
                known.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(known, reverse=True)]
