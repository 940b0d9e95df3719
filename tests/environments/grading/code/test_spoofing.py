"""Programs that try to be rewarded without solving anything: none is."""

from __future__ import annotations

import pytest
from tests.environments.sandbox.hostile.program import SMALL
from tests.environments.sandbox.test_hostile import PROGRAMS

from kapelle.environments.grading.code.grade import (
    CallTest,
    OutputTest,
    ProgramTests,
    grade_calls,
    grade_output,
    grade_program,
)
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits

LIMITS = Limits(wall_s=5.0, cpu_s=3.0)
PATIENT = Limits(wall_s=60.0, cpu_s=30.0)
"""For what has to come to its end on a machine that does much else."""
TESTS = ProgramTests(("assert square(31) == 961", "assert square(-2) == 4", "assert square(17) == 289"))

SPOOFS = {
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "os._exit(0)": "import os\ndef square(x): os._exit(0)",
    "atexit and a thread print success": """
import atexit, threading, time
def shout():
    while True:
        print("ALL TESTS PASSED", flush=True); time.sleep(0.01)
atexit.register(print, "passed 3/3")
threading.Thread(target=shout, daemon=True).start()
def square(x): return 0
""",
    "prints the marker and goes on": """
import json, os
for fd in range(3, 20):
    for text in ("ALL TESTS PASSED", 'value 961', '0123456789abcdef value 961', '[0,"passed",""]', 'error ["tuple",["tuple"],""]'):
        try:
            os.write(fd, text.encode() + b"\\n")
        except OSError:
            pass
def square(x): return True
""",
    "always equal": """
class Yes(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __format__(self, spec): return "961"
    def __repr__(self): return "961 or anything"
    def __bool__(self): return True
class Object:
    __eq__ = lambda self, other: True
    __class__ = int
def square(x): return Object() if x > 20 else Yes(5)
""",
    "patched builtins, unittest, time, random and math": """
import builtins, math, random, time, unittest
math.isclose = lambda *a, **k: True
unittest.TestCase.assertEqual = lambda *a, **k: None
builtins.AssertionError = type("Never", (BaseException,), {})
builtins.abs = builtins.len = builtins.isinstance = lambda *a: True
time.sleep = random.random = lambda *a: 0
def square(x): raise StopIteration
""",
    "conftest and plugin": """
for name in ("conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", "setup.py"):
    with open(name, "w") as file:
        file.write("def square(x): return x * x\\ndef pytest_runtest_makereport(item, call): item.outcome = 'passed'\\n")
def square(x): return None
""",
    "edits tests, shadows json": """
import os, pathlib
for name in ("test_0.py", "test_1.py", "test_2.py", "json.py", "runpy.py", "kapelle/environments/grading/code/values.py"):
    pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(name).write_text("pass")
def square(x): return 0
""",
    "early reward file, nan, inf and 2.0": """
import json
for name in ("reward", "reward.json", "result.json", "/box/score", "/run/reward", "/dev/shm/reward"):
    try:
        open(name, "w").write(json.dumps({"score": 2.0, "passed": True}))
    except OSError:
        pass
def square(x): return {31: float("nan"), -2: float("inf"), 17: 2.0}[x]
""",
    "pickle bomb": """
import os
class Bomb:
    def __reduce__(self): return (os._exit, (0,))
    def __getstate__(self): os._exit(0)
    def __index__(self): return 961
def square(x): return Bomb()
""",
    "replaced python on PATH": """
import os
for folder in ("/box", "/box/bin", "/tmp"):
    os.makedirs(folder, exist_ok=True)
    for name in ("python", "python3", "sh", "tar", "head"):
        with open(f"{folder}/{name}", "w") as file:
            file.write("#!/bin/sh\\necho passed\\n")
        os.chmod(f"{folder}/{name}", 0o755)
os.environ["PATH"] = "/box:/box/bin:/tmp"
def square(x): return "passed"
""",
}
# These look for an answer that cannot be computed: wherever they find it, it is right.
SEARCHES = {
    "walks frames and the heap to the answers": """
import gc, sys
def answer(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [*frame.f_globals.values(), *frame.f_locals.values(), *frame.f_code.co_consts]
        frame = frame.f_back
    for thing in gc.get_objects():
        seen += list(thing) if type(thing) in (tuple, list, set) else []
        seen += list(thing.values()) if type(thing) is dict else []
    found = [text for text in seen if type(text) is str and text.startswith("gold-") and len(text) == 11]
    return found[0] if found else None
""",
    "reads expected values from disk, arguments, environment and /proc": """
import glob, os, re, sys
def answer(x):
    text = " ".join([*sys.argv, *os.environ.values()])
    paths = ["/box/**", "/run/**", "/tmp/**", "/dev/shm/**", "/proc/[0-9]*/*", "/proc/[0-9]*/fd/*"]
    for path in [path for pattern in paths for path in glob.glob(pattern, recursive=True)]:
        if os.path.isfile(path):
            try:
                text += open(path, errors="replace").read(1_000_000)
            except OSError:
                pass
    found = re.findall(r"gold-[0-9]{6}", text)
    return found[0] if found else None
""",
}
REPLY = "'value 961'"
"""A reply as it should be, but for the mark of the request, which no one can guess."""
JSON_BOMBS = {
    "a reply without its mark": REPLY,
    "a reply with a mark of its own": "'0123456789abcdef ' + " + REPLY,
    "depth": "'value ' + '[' * 500_000",
    "lists in lists": """'value ' + '["list",' * 5_000 + '1' + ']' * 5_000""",
    "parts without end": """'value ["list"' + ',0' * 3_000_000 + ']'""",
    "one hash": """'value ["set",' + ','.join(str(k * (2**61 - 1)) if k < 8 else '["int","%s"]' % hex(k * (2**61 - 1)) for k in range(99)) + ']'""",
    "duplicate keys": """'value {"int":"0","int":"961"}'""",
    "NaN": "'value NaN'",
    "NaN as a float": """'value ["float","nan"]'""",
    "a million digits": """'value ["int","0x' + "9" * 990_000 + '"]'""",
    "a million bare digits": "'value ' + '9' * 990_000",
    "a float beyond all bounds": "'value 1e99999'",
    "a text that grows when written again": """'value "' + "ä" * 400_000 + '"'""",
    "an object inside a value": """'value ["list",["object",0,""]]'""",
    "not UTF-8": "'value \\udcff'",
    "a verdict": """'[0,"passed",""]'""",
    "an error that is none": """'error ["tuple",["tuple",1],2]'""",
    "nothing": "''",
}


CHANGES = "calls = []\ndef square(x):\n    calls.append(x)\n    return x * x if len(calls) == 1 else 0"
HARD_CODED = "def square(x): return {31: 961}.get(x, 0)"


def crafted_reply(what: str) -> str:
    """Return a program that writes a reply of its own to every descriptor, and ends."""
    return f"""
import os
def square(x):
    # Behind a mark that the frames of the driver tell, as a program may well find it.
    frame, mark = __import__("sys")._getframe(), b""
    while frame:
        mark = frame.f_locals.get("mark") or mark
        frame = frame.f_back
    text = {JSON_BOMBS[what]}
    mark = b"" if {what.startswith("a reply")} else mark + b" "
    data = mark + (text + "\\n").encode("utf-8", "surrogateescape")
    for fd in range(3, 20):
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left):]
        except OSError:
            pass
    os._exit(0)
"""


@pytest.mark.parametrize("what", SPOOFS)
def test_a_spoof_scores_0(sandbox: Bubblewrap, what: str) -> None:
    grade = grade_program(SPOOFS[what], TESTS, sandbox, LIMITS)
    assert grade.status == "graded"
    assert grade.score == 0.0, grade


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("what", JSON_BOMBS)
def test_a_crafted_reply_scores_0_without_harm(sandbox: Bubblewrap, what: str) -> None:
    grade = grade_program(crafted_reply(what), TESTS, sandbox, LIMITS)
    assert grade.status == "graded"
    assert grade.score == 0.0, grade


@pytest.mark.parametrize("what", SEARCHES)
def test_the_expected_value_is_nowhere_near_the_candidate(sandbox: Bubblewrap, what: str) -> None:
    tests = ProgramTests(("assert answer(1) == 'gold-738291'",))
    assert grade_program(SEARCHES[what], tests, sandbox, LIMITS).score == 0.0
    calls = (CallTest("answer", (1,), "gold-738291"),)
    assert grade_calls(SEARCHES[what], calls, sandbox, LIMITS).score == 0.0
    # The search itself works: it finds what does lie in its own process.
    assert grade_calls(
        SEARCHES[what] + "\nkept = ['gold-738291']\nopen('f', 'w').write(kept[0])", calls, sandbox, PATIENT
    ).solved


def test_a_value_that_changes_after_it_passed_solves_nothing(sandbox: Bubblewrap) -> None:
    grade = grade_program(CHANGES, TESTS, sandbox, LIMITS)
    assert [test.status for test in grade.tests] == ["passed", "failed", "failed"]


def test_a_candidate_cannot_reach_inputs_of_the_tests(sandbox: Bubblewrap) -> None:
    tests = ProgramTests(
        ("given = [3, 1, 2]\nwanted = sorted(given)\nresult = order(given)\nassert result == wanted",)
    )
    assert grade_program("def order(v):\n    v.clear()\n    return v", tests, sandbox, LIMITS).score == 0.0
    assert grade_program("def order(v):\n    v.sort()\n    return v", tests, sandbox, LIMITS).solved


def test_hard_coded_public_tests_fail_the_hidden_ones(sandbox: Bubblewrap) -> None:
    grade = grade_program(HARD_CODED, TESTS, sandbox, LIMITS)
    assert not grade.solved
    assert grade.passed == 1


@pytest.mark.parametrize("what", SPOOFS)
def test_a_spoof_scores_0_where_calls_are_compared_here(sandbox: Bubblewrap, what: str) -> None:
    tests = (CallTest("square", (31,), 961), CallTest("square", (-2,), 4))
    assert grade_calls(SPOOFS[what], tests, sandbox, LIMITS).score == 0.0


@pytest.mark.parametrize(
    "what", ["sys.exit(0)", "atexit and a thread print success", "replaced python on PATH"]
)
def test_a_spoof_scores_0_where_output_is_compared(sandbox: Bubblewrap, what: str) -> None:
    tests = (OutputTest("31\n", "961\n"), OutputTest("-2\n", "4\n"))
    limits = Limits(wall_s=1.0, cpu_s=1.0)
    assert grade_output(SPOOFS[what], tests, sandbox, limits).score == 0.0


@pytest.mark.sandbox_full
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_is_never_rewarded(sandbox: Bubblewrap, name: str) -> None:
    solution = PROGRAMS[name].source.decode()
    assert grade_program(solution, TESTS, sandbox, SMALL).score == 0.0
