"""Steps that do not end: what is half done is neither saved nor trained further."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import same_bits, sections

from kapelle.engines.train.torch.learner import Learner
from kapelle.errors import CheckpointError, NumericsError
from kapelle.runs.reader import read_metrics
from kapelle.training.console import Lines, Watch
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

    def test_it_is_not_saved_and_training_goes_on_from_the_newest_checkpoint(
        self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        trainer.save()
        list(trainer.steps(1))
        expected = deepcopy(trainer.engine.state())
        self.broken(trainer, monkeypatch, KeyboardInterrupt())
        with pytest.raises(CheckpointError, match="did not finish"):
            trainer.save()
        with pytest.raises(CheckpointError, match="did not finish"):
            trainer.save_policies(tmp_path / "policies")
        assert next(trainer.steps(1)).number == 2
        assert same_bits(trainer.engine.state(), expected)
        assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]

    def test_without_a_run_directory_changed_weights_are_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = sections(training={"steps": 4, "tasks_per_step": 1})
        given["team"] |= {"sharing": "lora"}
        with Trainer(**given) as trainer:
            self.broken(trainer, monkeypatch, KeyboardInterrupt())
            with pytest.raises(CheckpointError, match="did not finish"):
                next(trainer.steps(1))

    def test_without_a_run_directory_an_error_before_the_update_costs_its_step_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Trainer(**sections(training={"steps": 4, "tasks_per_step": 1})) as trainer:
            with monkeypatch.context() as patched:
                patched.setattr(trainer.engine, "update", broken_update)
                with pytest.raises(NumericsError, match="planned"):
                    next(trainer.steps(1))
            assert next(trainer.steps(1)).number == 1


def broken_update(*_: Any) -> dict[str, float]:
    raise NumericsError("planned")


@pytest.mark.sample(2)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_step_of_train_lets_it_end_and_a_second_one_does_not(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sections(training={"steps": 4, "tasks_per_step": 1}, checkpoint={"every": 9, "keep": 9})
    run, shown = tmp_path / "run", io.StringIO()
    with Trainer(**given, run_dir=run, observer=Watch(Lines(shown))) as trainer:
        update = trainer.engine.update

        def pressed(*arguments: Any) -> dict[str, float]:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            return update(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(trainer.engine, "update", pressed)
            if times == 1:
                summary = trainer.train()
                assert (summary.steps, summary.stopped_by) == (1, 130)
                assert "stopping: finishing step 1 (now: update), then saving" in shown.getvalue()
                assert (run / "latest").read_text() == "checkpoints/00000001\n"
            else:
                with pytest.raises(KeyboardInterrupt):
                    trainer.train()
        assert trainer.train().steps == 4
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
