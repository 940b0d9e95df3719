"""How far a run is, and what of it is saved: a step counts whole or not at all.

A stop request waits for the end of the step. After a step that did not end (an error, a second Ctrl-C) the run
continues from its newest checkpoint, as it does after a crash.

With several ranks each writes its share of a checkpoint, and the first one lists and prunes them; all load the same one, from
a folder that all can read.
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
from kapelle.runtime.event_loop import AbandonableThreads
from kapelle.runtime.files import step_of
from kapelle.runtime.interrupts import finishing, stop_asked, stop_within, unbroken
from kapelle.runtime.process_tree import doing
from kapelle.runtime.ranks import ALONE, Peers, Ranks, broadcast
from kapelle.settings.schema import RunConfig
from kapelle.training.held_out import HeldOut
from kapelle.training.starting import Pieces
from kapelle.training.step_report import Step

# -------- A checkpoint that is written while training goes on: at most one, whose end all ranks learn of together


class Saving:
    """The save that is under way, if any."""

    def __init__(self, ranks: Ranks) -> None:
        """Save with these ranks."""
        self._ranks = ranks
        self._threads = AbandonableThreads(1)
        self._pending: tuple[int, Future[Path]] | None = None

    def begin(self, step: int, save: Callable[[Peers], Path]) -> None:
        """Begin to save `step` in a thread; none is under way."""
        assert self._pending is None, "one checkpoint is written at a time"
        self._pending = step, self._threads.submit(save, self._ranks.store_barrier())

    def settled(self, *, wait: bool) -> int | None:
        """Return the step of a save that has ended in all ranks since the last call; None if there is none.

        `wait` waits for one that is under way. If it failed in one rank, every rank raises that error.
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
        """Wait for a save that is under way and raise its error, if it failed; or `drop` it: its folder stays hidden, half written."""
        (_, future), self._pending = self._pending or (0, None), None
        self._threads.shutdown(wait=False)
        if future is not None and not drop:
            _wait(future)
            future.result()


def _wait(future: Future[Path]) -> None:
    with unbroken():
        future.exception()


class Progress:
    """Takes the steps of one run, saves their results, and returns to saved ones."""

    def __init__(
        self,
        config: RunConfig,
        pieces: Pieces,
        held_out: HeldOut,
        run: RunDirectory | None,
        say: Callable[[str], None],
        ranks: Ranks = ALONE,
    ) -> None:
        """Take what is trained and where it is saved; `say` gets a line for each damaged checkpoint.

        Of several `ranks` only the first one has a `run`.
        """
        self._config = config
        self._pieces = pieces
        self._held_out = held_out
        self._run = run
        self._say = say
        self._warned = False
        """Whether the user was told that no checkpoint has the metric of `checkpoint.best` yet."""
        self._ranks = ranks
        place = broadcast(ranks, "run directory", lambda: run and str(run.checkpoints.absolute()))
        self._checkpoints = run.checkpoints if run is not None else place and Path(place)
        """Where all ranks save; None without a run directory."""
        self._saving = Saving(ranks)
        self.done = 0
        """Steps behind the weights."""
        self.owed = False
        """Whether the evaluation of the step that a run continues from is missing."""
        self._saved: int | None = None
        """The step of the newest checkpoint."""
        self.unfinished = False
        """Whether the last step did not end, so that the run has to return to a checkpoint."""
        self._in_step = False

    @property
    def kept(self) -> bool:
        """Whether what is learned is saved."""
        return self._checkpoints is not None

    def step(self, record: Callable[[Step], Step]) -> Step:
        """Take the next step and record it; returns what `record` returns."""
        self.settle()
        versions = dict(self._pieces.engine.versions)
        self._in_step = True
        try:
            with finishing():
                step = self._pieces.loop.step(self.done + 1)
                self.done = step.number
                return record(step)
        except BaseException:
            # Without a checkpoint to return to, a trainer goes on with weights that have not changed.
            self.unfinished = self.kept or dict(self._pieces.engine.versions) != versions
            raise
        finally:
            self._in_step = False

    def restore(self) -> None:
        """Return to the newest checkpoint if the last step did not end; CheckpointError without one."""
        if self.unfinished:
            if not self.kept:
                self.refuse_unfinished()
            self.go_back()

    def refuse_unfinished(self) -> None:
        """Raise CheckpointError if the last step did not end."""
        if self.unfinished:
            raise CheckpointError(
                f"A step after {self.done} did not end, and the weights are those of a part of it. Load a checkpoint with "
                "`load_checkpoint`, or make the trainer again."
            )

    @property
    def is_new(self) -> bool:
        """Whether there are steps that no checkpoint holds and that can be saved."""
        return self.kept and not self.unfinished and self._saved not in (None, self.done)

    def when_stopped(self, number: int) -> str:
        """Return what a signal that asks to stop leads to now."""
        if not self._in_step:
            return "then saving"
        pressed = number == signal.SIGINT
        sooner = "Ctrl-C again stops at once" if pressed else f"after {stop_within():g} s it stops at once"
        return (
            f"finishing step {self.done + 1}, then saving; {sooner}, and the run then continues from step "
            f"{self._saved or 0}"
        )

    def keep_start(self) -> None:
        """Write the first checkpoint of a run that has none."""
        # Before the first row, so that a run killed before its first save has a checkpoint to return to.
        if self.kept and self._saved is None:
            self._write()

    def save(self) -> Path:
        """Write a checkpoint, remove surplus ones, and return its folder; if that fails nothing is lost."""
        assert self.kept, "a trainer without a run directory keeps nothing"
        self.refuse_unfinished()
        doing(f"the checkpoint of step {self.done}")
        folder = self._write()
        if self._run is not None and not stop_asked():  # pruning takes time, and the next save does it
            self._tidy(self._run, folder, self.done)
        return folder

    def best(self) -> Path | None:
        """Return the run's best checkpoint by `checkpoint.best`; None without that setting, or before a checkpoint has its metric."""
        kept = self._config.checkpoint
        if self._run is None or kept.best is None:
            return None
        return best_checkpoint(self._run.path, kept.best, lowest=kept.best_is == "lowest")

    def is_best(self) -> bool:
        """Return whether the present step has a better value of `checkpoint.best` than every checkpoint, and is not saved."""
        if self._config.checkpoint.best is None or not self.kept or self._saved == self.done:
            return False
        return bool(broadcast(self._ranks, "best", self._is_best))

    def _is_best(self) -> bool:
        kept = self._config.checkpoint
        assert self._run is not None, "the first rank has the run directory"
        assert kept.best is not None, "`is_best` asks only with a metric"
        values = values_of(self._run.path, kept.best)
        best = self.best()
        if self.done not in values or best is None:
            return self.done in values
        now, before = values[self.done], values[step_of(best) or 0]
        return bool(now < before if kept.best_is == "lowest" else now > before)

    def _tidy(self, run: RunDirectory, newest: Path, done: int) -> None:
        """Delete checkpoints and episodes that are no longer to be kept."""
        metric, best = self._config.checkpoint.best, self.best()
        if metric is not None and best is None and done > 0 and not self._warned:
            self._warned = True
            self._say(why_no_best(run.path, metric))
        run.prune(self._config.checkpoint.keep, newest, best)
        left = [step for each in list_checkpoints(run.checkpoints) if (step := step_of(each)) is not None]
        for feature in self._pieces.loop.features.values():
            feature.pruned(left)
        run.forget_episodes("train", done, self._config.episodes.keep)
        run.forget_episodes("test", done, self._config.episodes.keep_evaluations)

    def begin_save(self) -> None:
        """Write a checkpoint and remove surplus ones while the next steps are taken; `settle` reports how it ended."""
        self.refuse_unfinished()
        self.settle(wait=True)
        write, run, done = self._prepared(copied=True), self._run, self.done

        def save(meeting: Peers) -> Path:
            folder = write(meeting)
            if run is not None:
                self._tidy(run, folder, done)
            return folder

        self._saving.begin(self.done, save)

    def settle(self, *, wait: bool = False) -> None:
        """Note the end of a save that was begun, if it has ended, or `wait` for it; raises its error, if it failed."""
        saved = self._saving.settled(wait=wait)
        self._saved = self._saved if saved is None else saved

    def end(self, *, drop: bool = False) -> None:
        """Wait for a save that is under way, and raise its error, if it failed; or `drop` it."""
        self._saving.end(drop=drop)

    def _write(self) -> Path:
        self.settle(wait=True)
        with unbroken():
            folder = self._prepared(copied=False)(self._ranks)
        self._saved = self.done
        return folder

    def _prepared(self, *, copied: bool) -> Callable[[Peers], Path]:
        """Return what saves the present state; `copied`, it may be called while the next steps are taken."""
        made = self._pieces
        assert self._checkpoints is not None, "only what is kept is written"
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
        """Write every trained policy in a form that others can load, and a verifier with its judgement."""
        made, judgement = self._pieces, self._held_out.judgement(self.done)
        write_policies(folder, made.team, made.models, made.engine, made.base_hashes, judgement)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Load a checkpoint, or the newest whole one of a folder, and return its loop part."""
        self.settle(wait=True)
        made, take = self._pieces, self._pieces.loop.load_state
        found = broadcast(
            self._ranks, "checkpoint", lambda: str(find_checkpoint(folder, self._say).absolute())
        )
        place = folder if step_of(folder) is None else folder.parent
        whole = Path(found) if self._ranks.rank else place / Path(found).name
        loop = read_checkpoint(whole, made.engine, made.team, made.base_hashes, take)
        self.done = int(loop["step"])
        self.unfinished = False
        made.loop.publish()
        return loop

    def go_back(self) -> None:
        """Return the run to its newest checkpoint, with its rows and episodes."""
        assert self._checkpoints is not None, "a trainer without a run directory has nothing to go back to"
        if not broadcast(self._ranks, "checkpoints", self._any):
            return
        loop = self.load(self._checkpoints)
        self.owed = broadcast(self._ranks, "rewind", lambda: self._rewound(loop))
        self._saved = self.done

    def _any(self) -> bool:
        """Return whether there are checkpoints; without any the run starts anew."""
        assert self._run is not None, "the first rank has the run directory"
        found = bool(list_checkpoints(self._run.checkpoints))
        if not found:
            self._run.start_anew()
        return found

    def _rewound(self, loop: Mapping[str, Any]) -> bool:
        """Return the run's files to a checkpoint; return whether its evaluation is missing."""
        run = self._run
        assert run is not None, "the first rank has the run directory"
        # An evaluation at the start or the end is done again in `train`; one at a former end stays.
        repeated = not 0 < self.done < self._config.training.steps
        run.rewind(loop["positions"], None if repeated else self.done)
        run.point_latest(loop["folder"])
        # A run that was stopped inside an evaluation owes it, before its next step.
        return self.done not in [row["step"] for row in read_evaluations(run.path)]
