from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.environments.sandbox.test_hostile import (  # noqa: F401 (`host` is a fixture)
    PROGRAMS,
    SAMPLE,
    Host,
    assert_as_before,
    everything_of_this_process,
    host,
    survivors,
)

from kapelle.environments.sandbox.bubblewrap import Bubblewrap, NamespaceGroup
from kapelle.environments.sandbox.session import Session
from kapelle.environments.tools.contract import ToolFault
from kapelle.environments.tools.python import Interpreter, Python
from kapelle.environments.tools.python_driver import MAX_PRINTED
from kapelle.errors import SandboxError


@pytest.fixture
def python(sandbox: Bubblewrap) -> Iterator[Interpreter]:
    interpreter = Python(call_s=30.0).open()
    yield interpreter
    interpreter.close()


def run(python: Interpreter, program: str) -> str:
    return python.run({"program": program})


def test_variables_stay_and_the_last_value_is_shown(python: Interpreter) -> None:
    assert run(python, "x = 20\ndef double(y):\n    return 2 * y") == "(nothing was printed)"
    assert run(python, "print('now')\ndouble(x) + 2") == "now\n42"
    assert run(python, "import math\nmath.isqrt(x)") == "4"
    assert run(python, "é = 'é'; é * 2") == "'éé'"
    assert run(python, "[\n  x,\n  x + 1\n]  # both\n\n") == "[20, 21]"
    assert run(python, "if x:\n    print('yes')\n\nfor k in range(2):\n    k") == "yes"
    assert "line 3" in run(python, "\n\n1 / 0")


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: the interpreter goes on."),
        ("import sys; sys.stderr.write('seen')", "seen"),
        ("(" * 10_000, "Error"),
    ],
)
def test_errors_are_results(python: Interpreter, program: str, output: str) -> None:
    run(python, "kept = 1")
    assert output in run(python, program)
    assert run(python, "kept") == "1"


def test_output_has_a_limit(python: Interpreter) -> None:
    assert len(run(python, "print('x' * 10**6)")) == 20_000


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os._exit(0)", "ended"),
        ("while True: pass", "0.5 s"),
        ("x = bytearray(10**10)", None),
        ("import os; os.write(3, b'{not json\\n'); os.write(4, b'{not json\\n')", None),
    ],
)
def test_a_new_interpreter_follows_one_that_was_ended(
    sandbox: Bubblewrap, program: str, said: str | None
) -> None:
    python = Python(call_s=0.5 if "while" in program else 30.0).open()
    started = time.monotonic()
    try:
        answer = run(python, program)
    except ToolFault as fault:
        answer = str(fault)
    if said is not None:
        assert said in answer
    python._call_s = 30.0
    for _ in range(3):
        try:
            assert run(python, "6 * 7") == "42"
            break
        except ToolFault:
            continue
    else:
        pytest.fail("the interpreter never came back")
    assert time.monotonic() - started < 60.0
    python.close()


def test_it_is_a_sandbox(python: Interpreter) -> None:
    assert "OSError" in run(python, "import socket; socket.create_connection(('192.0.2.1', 80), 1)")
    assert "PermissionError" in run(python, "open('/usr/planted', 'w')") or "OSError" in run(
        python, "open('/usr/planted', 'w')"
    )
    assert "KAPELLE" not in run(python, "import os; dict(os.environ)")


def test_a_forged_reply_has_the_same_limit(python: Interpreter) -> None:
    run(python, "import json; json.dumps = lambda printed: '\"' + 'x' * 500_000 + '\"'")
    assert run(python, "1") == "x" * MAX_PRINTED


AHEAD = """
import json, os, sys
def write(line):
    for fd in range(3, 16):
        try:
            os.write(fd, line)
        except OSError:
            pass
"""
WITH_NO_NUMBER = "write(b'\"forged\"\\n' * 3)"
WITH_A_GUESS = "write(b''.join(b'%032x \"forged\"\\n' % guess for guess in range(20)))"
WITH_AN_EMPTY_NUMBER = "write(b' \"forged\"\\n')"
WITH_ITS_OWN_NUMBER = """
frame = sys._getframe()
while "number" not in frame.f_locals:
    frame = frame.f_back
write((frame.f_locals["number"] + b' "forged"\\n') * 3)
"""
LATER = """
import threading, time
def later():
    time.sleep(0.1)
    write(b'"forged"\\n')
threading.Thread(target=later).start()
"""
OF_THE_CHILD = """
if os.fork() == 0:
    write(b'"forged"\\n')
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(
    "forgery",
    [WITH_NO_NUMBER, WITH_A_GUESS, WITH_AN_EMPTY_NUMBER, WITH_ITS_OWN_NUMBER, LATER, OF_THE_CHILD],
    ids=["no number", "guesses", "an empty number", "its own number", "later", "by a child"],
)
def test_no_program_forges_a_later_reply(python: Interpreter, forgery: str) -> None:
    with contextlib.suppress(ToolFault):  # it may forge its own reply
        run(python, AHEAD + forgery)
    if forgery == LATER:
        time.sleep(0.5)
    replies = []
    for _ in range(3):
        try:
            replies.append(run(python, "6 * 7"))
        except ToolFault:
            continue
    assert set(replies) == {"42"}
    assert len(replies) >= 2, "at most one interpreter is lost"


def test_the_reply_is_the_output_of_its_own_program(python: Interpreter) -> None:
    assert run(python, "import os, subprocess, sys") == "(nothing was printed)"
    assert run(python, "os.write(1, b'loud\\n'); os.system('echo loud'); print('mine')").endswith("mine")
    output = run(python, "subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True).stdout")
    assert output == r"b'7\n'"
    assert run(python, "print('a\\nb c')\n'0123 \"d\"'") == "a\nb c\n'0123 \"d\"'"


@pytest.mark.sample(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.sandbox_full])
        for name in PROGRAMS
        # The interpreter has descriptors for requests and replies; a forged reply reaches only its own agent.
        if name != "inherited descriptors"
    ],
)
def test_a_hostile_program_is_contained(
    sandbox: Bubblewrap,
    host: Host,  # noqa: F811 (the fixture)
    name: str,
) -> None:
    marker = f"hostile-{secrets.token_hex(8)}"
    text = PROGRAMS[name].source.decode()
    for key, value in (("secret", host.secret), ("port", host.port), ("socket", host.socket)):
        text = text.replace(f"{{{key}}}", str(value))
    before = everything_of_this_process()
    limits = PROGRAMS[name].limits
    interpreter = Python(call_s=2.0, cpu_s=1.0, memory_mb=limits.memory_bytes >> 20).open()
    started = time.monotonic()
    try:
        output = run(interpreter, f"import sys; sys.argv = ['program.py', {marker!r}]\n{text}")
    except ToolFault as fault:
        output = str(fault)
    interpreter.close()
    assert time.monotonic() - started < 20.0
    assert "ESCAPED" not in output
    assert survivors(marker) == []
    assert_as_before(before)


IDLE = """
import os, threading, time
def later():
    time.sleep(0.3)
    for _ in range(10):
        if os.fork() == 0:
            held = bytearray(40_000_000)
            time.sleep(600)
threading.Thread(target=later).start()
"""
BUSY = """
import threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "limit"), [(IDLE, "memory"), pytest.param(BUSY, "cpu", marks=pytest.mark.long)]
)
def test_limits_hold_between_calls(sandbox: Bubblewrap, program: str, limit: str) -> None:
    python = Python(memory_mb=128, cpu_s=1.0).open()
    run(python, program)
    session = python._session
    assert isinstance(session, Session)
    assert isinstance(session._group, NamespaceGroup)
    init = session._group._init_pid
    until = time.monotonic() + 60.0
    while Path(f"/proc/{init}/status").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{init}/status").exists(), "the limit holds without a call"
    with pytest.raises(ToolFault, match=f"limit of {limit}"):
        run(python, "1")
    assert run(python, "1") == "1"
    python.close()


def test_two_interpreters_share_nothing(sandbox: Bubblewrap) -> None:
    one, other = Python().open(), Python().open()
    run(one, "secret = 1; open('/tmp/note', 'w').write('x')")
    assert "NameError" in run(other, "secret")
    assert "FileNotFoundError" in run(other, "open('/tmp/note')")
    one.close()
    other.close()


def test_an_unknown_sandbox_is_rejected() -> None:
    with pytest.raises(SandboxError, match="oven"):
        Python(sandbox="oven").check()
