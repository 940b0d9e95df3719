"""Work in processes of its own: what fails or dies is reported, and everything else is done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.runtime.test_guard import gone, until

from kapelle.comparison.processes import in_processes
from kapelle.errors import ConfigError
from kapelle.runtime.process_tree import is_stopped


def work(kind: str, place: str) -> None:
    if kind == "fail":
        raise ConfigError("no good")
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "wait":
        Path(place).write_text(str(os.getpid()))
        time.sleep(600)
    Path(place).write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")


def test_what_fails_or_dies_takes_nothing_with_it(tmp_path: Path) -> None:
    kinds = ["write", "die", "fail", "write"]
    before = os.environ.get("OMP_NUM_THREADS")
    found = dict(in_processes(work, [(kind, str(tmp_path / str(k))) for k, kind in enumerate(kinds)], 1))
    assert {k: failure and failure.reason for k, failure in found.items()} == {
        0: None,
        1: "its process was killed by signal 9 (SIGKILL). Perhaps memory ran out: see `dmesg`, and `kapelle plan` for what a run needs.",
        2: "ConfigError: no good",
        3: None,
    }
    assert "Traceback" in found[2].details if found[2] else False
    told = [(tmp_path / str(k)).read_text().split() for k in (0, 3)]
    assert [threads for _, threads in told] == ["1", "1"]
    assert told[0][0] != told[1][0], "who has died is replaced"
    assert str(os.getpid()) not in {pid for pid, _ in told}
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_processes_are_used_again(tmp_path: Path) -> None:
    list(in_processes(work, [("write", str(tmp_path / str(k))) for k in range(3)], 1))
    assert len({(tmp_path / str(k)).read_text() for k in range(3)}) == 1


def test_nothing_to_do_starts_nothing() -> None:
    assert list(in_processes(work, [], 4)) == []


linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel says there who is stopped")


@linux
def test_a_process_that_is_stopped_is_given_up_after_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAPELLE_STALLED_AFTER", "2")
    found = dict(in_processes(work, [("stop", str(tmp_path / "0")), ("write", str(tmp_path / "1"))], 1))
    assert found[0] is not None
    assert "stood still: it has been stopped (by SIGSTOP or Ctrl-Z) for 2 s" in found[0].reason
    assert found[1] is None


STARTS = """
from tests.comparison.test_processes import work
from kapelle.comparison.processes import in_processes
if __name__ == "__main__":
    list(in_processes(work, [("wait", {place!r})], 1))
"""


@linux
@pytest.mark.parametrize("stopped", [False, True])
def test_processes_end_with_the_one_that_started_them(tmp_path: Path, stopped: bool) -> None:
    place, program = tmp_path / "pid", tmp_path / "starts.py"
    program.write_text(STARTS.format(place=str(place)))
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(program)], env=environ) as parent:
        until(lambda: place.exists() and place.read_text() != "")
        child = int(place.read_text())
        if stopped:
            os.kill(child, signal.SIGSTOP)
            until(lambda: is_stopped(child))
        parent.kill()
    until(lambda: gone(child))
