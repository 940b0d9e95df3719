"""A child ends with its parent, and a parent distinguishes a stopped child from a slow one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.runtime.test_guard import gone, until

from kapelle.errors import ConfigError
from kapelle.runtime.process_tree import (
    WAITING,
    LifeSigns,
    _state,
    stalled_after,
)

PARENT = """
import os, subprocess, sys, time
sys.path[:] = {path!r}
child = "import sys, time; sys.path[:] = {{!r}}; from kapelle.runtime.process_tree import end_with_parent; end_with_parent({{}}); print('up', flush=True); time.sleep(600)"
held = subprocess.Popen([sys.executable, "-c", child.format(sys.path, os.getpid())], stdout=subprocess.PIPE, start_new_session=True)
held.stdout.readline()
print(held.pid, flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel says there who is stopped")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_ends_with_a_parent_that_is_killed(stopped: bool) -> None:
    words = [sys.executable, "-c", PARENT.format(path=sys.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if stopped:
            os.kill(child, signal.SIGSTOP)
            until(lambda: _state(child)[0] == "T")
        parent.kill()
    until(lambda: gone(child))


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"import time; print(1, flush=True); {request.param}"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


HOLDS_THE_LOCK = "sum(range(10**15))"
SLEEPS = "time.sleep(600)"


@pytest.mark.parametrize("running", [HOLDS_THE_LOCK], indirect=True)
def test_a_computing_process_is_slow_and_not_lost(running: subprocess.Popen[bytes]) -> None:
    signs = LifeSigns(running.pid)
    for _ in range(3):
        ticks = _state(running.pid)[1]
        until(lambda ticks=ticks: _state(running.pid)[1] > ticks)
        assert signs.look(1e6) is None


@pytest.mark.parametrize("running", [SLEEPS], indirect=True)
def test_a_stopped_process_has_less_time_than_a_waiting_one(running: subprocess.Popen[bytes]) -> None:
    limit = stalled_after()
    until(lambda: _state(running.pid)[0] == "S")
    signs = LifeSigns(running.pid)
    signs.look(0.0)
    assert signs.look(WAITING * limit - 1) is None
    assert "no sign of life for 600 s" in str(signs.look(2))
    beats = iter(range(100))
    alive = LifeSigns(running.pid, lambda: next(beats))
    assert [alive.look(WAITING * limit) for _ in range(5)] == [None] * 5
    os.kill(running.pid, signal.SIGSTOP)
    until(lambda: _state(running.pid)[0] == "T")
    assert alive.look(limit - 1) is None
    assert alive.look(2) == "it has been stopped (by SIGSTOP or Ctrl-Z) for 60 s"
    os.kill(running.pid, signal.SIGCONT)
    until(lambda: _state(running.pid)[0] != "T")
    assert alive.look(limit) is None


def test_the_limit_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAPELLE_STALLED_AFTER", "7.5")
    assert stalled_after() == 7.5
    for value in ("0", "soon", "nan"):
        monkeypatch.setenv("KAPELLE_STALLED_AFTER", value)
        with pytest.raises(ConfigError, match="seconds after which"):
            stalled_after()
