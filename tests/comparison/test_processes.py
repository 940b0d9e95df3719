"""Work in several processes: failures and deaths are reported, and everything else is done."""

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


def test_a_failure_or_death_does_not_affect_others(tmp_path: Path) -> None:
    kinds = ["write", "die", "fail", "write"]
    before = os.environ.get("OMP_NUM_THREADS")
    found = dict(in_processes(work, [(kind, str(tmp_path / str(k))) for k, kind in enumerate(kinds)], 1))
    died = found[1]
    assert died is not None
    assert "SIGKILL" in died.reason
    assert {k: failure and failure.reason for k, failure in found.items()} == {
        0: None,
        1: died.reason,
        2: "ConfigError: no good",
        3: None,
    }
    assert "Traceback" in found[2].details if found[2] else False
    written = [(tmp_path / str(k)).read_text().split() for k in (0, 3)]
    assert [threads for _, threads in written] == ["1", "1"]
    assert written[0][0] != written[1][0], "a dead process is replaced"
    assert str(os.getpid()) not in {pid for pid, _ in written}
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_processes_are_used_again(tmp_path: Path) -> None:
    list(in_processes(work, [("write", str(tmp_path / str(k))) for k in range(3)], 1))
    assert len({(tmp_path / str(k)).read_text() for k in range(3)}) == 1


linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel says there who is stopped")


@linux
def test_a_stopped_process_is_killed_after_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAPELLE_STALLED_AFTER", "1")
    found = dict(in_processes(work, [("stop", str(tmp_path / "0")), ("write", str(tmp_path / "1"))], 1))
    assert found[0] is not None
    assert "stalled: it has been stopped (by SIGSTOP or Ctrl-Z) " in found[0].reason
    assert found[1] is None


STARTS = """
from tests.comparison.test_processes import work
from kapelle.comparison.processes import in_processes
if __name__ == "__main__":
    list(in_processes(work, [("wait", {place!r})], 1))
"""


@linux
@pytest.mark.sample(2)
@pytest.mark.parametrize("stopped", [True, False])
def test_processes_end_with_their_parent(tmp_path: Path, stopped: bool) -> None:
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
