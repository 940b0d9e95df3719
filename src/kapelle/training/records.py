"""Record a run: write rows and episodes to its directory, and report to trackers and the observer."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from kapelle.errors import ConfigError
from kapelle.rollout.evaluation.evaluate import Evaluation
from kapelle.runs.reader import last_episode_step
from kapelle.runs.trackers import Tracker, open_trackers, transcripts
from kapelle.runs.writer import RunDirectory
from kapelle.runtime.interrupts import requested_by
from kapelle.runtime.process_tree import RANK_LOG
from kapelle.runtime.randomness import keep_imports_from_drawing
from kapelle.runtime.ranks import ALONE, Ranks, broadcast
from kapelle.settings.schema import RunConfig
from kapelle.training.observer import REMARKS, Observer, Silent
from kapelle.training.provenance import open_run
from kapelle.training.step_report import Step
from kapelle.types import Json

# -------- The machine's resources during a step: a row of `system.jsonl`
#
#     time             when the row was written, ISO 8601 in UTC
#     seconds          since the previous row
#     cpu              mean number of busy cores of this process and its ended children
#     cores            cores of the machine
#     load             running or waiting processes of the machine, averaged over a minute
#     memory           bytes of this process in memory
#     machine_memory   used bytes of the machine's memory; machine_memory_total all of them
#     gpus             used and total bytes of each CUDA device, and the peak of this process
#
# A row omits values that the machine does not report.


class Machine:
    """Measure how much of the machine was used since the last sample."""

    def __init__(self) -> None:
        self._at, self._busy = time.monotonic(), _busy()

    def sample(self) -> dict[str, Json]:
        """Return a row of `system.jsonl`."""
        now, busy = time.monotonic(), _busy()
        seconds = max(now - self._at, 1e-6)
        row: dict[str, Json] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(seconds, 3),
            "cpu": round((busy - self._busy) / seconds, 3),
            "cores": os.cpu_count() or 1,
        }
        self._at, self._busy = now, busy
        with suppress(OSError):
            row["load"] = round(os.getloadavg()[0], 2)
        with suppress(OSError, ValueError, IndexError, KeyError):
            pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
            row["memory"] = pages * resource.getpagesize()
            lines = Path("/proc/meminfo").read_text("ascii").splitlines()
            known = {
                name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)
            }
            row["machine_memory_total"] = known["MemTotal"]
            row["machine_memory"] = known["MemTotal"] - known["MemAvailable"]
        if "memory" not in row:  # without /proc, use the peak
            unit = 1 if sys.platform == "darwin" else 1024
            row["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if torch.cuda.is_initialized():
            gpus = []
            for number in range(torch.cuda.device_count()):
                free, total = torch.cuda.mem_get_info(number)
                held = torch.cuda.max_memory_allocated(number)
                gpus.append({"used": total - free, "total": total, "held": held})
            row["gpus"] = gpus
        return row


def _busy() -> float:
    """Return the CPU time in seconds of this process and its terminated child processes."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _summary(step: Step, waits: Mapping[str, float], machine: Mapping[str, Json]) -> str:
    """Return a log line about how a rank spent a step. `waits` contains the seconds spent waiting for other ranks, by exchange."""

    def listed(seconds: Mapping[str, float]) -> str:
        parts = [f"{name} {each:.2f}" for name, each in sorted(seconds.items(), key=lambda item: -item[1])]
        return ", ".join(part for part in parts if not part.endswith(" 0.00")) or "none"

    spent = {
        name.removeprefix("time/"): each for name, each in step.metrics.items() if name.startswith("time/")
    }
    took = spent.pop("step", 0.0)
    spent.pop("tokens_per_second", None)
    held = [f"{float(machine['memory']) / 1e9:.2f} GB"]
    if torch.cuda.is_initialized():
        held.append(f"at most {torch.cuda.max_memory_allocated() / 1e9:.2f} GB of its GPU")
    return (
        f"step {step.number} took {took:.2f} s ({listed(spent)}); waited {sum(waits.values()):.2f} s for other ranks: "
        f"{listed(waits)}; {', '.join(held)}"
    )


class Records:
    """Record one run. Without a run directory, events are only reported to the observer."""

    def __init__(self, run: RunDirectory | None, observer: Observer, ranks: Ranks = ALONE) -> None:
        """Set the run directory, if there is one, and the observer."""
        self.run = run
        self._ranks = ranks
        self._observer = observer
        self._trackers: list[Tracker] = []
        self._transcripts: list[int] = []
        self._machine = Machine()
        self._ended: Callable[[], None] | None = None
        """A function that reports how training ended, or None as long as training has not ended."""

    def track(self, config: RunConfig) -> None:
        """Open the trackers of the settings if there is a run directory."""
        if self.run is not None:
            report = partial(self._observer.phase, "tracker")
            self._trackers = open_trackers(config.trackers, self.run.path, config.model_dump(), report)
            self._transcripts = [tracker.transcripts for tracker in config.trackers]

    def phase(self, done: int, name: str, detail: str) -> None:
        """Record that a new phase begins after `done` steps. Remarks are only reported to the observer."""
        self._observer.phase(name, detail)
        if self.run is not None and name not in REMARKS:
            self.run.report(name, done)

    def step(self, step: Step, last: int) -> None:
        """Record a training step. `last` is the number of the last step of the run."""
        self._ended = None
        machine = self._machine.sample()
        if self._ranks.size > 1:
            RANK_LOG.info(_summary(step, self._ranks.take_waits(), machine))
        if self.run is not None:
            self.run.record_metrics(step.number, step.metrics)
            self.run.record_episodes(step.number, step.groups)
            self.run.record_traces(step.number, step.traces)
            self.run.record_system(step.number, machine)
            self.run.record_distributions(step.number, step.distributions)
            self.run.report("training", step.number)
        for tracker, every in zip(self._trackers, self._transcripts, strict=True):
            tracker.log(step.number, step.metrics)
            if every and (step.number - 1) % every == 0 and step.groups:
                tracker.table(step.number, "transcripts", transcripts(step.groups))
        self._observer.step(step, last)

    def evaluation(self, done: int, result: Evaluation) -> None:
        """Record the result of an evaluation after `done` steps."""
        if self.run is not None:
            self.run.record_evaluation(done, result.row())
            # A second evaluation after a step adds a row, but the episodes of the first one are kept.
            if last_episode_step(self.run.path, "test") < done:
                self.run.record_episodes(done, result.groups, split="test")
        for tracker in self._trackers:
            tracker.log(done, {f"evaluation/{k}": v for k, v in result.scalars().items()})
        self._observer.evaluation(done, result)

    def end(self, done: int, *, stopped: bool) -> None:
        """Record that training has finished or was stopped."""
        if self.run is not None:
            self._ended = partial(self.run.report, "done", done, "interrupted" if stopped else "finished")
            self._ended()

    def report_end_repeated(self) -> bool:
        """Repeat the report of the end of training, for example after an evaluation. Return False if training has not ended."""
        if self._ended is None:
            return False
        self._ended()
        return True

    def fail(self, error: Exception) -> None:
        """Record the error that ended the run, unless a stop signal caused the error."""
        if self.run is not None and not requested_by():
            self.run.fail(error)

    def leave(self, error: BaseException | None) -> None:
        """Release the run directory, and record the error that ended the run if there was one."""
        if self.run is not None:
            self.run.__exit__(None if error is None else type(error), error, None)
            self.run = None

    def close(self) -> None:
        """Release the run directory and the trackers."""
        with ExitStack() as closing:  # closes all of them, even if one fails
            if self.run is not None:
                closing.push(self.run)
            for tracker in self._trackers:
                closing.callback(tracker.close)
            self._trackers, self._transcripts = [], []


def open_records(
    path: str | Path | None,
    config: RunConfig,
    origin: Mapping[str, str],
    observer: Observer,
    *,
    resume: bool,
    ranks: Ranks = ALONE,
) -> Records:
    """Open the run directory at `path`, if a path is given. If there are several ranks, only the first rank records.

    If `open_run` raises an error, it is raised in every rank.
    """
    opened: list[RunDirectory] = []

    def open_here() -> None:
        if path is None:
            if resume:
                raise ConfigError("Resuming needs a run directory. Give it with --run-dir.")
            return
        keep_imports_from_drawing()
        opened.append(open_run(Path(path), config, origin, partial(observer.phase, "resume"), resume=resume))
        opened[0].say = partial(observer.phase, "files")

    broadcast(ranks, "records", open_here)
    return Records(opened[0] if opened else None, Silent() if ranks.rank else observer, ranks)
