import os
import signal
import subprocess
import sys

import pytest

from kapelle.runtime.interrupts import catch_interrupts


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_sets_a_flag_with_its_exit_code(number: signal.Signals, code: int) -> None:
    new_messages: list[signal.Signals] = []
    with catch_interrupts(new_messages.append) as interrupts:
        assert interrupts.exit_code == 0
        os.kill(os.getpid(), number)
        assert interrupts.received == number
    assert interrupts.exit_code == code
    assert new_messages == [number]


def test_a_second_ctrl_c_raises_and_the_handlers_return() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with catch_interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


LOOP = """
import sys
from kapelle.runtime.interrupts import catch_interrupts
with catch_interrupts() as interrupts:
    print("step", flush=True)
    while interrupts.received is None:
        sys.stdin.read(1)
    print("saved", flush=True)
sys.exit(interrupts.exit_code)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143)])
def test_a_process_finishes_its_step_and_exits_with_the_code(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "step\n"
    process.send_signal(number)
    rest, _ = process.communicate("x", timeout=30)
    assert (rest, process.returncode) == ("saved\n", code)


COMMAND = """
import atexit, os, signal, sys, time
from kapelle.cli.stopping import leave, termination
from kapelle.runtime.interrupts import catch_interrupts, unbroken
def saving(_number):
    print("saving", flush=True)
with termination(), catch_interrupts(saving) as interrupts, unbroken():
    print("step", flush=True)
    while interrupts.received is None or {again}:
        time.sleep(0.01)
def last():
    print("exits", flush=True)
    time.sleep(600)
atexit.register(last)
leave(interrupts.exit_code)
"""


@pytest.mark.parametrize("again", [True, False], ids=["in its work", "at its exit"])
def test_a_second_ctrl_c_ends_a_command_at_once_with_its_code(again: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(again=again)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in ["step\n", "saving\n" if again else "saving\nexits\n"]:
        assert "".join(process.stdout.readline() for _ in line.splitlines()) == line
        process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == 130
    assert complaint == "kapelle: stopped.\n" or not again
