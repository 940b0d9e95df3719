from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.episodes import TASK
from tests.support.five_steps import trained as trained  # noqa: PLC0414 - a fixture

from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.errors import CheckpointError
from kapelle.rollout.play import Play
from kapelle.runtime.event_loop import run_async
from kapelle.training.observer import Silent
from kapelle.training.served import open_served
from kapelle.training.trainer import Trainer
from kapelle.types import Sampling


def said(play: Play) -> list[Completion]:
    requests = [
        Request(name, name, (), (7, 8, 9), Sampling(max_tokens=9), 4, TASK) for name in play.engine.policies
    ]
    return [run_async(lambda request=request: play.engine.generate(request)) for request in requests]  # type: ignore[misc]


@pytest.mark.slow
def test_it_acts_with_the_weights_that_a_trainer_loads(trained: Path) -> None:
    served = open_served(trained, Silent())
    with Trainer.from_run(trained) as trainer:
        assert served.step == trainer.done == 5
        assert said(served.play) == said(trainer.play)
        assert {each.version for each in said(served.play)} == {5}


def test_a_run_without_checkpoints_has_nothing_to_serve(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        open_served(tmp_path, Silent())
