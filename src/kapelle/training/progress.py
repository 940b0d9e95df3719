"""How far a run is, and what of that is saved: a step counts whole or not at all.

A step that is broken off is taken back. Where that cannot be, because weights have moved, the run goes back to its newest
checkpoint; without one nothing may be saved or learned until somebody loads one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kapelle.errors import CheckpointError
from kapelle.runs.checkpoint_contents import read_checkpoint, write_checkpoint, write_policies
from kapelle.runs.checkpoint_folder import list_checkpoints
from kapelle.runs.writer import RunDirectory, read_evaluations
from kapelle.runtime.interrupts import StopRequested, stop_asked, unbroken
from kapelle.settings.schema import RunConfig
from kapelle.training.held_out import HeldOut
from kapelle.training.loop import Step
from kapelle.training.starting import Pieces


class Progress:
    """Takes the steps of one run, saves what they come to, and goes back to what was saved."""

    def __init__(
        self,
        config: RunConfig,
        pieces: Pieces,
        held_out: HeldOut,
        run: RunDirectory | None,
        say: Callable[[str], None],
    ) -> None:
        """Take what is trained and where it is saved; `say` hears of checkpoints that are damaged."""
        self._config = config
        self._pieces = pieces
        self._held_out = held_out
        self._run = run
        self._say = say
        self.done = 0
        """Steps behind the weights."""
        self.owed = False
        """Whether the evaluation of the step that a run goes on from is missing."""
        self.went_back = False
        """Whether a stop cost steps."""
        self._saved: int | None = None
        """The step of the newest checkpoint."""
        self._torn = False
        """Whether the weights are of a step that broke off half way."""

    def step(self) -> Step:
        """Take the next step; whoever plays acts with what it came to."""
        loop = self._pieces.loop
        loop.may_go_back = self._run is not None
        try:
            step = loop.step(self.done + 1)
        except StopRequested:
            self._take_back()
            raise
        except BaseException:
            self._torn = True  # unless everything can be put back
            self._torn = not loop.take_back()
            raise
        self.done = step.number
        return step

    def _take_back(self) -> None:
        """Undo a step that was broken off, or go back to the last checkpoint."""
        with unbroken():
            if not self._pieces.loop.take_back() and self._run is not None:
                self.go_back()
                self.went_back = True

    def refuse_torn(self) -> None:
        """Raise CheckpointError where the weights are of no step at all."""
        if self._torn:
            raise CheckpointError(
                f"The weights are those of a step after {self.done} that broke off half way. Take the last checkpoint: "
                "resume the run, or call `load_checkpoint`."
            )

    @property
    def is_new(self) -> bool:
        """Whether there are steps that no checkpoint holds."""
        return self._run is not None and self._saved not in (None, self.done)

    def keep_start(self) -> None:
        """Write the first checkpoint of a run that has none yet."""
        # Before the first row, so that a run killed before its first save has something to go back to.
        if self._run is not None and self._saved is None:
            self._write(self._run)

    def save(self) -> Path:
        """Write a checkpoint, remove those that are too many, and return its folder; nothing is lost when that fails."""
        assert self._run is not None, "a trainer without a run directory keeps nothing"
        self.refuse_torn()
        folder = self._write(self._run)
        if not stop_asked():  # reading what is kept takes its time, and the next save does it
            self._run.prune(self._config.checkpoint.keep, folder)
        return folder

    def _write(self, run: RunDirectory) -> Path:
        made = self._pieces
        state, policies = made.loop.state(), self.write_policies
        with unbroken():
            folder = write_checkpoint(
                run, self.done, made.engine, made.team, made.base_hashes, policies, state
            )
        self._saved = self.done
        return folder

    def write_policies(self, folder: Path) -> None:
        """Write every trained policy as others load it, and a verifier with what is known of it."""
        made, judgement = self._pieces, self._held_out.judgement(self.done)
        write_policies(folder, made.team, made.models, made.engine, made.base_hashes, judgement)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Take the newest whole checkpoint of a folder and return its loop part."""
        made, take = self._pieces, self._pieces.loop.load_state
        loop = read_checkpoint(folder, made.engine, made.team, made.base_hashes, self._say, take)
        self.done = int(loop["step"])
        self._torn = False
        made.loop.publish()
        return loop

    def go_back(self) -> None:
        """Take the run back to its newest checkpoint, its rows and episodes too."""
        run = self._run
        assert run is not None, "a trainer without a run directory has nothing to go back to"
        if not list_checkpoints(run.checkpoints):
            run.start_anew()
            return
        loop = self.load(run.checkpoints)
        # An evaluation at the start or the end is done again in `train`; one at a former end stays.
        repeated = not 0 < self.done < self._config.training.steps
        run.rewind(loop["positions"], None if repeated else self.done)
        run.point_latest(loop["folder"])
        self._saved = self.done
        # A run that was stopped inside an evaluation owes it, before its next step.
        self.owed = self.done not in [row["step"] for row in read_evaluations(run.path)]
