"""A thread without memory to start ends the command, which would otherwise wait for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

_COMMAND = """
import sys, threading
from kapelle.cli.stopping import termination
from kapelle.runtime import deadlines
from kapelle.runtime import machine
def without_memory():
    raise MemoryError
lost = threading.Thread(target=print)
with termination():
    {prepare}
    lost._bootstrap = {begins}
    lost.start()
print("went on")
"""


def ended(prepare: str, begins: str) -> tuple[int, str, str]:
    text = _COMMAND.format(prepare=prepare, begins=begins)
    found = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    return found.returncode, found.stdout, found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "begins"),
    [
        # The thread cannot report that it has no memory.
        pytest.param(
            'machine.THREAD_START_S = 0.5; deadlines.call("a call", "environment", 1.0, int)',
            "lambda: None",
            id="it says nothing",
        ),
    ],
)
def test_a_command_ends_when_a_thread_does_not_start(prepare: str, begins: str) -> None:
    code, answer, reason = ended(prepare, begins)
    assert (code, answer) == (2, "")
    assert reason.count("\n") == 1
    assert "no memory left to start a thread" in reason
    assert "--resume" in reason
