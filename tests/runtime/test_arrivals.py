"""Signals are counted as unheard only while nobody has handled them, and only where they were sent to."""

import subprocess
import sys

BEGIN = """
import _thread, os, signal, sys
from kapelle.runtime.interrupts import Arrivals, catch_interrupts, unbroken

sys.setswitchinterval(600)  # a thread is not left between two of its lines

def aside(work):
    ended = _thread.allocate_lock()
    ended.acquire()
    _thread.start_new_thread(lambda: (work(), ended.release()), ())
    ended.acquire()  # the thread begins here, and no handler runs before its end

def send():
    signal.pthread_kill(_thread.get_ident(), signal.SIGTERM)
"""


def said(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_signal_that_nobody_handles_is_found() -> None:
    script = """
def work():
    send()
    print(Arrivals.look(100.0))

with catch_interrupts():
    aside(work)
"""
    assert said(script) == "15"


def test_two_signals_that_are_handled_at_once_are_both_heard() -> None:
    script = """
def work():
    send()
    send()

with catch_interrupts() as asked:
    aside(work)
    print(asked.exit_code, Arrivals.look(100.0), Arrivals.look(100.0))
"""
    assert said(script) == "143 None None"


def test_a_save_is_not_counted_though_nothing_of_python_runs_in_it() -> None:
    script = """
def work():
    send()
    print(Arrivals.look(100.0), end=" ")

with catch_interrupts() as asked:
    with unbroken():
        aside(work)
    print(asked.exit_code)
"""
    assert said(script) == "None 143"


def test_a_forked_child_has_signals_of_its_own() -> None:
    script = """
with catch_interrupts() as asked:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), Arrivals.look(100.0), asked.exit_code)
    os.kill(os.getpid(), signal.SIGTERM)
    print(asked.exit_code)
"""
    assert said(script) == "-15 None 0\n143"
