"""Trains all runs of a comparison in parallel processes. Finished runs are not repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kapelle.comparison.contenders import Contender, Run
from kapelle.comparison.processes import in_processes
from kapelle.comparison.results import (
    Measured,
    measure,
    write_results,
)
from kapelle.errors import DataError, KapelleError, for_command
from kapelle.runs.reader import is_run, read_status
from kapelle.runtime.files import writing
from kapelle.settings.overlays import parse_yaml
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import resolve, to_yaml
from kapelle.types import Json

FIRST_WORD = 5.0
"""The number of seconds before the first report on the runs in progress."""
LONGEST_SILENCE = 300.0
"""Maximum time in seconds between two reports."""

Report = Callable[[str], None]
"""A function that is called with one line of text for every event."""


@dataclass(frozen=True, slots=True)
class RunningComparison:
    """The contenders, the runs and the folder of a comparison."""

    name: str
    contenders: tuple[Contender, ...]
    runs: tuple[Run, ...]
    folder: Path

    def measure(self) -> list[Measured]:
        """Return the numbers measured so far for every run."""
        return [measure(run, self.folder) for run in self.runs]

    def write(self) -> dict[str, Json]:
        """Write `compare.json` and `compare.csv`, and return the content of `compare.json`."""
        return write_results(self.folder, self.name, self.contenders, self.measure())

    def draw(self) -> tuple[Path, ...]:
        """Write `figure` as PDF, PNG and SVG if at least one run has a score, and return the paths.

        Raises ConfigError without matplotlib.
        """
        from kapelle.comparison.figures import plot
        from kapelle.comparison.results import FORMATS

        try:
            return plot(self.folder, [self.folder / f"figure.{form}" for form in FORMATS]).files
        except DataError:  # no run has a score yet
            return ()


def train_all(comparison: RunningComparison, processes: int, report: Report) -> None:
    """Train or resume every unfinished run. Failures are reported and stored in text files.

    Warmed-up models that several runs need are created first. The results are written after every run. Raises
    KeyboardInterrupt after a signal, once the runs have saved their state.
    """
    comparison.write()
    left = [run for run in comparison.runs if not run.done]
    if len(left) < len(comparison.runs):
        report(f"{len(comparison.runs) - len(left)} of {len(comparison.runs)} runs are already finished")
    start = time.monotonic()
    progress = _Progress(left, report, start)
    # For each missing warmed-up model, the settings of one run that needs it.
    from kapelle.features.warmup.key import warmup_is_cached, warmup_key

    with_one = [run.recipe.config for run in left if run.recipe.config.warmup is not None]
    needed = {warmup_key(config): config for config in with_one}.values()
    configs = [config for config in needed if not warmup_is_cached(config)]
    if configs:
        seeds = ", ".join(str(config.seed) for config in configs)
        report(f"warm-up: training the models for seeds {seeds} first, once for all algorithms")
    for number, failure in in_processes(warm_up, [(to_yaml(config),) for config in configs], processes):
        # If this fails, the runs that need the model report the same error.
        report(f"warm-up of seed {configs[number].seed}: {failure.reason if failure else 'done'}")
    pieces = [(run.recipe.yaml(), dict(run.recipe.origin), str(run.path)) for run in left]
    for count, (number, failure) in enumerate(in_processes(take_up, pieces, processes, progress), start=1):
        run = left[number]
        with writing(run.error_file):
            if failure is None:
                run.error_file.unlink(missing_ok=True)
            else:
                run.error_file.parent.mkdir(parents=True, exist_ok=True)
                run.error_file.write_text(f"{failure.reason}\n{failure.details}\n", "utf-8")
        score = failure.reason if failure else _score(measure(run, comparison.folder))
        comparison.write()
        report(
            f"[{time.monotonic() - start:6.1f} s] {run.label} seed {run.seed}: {score}  ({count} of {len(left)})"
        )


class _Progress:
    """Reports the steps of the runs after 5 seconds, and then at intervals that increase to 5 minutes."""

    def __init__(self, runs: Sequence[Run], report: Report, start: float) -> None:
        self._runs = runs
        self._report = report
        self._start = start
        self._wait = FIRST_WORD
        self._next = start + self._wait
        self._last = ""

    def __call__(self) -> None:
        """Report the steps of the runs in progress, if a report is due and the steps have changed."""
        now = time.monotonic()
        if now < self._next:
            return
        self._wait = min(2 * self._wait, LONGEST_SILENCE)
        self._next = now + self._wait
        steps = []
        for run in self._runs:
            with suppress(KapelleError):  # the run's directory may be incomplete
                if is_run(run.path) and not run.done:
                    done, steps_in_all = read_status(run.path).step, run.steps
                    steps.append(f"{run.label} seed {run.seed} {done}/{steps_in_all}")
        message = f"steps so far: {', '.join(steps)}" if steps else "the first runs are being prepared"
        if message != self._last:
            self._last = message
            self._report(f"[{now - self._start:6.1f} s] {message}")


def take_up(config: str, origin: Mapping[str, str], path: str) -> None:
    """Train or resume one run until it is finished. This function is executed in a worker process.

    Raises the errors of `Trainer`, and KeyboardInterrupt after a signal.
    """
    from kapelle.training.trainer import Trainer

    place = Path(path)
    with (
        for_command(),
        Trainer(_config(config), origin=origin, run_dir=place, resume=is_run(place)) as trainer,
    ):
        summary = trainer.train()
    if summary.stopped_by:
        raise KeyboardInterrupt


def warm_up(config: str) -> None:
    """Create the warmed-up model of a run. This function is executed in a worker process."""
    from kapelle.features.warmup.stage import warmed_up

    warmed_up(_config(config))


def _config(text: str) -> RunConfig:
    values: dict[str, Any] = parse_yaml(text)
    return resolve(values)


def _score(measured: Measured) -> str:
    if measured.success is not None:
        counts = "" if measured.scored is None else f", scored {measured.scored} of {measured.problems}"
        return f"success {measured.success:.3f}{counts}"
    if not measured.reward:
        failed = f": {measured.failed} of {measured.problems} problems failed" if measured.failed else ""
        return f"no score{failed}"
    return "return " + ", ".join(f"{agent} {value:.3f}" for agent, value in measured.reward.items())
