"""Records why a run ended before it was finished, in `failure.json`, and determines what is known about a process that was killed.

A resume deletes `failure.json` after it has opened the run. The text of every failure remains in `run.log`.
"""

from __future__ import annotations

import traceback as tracebacks
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kapelle.errors import KapelleError, TrainingHalted
from kapelle.runs.lock import has_restarted, now
from kapelle.runs.reader import Status, read_status
from kapelle.runtime.credentials import without_secrets
from kapelle.runtime.files import plain_bytes
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.machine import refusal
from kapelle.types import Episode, Group

FAILURE, LOG = "failure.json", "run.log"
EPISODES = 8
"""The maximum number of different episode errors in a failure."""
LONGEST = 20_000
"""The maximum number of characters of a traceback. The middle of a longer traceback is removed."""
TAIL = 1 << 16
"""The number of bytes at the end of `run.log` that are searched for the last message of a process."""


@dataclass(frozen=True, slots=True)
class FailedEpisode:
    """The first episode that failed with an error, and the number of episodes that failed with the same error."""

    step: int
    """The step in which the episode was collected, or after which it was evaluated."""
    task: str
    agent: str
    """The agent that acted last; empty if no agent has acted."""
    error: str
    count: int

    def line(self) -> str:
        """Return the error and its count in one line."""
        turn = f", after a turn of {self.agent}" if self.agent else ""
        number = f"{self.count} {'episode' if self.count == 1 else 'episodes'}"
        return f"{number} failed, the first in step {self.step}, task {self.task}{turn}: {self.error}"


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a run ended."""

    reason: str
    traceback: str = ""
    """The traceback of the error; empty if the process left none."""
    on_purpose: bool = True
    """Whether the reason explains the error. The value is false for an unexpected error, which only the traceback explains."""
    episodes: tuple[FailedEpisode, ...] = ()
    """The most frequent errors of the episodes that caused the failure."""
    health: tuple[str, ...] = ()
    """The verdict on the run (see `runs.verdict`) with its evidence and a remedy, if the verdict indicates a problem."""
    step: int = 0
    """The number of finished steps."""
    phase: str = ""
    at: str = ""
    """The time of the failure in UTC, in ISO 8601 format."""

    def row(self) -> dict[str, Any]:
        """Return the failure as plain JSON values."""
        return asdict(self)

    @property
    def cause(self) -> str:
        """The most frequent error of the episodes or, if there is none, the reason. Users should read this message first."""
        return self.episodes[0].error if self.episodes else self.reason

    def lines(self) -> list[str]:
        """Return the reason, the verdict and the failed episodes as lines of text."""
        return [
            f"reason: {self.reason}",
            *(f"health: {line}" for line in self.health),
            *map(FailedEpisode.line, self.episodes),
        ]


def failure_of(error: Exception, status: Status, run: Path) -> Failure:
    """Return the failure of a run that ended with the given error while it had the given status."""
    found = tracebacks.format_exception(error)
    trace = without_secrets("".join(found))
    if len(trace) > LONGEST:
        trace = f"{trace[: LONGEST // 2]}\n…\n{trace[-LONGEST // 2 :]}"
    halted = error.groups if isinstance(error, TrainingHalted) else ()
    explained = str(error) if isinstance(error, KapelleError) else refusal(error)
    return Failure(
        without_secrets(explained or reason(error)),
        trace,
        explained is not None,
        first_errors(halted, status.step + (status.phase == "training")),
        _health(run),
        status.step,
        status.phase,
        now(),
    )


def first_errors(groups: Iterable[Group], step: int) -> tuple[FailedEpisode, ...]:
    """Return the most frequent errors of episodes, each with the first episode that failed with this error."""
    failed = [episode for group in groups for episode in group.episodes if episode.error is not None]
    counts = Counter(str(episode.error) for episode in failed)

    def shown(error: str, count: int) -> FailedEpisode:
        first: Episode = next(episode for episode in failed if episode.error == error)
        agent = first.turns[-1].agent if first.turns else ""
        return FailedEpisode(step, first.task.id, agent, without_secrets(error), count)

    return tuple(shown(*each) for each in counts.most_common(EPISODES))


def _health(run: Path) -> tuple[str, ...]:
    from kapelle.runs.summary import verdict_of  # imported here, because that module reads failures

    verdict = verdict_of(run)
    return tuple(verdict.lines()) if verdict is not None and verdict.at_fault else ()


STARTS = "starts the run in process"
STOPS = " stopping: "
"""The text that occurs in every line of `run.log` that a stop request writes."""


def start_line(status: Status) -> str:
    """Return the line that a process writes to `run.log` when it starts."""
    return f"kapelle {STARTS} {status.pid} on {status.host}"


def read_failure(run: Path) -> Failure | None:
    """Return the reason why a run failed or was killed, or None if it is running, has finished, or was stopped on request.

    Raises RunDirectoryError if the status of the run cannot be read.
    """
    status = read_status(run)
    if status.state not in ("failed", "killed"):
        return None
    if status.state == "killed":
        why = _why_killed(run, status)
    else:
        try:
            return TypeAdapter(Failure).validate_json(plain_bytes(run / FAILURE))
        except (OSError, ValueError):
            why = f"It failed in phase '{status.phase}' after step {status.step}; {run / FAILURE} cannot be read."
    return Failure(why, step=status.step, phase=status.phase, at=status.updated)


def _why_killed(run: Path, status: Status) -> str:
    """Return the last message of a process that ended abruptly or, if there is no message, the likely cause."""
    where = f"after step {status.step}, in phase '{status.phase}'"
    for line in takewhile(lambda line: STARTS not in line, reversed(_tail(run / LOG))):
        if line.startswith("kapelle: "):
            return line.removeprefix("kapelle: ")
        if STOPS in line:
            return (
                "It was stopped by a second Ctrl-C or killed, before it had saved and stopped as "
                f"requested ({where})."
            )
    if has_restarted(run / "lock"):
        return f"{status.host} was restarted while process {status.pid} trained this run ({where})."
    return (
        f"Process {status.pid} on {status.host} ended without a message ({where}): it crashed, or it "
        "was killed, for example by `kill -9` or by the system when memory ran out."
    )


def _tail(path: Path) -> Sequence[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
