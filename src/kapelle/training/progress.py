"""Take the steps of a run and save checkpoints. An unfinished step does not count.

A stop request takes effect at the end of the current step. If a step did not finish (because of an error or a second Ctrl-C),
the run continues from its newest checkpoint, as after a crash.

If there are several ranks, each rank writes its share of a checkpoint, and the first rank lists and prunes checkpoints. All
ranks load the same checkpoint from a shared folder.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from kapelle.errors import CheckpointError
from kapelle.runs.checkpoint_contents import (
    copied_weights,
    find_checkpoint,
    prepare_checkpoint,
    read_checkpoint,
    write_policies,
)
from kapelle.runs.checkpoint_folder import list_checkpoints
from kapelle.runs.named_checkpoint import best_checkpoint, values_of, why_no_best
from kapelle.runs.reader import read_evaluations
from kapelle.runs.writer import RunDirectory
from kapelle.runtime import interrupts
from kapelle.runtime.event_loop import AbandonableThreads
from kapelle.runtime.files import step_of
from kapelle.runtime.interrupts import finishing, stop_requested, stop_within, unbroken
from kapelle.runtime.process_tree import doing
from kapelle.runtime.ranks import ALONE, Peers, Ranks, broadcast
from kapelle.settings.schema import RunConfig
from kapelle.training.held_out import HeldOut
from kapelle.training.starting import Pieces
from kapelle.training.step_report import Step


class Saving:
    """Write at most one checkpoint at a time in the background. All ranks learn at the same time that a save is finished."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._threads = AbandonableThreads(1)
        self._pending: tuple[int, Future[Path]] | None = None

    def begin(self, step: int, save: Callable[[Peers], Path]) -> None:
        """Begin to save the checkpoint of `step` in a thread. No other save may be running."""
        assert self._pending is None, "one checkpoint is written at a time"
        self._pending = step, self._threads.submit(save, self._ranks.store_barrier())

    def settled(self, *, wait: bool) -> int | None:
        """Return the step of the save that has finished in all ranks since the last call, or None if there is none.

        If `wait` is true, wait until the save has finished. If the save failed in one rank, every rank raises the error.
        """
        if self._pending is None:
            return None
        step, future = self._pending

        def look() -> bytes:
            if wait:
                _wait(future)
            if future.done():
                future.result()
            return b"ended" if future.done() else b""

        try:
            ended = all(self._ranks.all_gather("save", look))
        except BaseException:
            self._pending = None
            raise
        if not ended:
            return None
        self._pending = None
        return step

    def end(self, *, drop: bool = False) -> None:
        """Wait for the running save, and raise its error if it failed.

        With `drop`, abandon the save, so that its incomplete folder stays hidden.
        """
        (_, future), self._pending = self._pending or (0, None), None
        self._threads.shutdown(wait=False)
        if future is not None and not drop:
            _wait(future)
            future.result()


def _wait(future: Future[Path]) -> None:
    with unbroken():
        future.exception()


class Progress:
    """Take the steps of a run, save checkpoints, and restore checkpoints."""

    def __init__(
        self,
        config: RunConfig,
        pieces: Pieces,
        held_out: HeldOut,
        run: RunDirectory | None,
        say: Callable[[str], None],
        ranks: Ranks = ALONE,
    ) -> None:
        """Set the parts of a run and its run directory. The function `say` receives a line for each damaged checkpoint.

        If there are several `ranks`, only the first rank has a `run`.
        """
        self._config = config
        self._pieces = pieces
        self._held_out = held_out
        self._run = run
        self._report = say
        self._warned = False
        """Whether the user has been warned that no checkpoint has the metric of `checkpoint.best` yet."""
        self._ranks = ranks
        place = broadcast(ranks, "run directory", lambda: run and str(run.checkpoints.absolute()))
        self._checkpoints = run.checkpoints if run is not None else place and Path(place)
        """The folder in which all ranks save checkpoints, or None if there is no run directory."""
        self._saving = Saving(ranks)
        self.done = 0
        """The number of finished steps."""
        self.owed = False
        """Whether an evaluation is due after the last step but has not finished."""
        self._saved: int | None = None
        """The step of the newest checkpoint."""
        self.unfinished = False
        """Whether the last step failed. After a failed step, the run must return to a checkpoint."""
        self._in_step = False

    @property
    def kept(self) -> bool:
        """Whether the run has a directory for checkpoints."""
        return self._checkpoints is not None

    def step(self, record: Callable[[Step], Step]) -> Step:
        """Take the next step, and return the result of `record` for it."""
        self.settle()
        versions = dict(self._pieces.engine.versions)
        self._in_step = True
        try:
            with finishing():
                step = self._pieces.loop.step(self.done + 1)
                self.done = step.number
                return record(step)
        except BaseException:
            # Without checkpoints, a trainer can continue only with unchanged weights.
            self.unfinished = self.kept or dict(self._pieces.engine.versions) != versions
            raise
        finally:
            self._in_step = False

    def restore(self) -> None:
        """Return to the newest checkpoint if the last step failed. Raises CheckpointError if there is no checkpoint."""
        if self.unfinished:
            if not self.kept:
                self.check_finished()
            self.go_back()

    def check_finished(self) -> None:
        """Raise CheckpointError if the last step failed and the state before the step has not been restored."""
        if self.unfinished:
            raise CheckpointError(
                f"The step after {self.done} did not finish, but changed some weights. Load a checkpoint with `load_checkpoint`, or create "
                "a new trainer."
            )

    @property
    def is_new(self) -> bool:
        """Whether the newest checkpoint does not contain all finished steps."""
        return self.kept and not self.unfinished and self._saved not in (None, self.done)

    def when_stopped(self, number: int) -> str:
        """Return a string that describes what happens after the stop signal `number`."""
        if not self._in_step:
            return "saving"
        now = interrupts.work.rpartition(", ")[2]
        pressed = number == signal.SIGINT
        sooner = "Ctrl-C again stops at once" if pressed else f"after {stop_within():g} s it stops at once"
        return (
            f"finishing step {self.done + 1} (now: {now}), then saving; {sooner}, and the run then continues from step "
            f"{self._saved or 0}"
        )

    def keep_start(self) -> None:
        """Write the first checkpoint of a run if the run has no checkpoint."""
        # A run that is killed before its first save returns to this checkpoint.
        if self.kept and self._saved is None:
            self._write()

    def save(self) -> Path:
        """Write a checkpoint, delete surplus checkpoints, and return the folder of the new checkpoint."""
        assert self.kept, "checkpoints need a run directory"
        self.check_finished()
        doing(f"the checkpoint of step {self.done}")
        folder = self._write()
        if self._run is not None and not stop_requested():  # the next save prunes instead
            self._tidy(self._run, folder, self.done)
        return folder

    def best(self) -> Path | None:
        """Return the best checkpoint of the run by `checkpoint.best`, or None if the setting or its metric is missing."""
        kept = self._config.checkpoint
        if self._run is None or kept.best is None:
            return None
        return best_checkpoint(self._run.path, kept.best, lowest=kept.best_is == "lowest")

    def is_best(self) -> bool:
        """Return whether the last step is not saved yet and has a better value of the metric `checkpoint.best` than all checkpoints."""
        if self._config.checkpoint.best is None or not self.kept or self._saved == self.done:
            return False
        return bool(broadcast(self._ranks, "best", self._is_best))

    def _is_best(self) -> bool:
        kept = self._config.checkpoint
        assert self._run is not None, "the first rank has the run directory"
        assert kept.best is not None, "`is_best` is called only with a metric"
        values = values_of(self._run.path, kept.best)
        best = self.best()
        if self.done not in values or best is None:
            return self.done in values
        now, before = values[self.done], values[step_of(best) or 0]
        return bool(now < before if kept.best_is == "lowest" else now > before)

    def _tidy(self, run: RunDirectory, newest: Path, done: int) -> None:
        """Delete surplus checkpoints and recorded episodes."""
        metric, best = self._config.checkpoint.best, self.best()
        if metric is not None and best is None and done > 0 and not self._warned:
            self._warned = True
            self._report(why_no_best(run.path, metric))
        run.prune(self._config.checkpoint.keep, newest, best)
        left = [step for each in list_checkpoints(run.checkpoints) if (step := step_of(each)) is not None]
        for feature in self._pieces.loop.features.values():
            feature.pruned(left)
        run.forget_episodes("train", done, self._config.episodes.keep)
        run.forget_episodes("test", done, self._config.episodes.keep_evaluations)

    def begin_save(self) -> None:
        """Write a checkpoint and delete surplus checkpoints in the background. `settle` records when the save has finished."""
        self.check_finished()
        self.settle(wait=True)
        write, run, done = self._prepared(copied=True), self._run, self.done

        def save(meeting: Peers) -> Path:
            folder = write(meeting)
            if run is not None:
                self._tidy(run, folder, done)
            return folder

        self._saving.begin(self.done, save)

    def settle(self, *, wait: bool = False) -> None:
        """Record whether the background save has finished.

        With `wait`, wait until the save has finished. Raises the error of a failed save.
        """
        saved = self._saving.settled(wait=wait)
        self._saved = self._saved if saved is None else saved

    def end(self, *, drop: bool = False) -> None:
        """Wait for the background save and raise its error if it failed. With `drop`, abandon the save."""
        self._saving.end(drop=drop)

    def _write(self) -> Path:
        self.settle(wait=True)
        with unbroken():
            folder = self._prepared(copied=False)(self._ranks)
        self._saved = self.done
        return folder

    def _prepared(self, *, copied: bool) -> Callable[[Peers], Path]:
        """Return a function that saves the current state. With `copied`, the function may run during the next steps."""
        made = self._pieces
        assert self._checkpoints is not None, "checkpoints need a run directory"
        policies: Callable[[Path], None] = self.write_policies
        if copied and self._run is not None:
            policies = partial(
                write_policies,
                team=made.team,
                models=made.models,
                engine=made.engine,
                bases=made.base_hashes,
                held_out=self._held_out.judgement(self.done),
                copies=copied_weights(made.team, made.engine),
            )
        with unbroken():
            what = (self.done, made.engine, made.team, made.base_hashes, policies, made.loop.state())
            return prepare_checkpoint(self._checkpoints, self._run, *what, self._ranks, copied=copied)

    def write_policies(self, folder: Path) -> None:
        """Write every trained policy in a standard format, and a trained verifier with its judgement."""
        made, judgement = self._pieces, self._held_out.judgement(self.done)
        write_policies(folder, made.team, made.models, made.engine, made.base_hashes, judgement)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Load a checkpoint, or the newest intact checkpoint in a folder, and return the state of the loop."""
        self.settle(wait=True)
        made, take = self._pieces, self._pieces.loop.load_state
        found = broadcast(
            self._ranks, "checkpoint", lambda: str(find_checkpoint(folder, self._report).absolute())
        )
        place = folder if step_of(folder) is None else folder.parent
        whole = Path(found) if self._ranks.rank else place / Path(found).name
        loop = read_checkpoint(whole, made.engine, made.team, made.base_hashes, take)
        self.done = int(loop["step"])
        self.unfinished = False
        made.loop.publish()
        return loop

    def go_back(self) -> None:
        """Reset the run to its newest checkpoint, including recorded rows and episodes."""
        assert self._checkpoints is not None, "checkpoints need a run directory"
        if not broadcast(self._ranks, "checkpoints", self._any):
            return
        loop = self.load(self._checkpoints)
        self.owed = broadcast(self._ranks, "rewind", lambda: self._rewound(loop))
        self._saved = self.done

    def _any(self) -> bool:
        """Return whether there are checkpoints. If there are none, reset the run to step 0."""
        assert self._run is not None, "the first rank has the run directory"
        found = bool(list_checkpoints(self._run.checkpoints))
        if not found:
            self._run.start_over()
        return found

    def _rewound(self, loop: Mapping[str, Any]) -> bool:
        """Reset the files of the run to a checkpoint, and return whether the evaluation after the checkpoint's step is missing."""
        run = self._run
        assert run is not None, "the first rank has the run directory"
        # `train` repeats evaluations at the start and the end; an evaluation at an earlier end is kept.
        repeated = not 0 < self.done < self._config.training.steps
        run.rewind(loop["positions"], None if repeated else self.done)
        run.point_latest(loop["folder"])
        # A run that was stopped during an evaluation repeats it before its next step.
        return self.done not in [row["step"] for row in read_evaluations(run.path)]
