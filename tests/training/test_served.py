from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.episodes import TASK
from tests.support.five_steps import trained as trained  # noqa: PLC0414 - a fixture

from kapelle.engines.rollout.protocol import Completion, Request
from kapelle.errors import CheckpointError, ConfigError
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.training.exporting import export
from kapelle.training.observer import Silent
from kapelle.training.served import open_served
from kapelle.training.trainer import Trainer
from kapelle.types import Sampling


def said(setup: RolloutSetup) -> list[Completion]:
    requests = [
        Request(name, name, (), (7, 8, 9), Sampling(max_tokens=9), 4, TASK) for name in setup.engine.policies
    ]
    return [run_async(lambda request=request: setup.engine.generate(request)) for request in requests]  # type: ignore[misc]


@pytest.mark.slow
def test_it_acts_with_the_weights_that_a_trainer_loads(trained: Path) -> None:
    served = open_served(trained, Silent())
    with Trainer.from_run(trained) as trainer:
        assert served.step == trainer.done == 5
        assert said(served.setup) == said(trainer.setup)
        assert {each.version for each in said(served.setup)} == {5}


@pytest.mark.slow
def test_an_exported_team_plays_from_its_folder_alone_as_its_run_does(trained: Path, tmp_path: Path) -> None:
    """Moved after the export, with the run out of reach; merged models round once, so that they are compared by their log-probs."""
    export(trained, tmp_path / "out", "peft", Silent())
    export(trained, tmp_path / "merged", "hf", Silent())
    folder = (tmp_path / "out").rename(tmp_path / "elsewhere")
    here, there = open_served(trained, Silent()), open_served(folder, Silent())
    assert there.step == 5
    assert said(there.setup) == said(here.setup)
    whole = open_served(tmp_path / "merged", Silent())
    for one, other in zip(said(whole.setup), said(here.setup), strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    with pytest.raises(ConfigError, match=r"has one checkpoint\. Remove `@best`"):
        open_served(folder, Silent(), which="best")


def test_a_run_without_checkpoints_has_nothing_to_serve(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        open_served(tmp_path, Silent())
