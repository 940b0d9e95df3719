"""Two processes with one run directory: only one of them writes, whatever happens to its files."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.support.killed_runs import STEPS, spawn, start, trainer
from tests.support.writers import Writer, writer

from kapelle.errors import CheckpointError, RunDirectoryError
from kapelle.runs import checkpoint
from kapelle.runs.reader import is_run, read_metrics, read_status
from kapelle.runs.writer import RunDirectory

ALL = ("row", "status", "episodes", "latest")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def without_its_lock(run: Path, *how: str) -> Iterator[Writer]:
    """A trainer whose lock file is removed while it runs."""
    with writer(run, *how) as first:
        assert first.said() == "taken"
        (run / "lock").unlink()
        yield first


def said_without_its_lock(run: Path, what: str, *how: str) -> tuple[str, int]:
    """Return the answer of a trainer whose lock another one has taken, when it is asked to write, and the other's process id.

    The first one must write nothing, and the second one can write.
    """
    with without_its_lock(run, *how) as first, writer(run, "resume", "no-folder-locks") as second:
        assert second.said() == "taken"
        before = contents(run)
        said = first.told(what, 1)
        assert contents(run) == before
        assert second.told(what, 1) == "written"
        return said, second.pid


class TestRemovedLock:
    def test_the_trainer_continues_and_others_are_rejected(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        with without_its_lock(run) as first:
            assert is_run(run)
            with writer(run, "resume") as second:
                assert "is in use by" in second.said()
            assert first.told("row", 1) == "written"
            assert json.loads((run / "lock").read_text())["pid"] == first.pid
            with writer(run, "resume") as third:
                assert f"is in use by process {first.pid} on " in third.said()

    @pytest.mark.slow
    @pytest.mark.parametrize("what", ["row", "latest"])
    def test_a_lock_of_another_process_stops_the_trainer(self, tmp_path: Path, what: str) -> None:
        said, pid = said_without_its_lock(tmp_path / "run", what)
        assert said.startswith("stopped: ")
        assert f"is in use by process {pid} on " in said


class TestDiskWithoutFolderLocks:
    def test_the_file_alone_rejects_a_second_trainer(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        with writer(run, "no-folder-locks") as first:
            assert first.said() == "taken"
            assert first.told("row", 1) == "written"
            with writer(run, "resume", "no-folder-locks") as second:
                assert f"is in use by process {first.pid} on " in second.said()

    @pytest.mark.slow
    @pytest.mark.parametrize("what", ["episodes", "latest"])
    def test_a_trainer_without_its_lock_stops_before_it_writes(self, tmp_path: Path, what: str) -> None:
        said, _ = said_without_its_lock(tmp_path / "run", what, "no-folder-locks")
        assert "another trainer may own this run now" in said


class TestMovedDirectory:
    def test_a_moved_directory_is_not_written(self, tmp_path: Path) -> None:
        run, moved = tmp_path / "run", tmp_path / "moved"
        with writer(run) as first:
            assert first.said() == "taken"
            run.rename(moved)
            before = contents(moved)
            for what in ALL:
                assert "was moved, deleted or replaced" in first.told(what, 1)
            assert not run.exists()
            assert contents(moved) == before
            with writer(moved, "resume") as second:
                assert f"is in use by process {first.pid}" in second.said()
        with writer(moved, "resume") as third:
            assert third.said() == "taken"


@pytest.mark.parametrize("how", ["fork", "fork exec"])
def test_a_child_that_outlives_the_trainer_holds_no_lock(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    with writer(run, *how.split()) as first:
        child = int(first.said())
        try:
            assert first.said() == "taken"
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            os.kill(child, 0)  # it lives
            with writer(run, "resume") as second:
                assert second.said() == "taken"
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_process_with_the_number_of_the_dead_trainer_is_not_the_trainer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with writer(run) as first:
        assert first.said() == "taken"
        assert read_status(run).state == "running"
    assert read_status(run).state == "killed"
    # As if the number had been given again, to this process.
    for name in ("status.json", "lock"):
        values = json.loads((run / name).read_bytes())
        (run / name).write_text(json.dumps({**values, "pid": os.getpid()}))
    assert read_status(run).state == "killed"


def test_a_checkpoint_appears_only_while_the_run_is_held(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", config="a: 1\n", provenance={}, resume=False)

    def replaced(folder: Path) -> None:
        (tmp_path / "run").rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", tmp_path / "run")

    def taken_away(folder: Path) -> None:
        (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(RunDirectoryError, match="was moved, deleted or replaced"):
        checkpoint.save(run.checkpoints, 1, {"a": {"b": 1}}, replaced, run.recheck)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "moved").rename(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="was moved, deleted or replaced"):
        checkpoint.save(run.checkpoints, 1, {"a": {"b": 1}}, taken_away, run.recheck)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunDirectoryError, match="was moved, deleted or replaced"):
        checkpoint.save(run.checkpoints, 1, {"a": {"b": 1}}, None, run.recheck)
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "moved" / "checkpoints").glob("0*"))
    with pytest.raises(RunDirectoryError, match="was moved, deleted or replaced"):
        run.prune(1, tmp_path)
    run.close()
    with pytest.raises(RunDirectoryError, match="no longer locked"):
        run.report("training", 1)


def _train_slowly(run: str, resume: bool, pipe: Connection) -> None:
    """Train, and wait after every step until the other end says go."""
    import random

    import numpy as np
    import torch

    from kapelle.training.observer import Silent

    random.seed(int(resume))  # as tests.support.killed_runs.start seeds its processes
    np.random.seed(int(resume))
    torch.manual_seed(int(resume))

    class Waiting(Silent):
        def step(self, step: Any, steps: int) -> None:
            pipe.send(step.number)
            pipe.recv()

    try:
        with trainer("grpo", Path(run), resume=resume, observer=Waiting()) as made:
            made.train()
        pipe.send("done")
    except (RunDirectoryError, CheckpointError) as error:
        pipe.send(str(error))


@pytest.fixture
def begin() -> Iterator[Callable[..., tuple[Any, Connection]]]:
    started = []

    def begin(run: Path, *, resume: bool = False) -> tuple[Any, Connection]:
        ours, theirs = multiprocessing.Pipe()
        process = spawn(_train_slowly, str(run), resume, theirs)
        theirs.close()
        started.append(process)
        return process, ours

    yield begin
    for process in started:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a run that no one disturbs."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert start("grpo", run) == 0
    return _weights(run)


@pytest.mark.slow
class TestTrainers:
    def test_a_paused_trainer_leaves_a_replaced_run_to_the_other(
        self, tmp_path: Path, left_alone: bytes, begin: Callable[..., tuple[Any, Connection]]
    ) -> None:
        run = tmp_path / "run"
        process, first = begin(run)
        assert first.recv() == 1
        first.send("go")
        assert first.recv() == 2
        os.kill(process.pid, signal.SIGSTOP)
        run.rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", run)
        _, second = begin(run, resume=True)
        os.kill(process.pid, signal.SIGCONT)
        first.send("go")
        assert "was moved, deleted or replaced" in first.recv()
        for step in range(1, STEPS + 1):
            assert second.recv() == step
            second.send("go")
        assert second.recv() == "done"
        assert _weights(run) == left_alone
        assert [row["step"] for row in read_metrics(run)] == list(range(1, STEPS + 1))


def _weights(run: Path) -> bytes:
    return (run / "checkpoints" / f"{STEPS:08d}" / "train.safetensors").read_bytes()
