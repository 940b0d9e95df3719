"""Steps that do not end: what is half done is taken back, or neither saved nor gone on with."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import same_bits, sections

from kapelle.engines.train.torch.learner import Learner
from kapelle.errors import CheckpointError, NumericsError
from kapelle.training.trainer import Trainer


class TestTorn:
    """A step that ends in an error between the steps of its learners."""

    @pytest.fixture
    def trainer(self, tmp_path: Path) -> Iterator[Trainer]:
        given = sections(training={"steps": 4, "tasks_per_step": 1}, checkpoint={"every": 9, "keep": 9})
        given["team"] |= {"sharing": "lora"}
        with Trainer(**given, run_dir=tmp_path / "run") as trainer:
            next(trainer.steps(1))
            yield trainer

    def broken(self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        real, moved = Learner.launch, [0]

        def launch(learner: Learner, weight: float, *, undoable: bool) -> Any:
            moved[0] += 1
            if moved[0] == 2:
                raise error
            return real(learner, weight, undoable=undoable)

        with monkeypatch.context() as patched:
            patched.setattr(Learner, "launch", launch)
            with pytest.raises(type(error)):
                next(trainer.steps(1))

    def test_it_is_neither_saved_nor_gone_on_with(
        self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = trainer.save()
        self.broken(trainer, monkeypatch, KeyboardInterrupt())
        with pytest.raises(CheckpointError, match="unfinished step after"):
            trainer.save()
        with pytest.raises(CheckpointError, match="unfinished step after"):
            next(trainer.steps(1))
        trainer.load_checkpoint(folder.parent)
        assert next(trainer.steps(1)).number == 2

    def test_an_error_before_anything_moved_leaves_the_step_before(
        self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = deepcopy(trainer.engine.state())
        with monkeypatch.context() as patched:
            patched.setattr(trainer.engine, "update", broken_update)
            with pytest.raises(NumericsError, match="planned"):
                next(trainer.steps(1))
        assert same_bits(trainer.engine.state(), before)
        assert trainer.save().name == "00000001"
        assert next(trainer.steps(1)).number == 2


def broken_update(*_: Any) -> dict[str, float]:
    raise NumericsError("planned")


def test_who_goes_back_in_one_process_can_save(tmp_path: Path) -> None:
    given = sections(training={"steps": 9, "tasks_per_step": 1}, checkpoint={"every": 2, "keep": 9})
    with Trainer(**given, run_dir=tmp_path / "run") as trainer:
        list(trainer.steps(3))
        trainer._progress.go_back()
        assert trainer.done == 2
        list(trainer.steps(1))
        assert trainer.save().name == "00000003"


def test_an_owed_evaluation_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = sections(
        training={"steps": 9, "tasks_per_step": 1},
        checkpoint={"every": 2, "keep": 9},
        evaluation={"before_and_after": False, "every": 4, "problems": 2, "problems_while_training": 2},
    )
    run = tmp_path / "run"
    with Trainer(**given, run_dir=run) as trainer:
        list(trainer.steps(3))
        trainer.save()
    with Trainer(**given, run_dir=run, resume=True) as trainer:
        measured: list[int] = []
        monkeypatch.setattr(trainer, "_measure", lambda last: measured.append(trainer.done))
        for _ in range(2):
            next(trainer.steps(1))
        assert measured.count(3) <= 1
        assert not trainer._progress.owed
