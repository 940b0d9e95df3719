"""A stop request inside a running event loop reaches the work, and the process continues."""

import subprocess
import sys

BEGIN = """
import asyncio, contextlib, os, signal, time
from kapelle.runtime import interrupts
from kapelle.runtime.deadlines import call
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.interrupts import StopRequested, catch_interrupts

def ask():
    os.kill(os.getpid(), signal.SIGINT)
"""

CELL = """
async def cell():
    with catch_interrupts() as asked:
        try:
            run_async(work)
        except StopRequested:
            print("stopped", asked.exit_code)

asyncio.run(cell())
print("lives")
"""


def said(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_waiting_work_is_cancelled() -> None:
    script = """
async def work():
    ask()
    await asyncio.sleep(3600)
"""
    assert said(script + CELL) == "stopped 130\nlives\n"


def test_a_second_ctrl_c_leaves_a_call_that_blocks() -> None:
    script = """
def compute():
    ask()
    while not interrupts.requested_by():  # two that arrive at once are one
        time.sleep(0.01)
    ask()
    while True:
        time.sleep(0.01)

async def work():
    call("a call", "environment", 3600.0, compute)

async def cell():
    with catch_interrupts():
        try:
            run_async(work)
        except KeyboardInterrupt:
            print("stopped")

asyncio.run(cell())
print("lives")
"""
    assert said(script) == "stopped\nlives\n"


def test_a_process_without_a_command_is_never_ended() -> None:
    script = """
interrupts.LAST_RESORT = 0.0
with catch_interrupts():
    ask()
    with contextlib.suppress(KeyboardInterrupt):
        ask()
    time.sleep(1)
print("lives")
"""
    assert said(script) == "lives\n"
