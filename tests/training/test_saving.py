"""Checkpoints that are written while training continues are those that a run that waits writes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.killed_runs import trainer
from tests.support.tiny import same_bits

from kapelle.errors import CheckpointError
from kapelle.runs import checkpoint
from kapelle.runs.checkpoint_folder import list_checkpoints
from kapelle.runs.reader import read_latest
from kapelle.training.progress import Progress

SOON = 120.0
"""Seconds that nothing here takes."""


def run_of(place: Path, method: str = "grpo", *, background: bool = True, **over: Any) -> Any:
    resume = (place / "config.yaml").exists()
    kept = {"every": 1, "keep": 9, "background": background}
    return trainer(
        method, place, resume=resume, checkpoint=kept, evaluation={"before_and_after": False}, **over
    )


def state(folder: Path) -> dict[str, Any]:
    return {part: tree for part, tree in checkpoint.load(folder).items() if part != "loop"}


def exported(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.glob("policies/**/*.*"))}


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch, step: int) -> Iterator[threading.Event]:
    """Let the save of a step wait for the event before its seal."""
    go_on, seal = threading.Event(), checkpoint._write_manifest

    def late(folder: Path, number: int, *given: Any) -> None:
        assert number != step or go_on.wait(SOON)
        seal(folder, number, *given)

    monkeypatch.setattr(checkpoint, "_write_manifest", late)
    try:
        yield go_on
    finally:
        go_on.set()


def written_late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let each save that is begun write nothing before the next one begins, or the event is set."""
    go_on, write, begin = threading.Event(), checkpoint._write_state, Progress.begin_save
    go_on.set()

    def late(*given: Any) -> list[Path]:
        assert go_on.wait(SOON)
        return write(*given)

    def beginning(progress: Progress) -> None:
        go_on.set()
        progress.settle(wait=True)
        go_on.clear()
        begin(progress)

    monkeypatch.setattr(checkpoint, "_write_state", late)
    monkeypatch.setattr(Progress, "begin_save", beginning)
    return go_on


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "whole"])
def test_what_is_written_meanwhile_is_what_the_step_had_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    go_on = written_late(monkeypatch)
    for background in (False, True):
        random.seed(0)  # the environment draws from the global generators
        np.random.seed(0)
        torch.manual_seed(0)
        with run_of(tmp_path / str(background), method, background=background) as made:
            list(made.steps(3))
            go_on.set()
    waited, meanwhile = (list_checkpoints(tmp_path / name / "checkpoints") for name in ("False", "True"))
    assert [folder.name for folder in waited] == [folder.name for folder in meanwhile]
    assert len(waited) == 4
    assert not same_bits(state(waited[2]), state(waited[3]))
    for one, other in zip(waited, meanwhile, strict=True):
        assert same_bits(state(one), state(other))
        assert exported(one) == exported(other) != {}


def test_steps_are_taken_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_up(monkeypatch, 1) as go_on, run_of(tmp_path / "run") as made:
        steps = made.steps(3)
        assert next(steps).number == 1
        kept = list_checkpoints(tmp_path / "run" / "checkpoints")
        assert [folder.name for folder in kept] == ["00000000"]
        assert read_latest(tmp_path / "run") == kept[0]
        # The next save waits: only one is written at a time.
        threading.Timer(0.2, go_on.set).start()
        assert [step.number for step in steps] == [2, 3]
        made.save()
        names = [folder.name for folder in list_checkpoints(tmp_path / "run" / "checkpoints")]
        assert names == ["00000000", "00000001", "00000002", "00000003", "00000003-2"]


def test_a_run_that_ends_waits_for_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_up(monkeypatch, 1) as go_on, run_of(tmp_path / "run") as made:
        next(made.steps(1))
        threading.Timer(0.2, go_on.set).start()
    newest = read_latest(tmp_path / "run")
    assert newest is not None
    assert newest.name == "00000001"


def broken(_folder: Path, step: int, *_given: Any) -> None:
    if step == 1:
        raise OSError(28, "No space left on device")


def seal_that(monkeypatch: pytest.MonkeyPatch, fails: Callable[..., None]) -> None:
    seal = checkpoint._write_manifest

    def either(*given: Any) -> None:
        fails(*given)
        seal(*given)

    monkeypatch.setattr(checkpoint, "_write_manifest", either)


def test_a_disk_that_refused_is_told_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, run_of(tmp_path / "run") as made:
        seal_that(patched, broken)
        steps = made.steps(3)
        next(steps)
        with pytest.raises(
            CheckpointError, match=r"checkpoint of step 1 .*the disk is full. Free some space"
        ):
            list(steps)
    assert read_latest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "00000000"
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    with run_of(tmp_path / "run") as again:
        assert again.done == 0
        assert [step.number for step in again.steps(1)] == [1]


def test_a_second_ctrl_c_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_up(monkeypatch, 1):
        made = run_of(tmp_path / "run")
        next(made.steps(1))
        made.__exit__(KeyboardInterrupt)
        assert [folder.name for folder in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["00000000"]
