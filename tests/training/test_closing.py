"""A trainer gives back whatever it has opened, whichever part of that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import sections

from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.training.trainer import Trainer


class Closing:
    """Notes who is closed, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.closed: list[str] = []
        for kind in (LocalEngine, TorchTrainEngine):
            monkeypatch.setattr(kind, "close", lambda engine: self.closed.append(type(engine).__name__))
        monkeypatch.setattr("kapelle.training.records.open_trackers", lambda *_: [self])

    def log(self, step: int, metrics: Any) -> None:
        """Record nothing."""

    def close(self) -> None:
        self.closed.append("tracker")


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> Closing:
    return Closing(monkeypatch)


def test_engines_and_trackers_are_closed_once(closing: Closing, tmp_path: Path) -> None:
    with Trainer(**sections(), run_dir=tmp_path / "run") as trainer:
        assert closing.closed == []
    trainer.close()
    assert sorted(closing.closed) == ["LocalEngine", "TorchTrainEngine", "tracker"]


def test_whoever_gave_an_engine_closes_it(closing: Closing) -> None:
    with Trainer(**sections()) as trainer:
        given = trainer.setup.engine
        closing.closed.clear()
        with Trainer(**sections(), engine=given):
            pass
        assert closing.closed == ["TorchTrainEngine"]


def test_an_engine_that_fails_to_close_keeps_no_run_locked(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = Trainer(**sections(), run_dir=tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(TorchTrainEngine, "close", broken)
        patched.setattr(closing, "close", broken)
        with pytest.raises(OSError, match="broken"):
            trainer.close()
    assert "LocalEngine" in closing.closed
    Trainer(**sections(), run_dir=tmp_path / "run", resume=True).close()


def broken(*_: Any) -> None:
    raise OSError("broken")
