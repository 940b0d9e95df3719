"""How far a run is, and what of it is saved: a step counts whole or not at all.

An interrupted step is undone. If that is impossible because weights have changed, the run returns to its newest
checkpoint; without one, nothing may be saved or learned until one is loaded.
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
    """Takes the steps of one run, saves their results, and returns to saved ones."""

    def __init__(
        self,
        config: RunConfig,
        pieces: Pieces,
        held_out: HeldOut,
        run: RunDirectory | None,
        say: Callable[[str], None],
    ) -> None:
        """Take what is trained and where it is saved; `say` gets a line for each damaged checkpoint."""
        self._config = config
        self._pieces = pieces
        self._held_out = held_out
        self._run = run
        self._say = say
        self.done = 0
        """Steps behind the weights."""
        self.owed = False
        """Whether the evaluation of the step that a run continues from is missing."""
        self.went_back = False
        """Whether an interruption cost steps."""
        self._saved: int | None = None
        """The step of the newest checkpoint."""
        self._torn = False
        """Whether the weights are those of an unfinished step."""

    def step(self) -> Step:
        """Take the next step."""
        loop = self._pieces.loop
        loop.may_go_back = self._run is not None
        try:
            step = loop.step(self.done + 1)
        except StopRequested:
            self._take_back()
            raise
        except BaseException:
            self._torn = True  # unless everything can be restored
            self._torn = not loop.take_back()
            raise
        self.done = step.number
        return step

    def _take_back(self) -> None:
        """Undo an interrupted step, or return to the last checkpoint."""
        with unbroken():
            if not self._pieces.loop.take_back() and self._run is not None:
                self.go_back()
                self.went_back = True

    def refuse_torn(self) -> None:
        """Raise CheckpointError if the weights are those of an unfinished step."""
        if self._torn:
            raise CheckpointError(
                f"The weights are those of an unfinished step after {self.done}. Use the last checkpoint: "
                "resume the run, or call `load_checkpoint`."
            )

    @property
    def is_new(self) -> bool:
        """Whether there are steps that no checkpoint holds."""
        return self._run is not None and self._saved not in (None, self.done)

    def keep_start(self) -> None:
        """Write the first checkpoint of a run that has none."""
        # Before the first row, so that a run killed before its first save has a checkpoint to return to.
        if self._run is not None and self._saved is None:
            self._write(self._run)

    def save(self) -> Path:
        """Write a checkpoint, remove surplus ones, and return its folder; if that fails nothing is lost."""
        assert self._run is not None, "a trainer without a run directory keeps nothing"
        self.refuse_torn()
        folder = self._write(self._run)
        if not stop_asked():  # pruning takes time, and the next save does it
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
        """Write every trained policy in a form that others can load, and a verifier with its judgement."""
        made, judgement = self._pieces, self._held_out.judgement(self.done)
        write_policies(folder, made.team, made.models, made.engine, made.base_hashes, judgement)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Load the newest whole checkpoint of a folder and return its loop part."""
        made, take = self._pieces, self._pieces.loop.load_state
        loop = read_checkpoint(folder, made.engine, made.team, made.base_hashes, self._say, take)
        self.done = int(loop["step"])
        self._torn = False
        made.loop.publish()
        return loop

    def go_back(self) -> None:
        """Return the run to its newest checkpoint, with its rows and episodes."""
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
