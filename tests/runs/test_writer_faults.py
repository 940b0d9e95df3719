import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.run_folders import files, group, open_run

from kapelle.errors import RunDirectoryError
from kapelle.runs.reader import read_metrics, read_status
from kapelle.runs.writer import RunDirectory

Act = Callable[[RunDirectory], Any]
ACTS: dict[str, Act] = {
    "metrics": lambda run: run.record_metrics(2, {"loss": 0.25}),
    "evaluation": lambda run: run.record_evaluation(2, {"accuracy": 0.5}),
    "episodes": lambda run: run.record_episodes(2, [group("a", 2)]),
    "status": lambda run: run.report("update", 2),
    "latest": lambda run: run.point_latest(run.checkpoints / "00000002"),
    "positions": lambda run: run.positions(),
}
CALLS = {
    "metrics": ["open", "write"],
    "evaluation": ["open", "write"],
    "episodes": ["open", "write"],
    "status": ["open", "write", "replace"],
    "latest": ["open", "write", "fsync", "replace"],
    "positions": ["open", "fsync"],
}
NUMBERS = {errno.ENOSPC: "disk is full", errno.EROFS: "read-only", errno.EIO: "fault"}


@pytest.mark.parametrize(("act", "call"), [(act, call) for act, calls in CALLS.items() for call in calls])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_failure_is_explained_and_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, call: str, number: int
) -> None:
    def refuse(*_arguments: object, **_named: object) -> None:
        raise OSError(number, os.strerror(number))

    with open_run(tmp_path / "run") as run:
        run.record_metrics(1, {"loss": 0.5})
        run.record_evaluation(1, {"accuracy": 0.25})
        run.record_episodes(1, [group("a", 1)])
        before = files(run.path)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            with pytest.raises(RunDirectoryError, match=NUMBERS[number]):
                ACTS[act](run)
        after = files(run.path)
        assert {name: after.get(name) for name in before} == before
        # The same act succeeds as soon as the disk does.
        ACTS[act](run)


def test_half_a_row_on_a_full_disk_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_run(tmp_path / "run") as run:
        run.record_metrics(1, {"loss": 0.5})
        real = os.write
        calls = iter([lambda descriptor, data: real(descriptor, bytes(data[:9]))])

        def short(descriptor: int, data: bytes) -> int:
            for write in calls:
                return write(descriptor, data)
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", short)
            with pytest.raises(RunDirectoryError, match="disk is full"):
                run.record_metrics(2, {"loss": 0.25})
        run.record_metrics(2, {"loss": 0.25})
    assert read_metrics(run.path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_device_is_explained(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        (run.path / "metrics.jsonl").unlink()
        (run.path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(RunDirectoryError, match="the disk is full"):
            run.record_metrics(1, {"loss": 0.5})


KILLED = """
import sys
from pathlib import Path
from kapelle.runs.writer import RunDirectory
run = RunDirectory.create(Path(sys.argv[1]), config="a: 1\\n", provenance={}, resume=False)
for step in range(10**9):
    run.record_metrics(step, {f"loss/{n}": step / 7 for n in range(40)})
    print(step, flush=True)
"""


def test_every_row_that_was_recorded_survives_a_kill(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 200:
            process.kill()
            break
    seen = [200, *map(int, process.stdout.read().split())]
    process.stdout.close()
    process.wait()
    assert [row["step"] for row in read_metrics(tmp_path / "run")][: seen[-1] + 1] == list(
        range(seen[-1] + 1)
    )
    assert read_status(tmp_path / "run").state == "killed"
    with open_run(tmp_path / "run", resume=True, config="a: 1\n") as run:
        run.rewind({})
