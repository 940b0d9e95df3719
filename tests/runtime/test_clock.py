"""A process that was stopped fails nothing that is right: not a program, a tool, a judge or a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.stopped_graders import LIMIT_S, WORK, WORKS_S

from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.runtime.clock import SuspendAwareClock, suspend_aware_timeout


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("children_too", [False, True], ids=["the parent", "all"])
def test_a_pause_beyond_every_limit_fails_nothing_that_is_right(
    sandbox: Bubblewrap, children_too: bool
) -> None:
    graders = subprocess.Popen(
        [sys.executable, "-m", "tests.support.stopped_graders"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert graders.stdout is not None
    try:
        assert graders.stdout.readline() == b"working\n"
        time.sleep(WORKS_S / 2)  # the work is under way now, or about to be
        stopped = [graders.pid, *(_below(graders.pid) if children_too else ())]
        for pid in stopped:
            _send(pid, signal.SIGSTOP)
        time.sleep(LIMIT_S + 2.5)
        for pid in reversed(stopped):
            _send(pid, signal.SIGCONT)
        came = json.loads(graders.stdout.readline())
    finally:
        graders.kill()
        graders.communicate()
    assert came.keys() == WORK.keys()
    right = {what: result for what, result in came.items() if " " not in what or what == "unsafe output"}
    assert set(right.values()) <= {"passed", "2"}, right
    assert came["slow calls"] == came["slow output"] == "error"
    assert "longer than 3 s" in came["slow process"]
    assert "longer than 3 s" in came["slow tool"]
    assert "ended the interpreter" in came["ended tool"]
    assert "not complete after 3 seconds" in came["slow judge"]


def _below(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it may end while its children are asked for
            for child in (thread / "children").read_text().split():
                yield int(child)
                yield from _below(int(child))


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def test_the_clock_counts_what_is_waited_and_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 100.1, 100.2, 4100.2, 4100.3])
    # The module's own name for it: the watchdog of this process asks the true clock meanwhile.
    monkeypatch.setattr("kapelle.runtime.clock.time", SimpleNamespace(monotonic=lambda: next(moments)))
    clock = SuspendAwareClock(0.05)
    assert [round(clock.now(), 9) for _ in range(4)] == [0.1, 0.2, 0.25, 0.35]


async def test_a_wait_in_the_event_loop_ends_and_one_in_time_does_not() -> None:
    with pytest.raises(TimeoutError):
        async with suspend_aware_timeout(0.05):
            await asyncio.sleep(60)
    async with suspend_aware_timeout(60):
        await asyncio.sleep(0.001)
