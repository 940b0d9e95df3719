"""Tests that decide nothing pay everyone, so that they grade nobody; all others grade."""

from __future__ import annotations

import pytest

from kapelle.grading.code.grade import ProgramTests, grade_program
from kapelle.sandbox.bubblewrap import Bubblewrap

NOTHING = {
    "a function that nobody calls": "def test_f():\n    assert f(1) == 2",
    "a class that nobody runs": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)",
    "methods as pytest finds them": "class TestF:\n    def test_one(self):\n        assert f(1) == 2",
    "a coroutine that nobody awaits": "async def test():\n    assert f(1) == 2\ntest()",
    "a generator that nobody runs": "def test():\n    yield f(1)\n    assert f(1) == 2\ntest()",
    "a main guard": "if __name__ == '__main__':\n    assert f(1) == 2",
    "main guards behind a function": "def main():\n    assert f(1) == 2\nif '__main__' == __name__:\n    main()",
    "a failure that is printed": "try:\n    assert f(1) == 2\nexcept AssertionError as error:\n    print('failed', error)",
    "failures that are swallowed": "import contextlib\nwith contextlib.suppress(Exception):\n    assert f(1) == 2",
    "a bare except": "try:\n    assert f(1) == 2\n    print('ok')\nexcept:\n    print('no')",
    "failures in a list": "bad = []\nfor x in (1, 2):\n    try:\n        assert f(x) == 2 * x\n    except Exception as e:\n        bad.append(e)",
    "a runner whose result is thrown away": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))"
    ),
    "a main program that may go on": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\nunittest.main(exit=False)"
    ),
    "a tuple that is always true": "assert (f(1) == 2, 'f(1) is 2')",
    "a comparison and no assert": "f(1) == 2",
    "a print": "print(f(1), f(1) == 2, f'{f(1)}')",
    "a lambda": "check = lambda: f(1) == 2\nassert check",
    "a decorator that never calls": "def test(g): return g\n@test\ndef one():\n    assert f(1) == 2",
    "a thread that fails alone": (
        "import threading\ndef one():\n    assert f(1) == 2\nt = threading.Thread(target=one)\nt.start()\nt.join()"
    ),
    "no cases": "for x, want in []:\n    assert f(x) == want",
    "a condition that skips all": "import sys\nif sys.platform == 'none':\n    assert f(1) == 2",
    "a function that says no and is not heard": "def check(g):\n    return g(1) == 2\ncheck(f)",
    "a comparison in an expression": "result = [f(x) == 2 * x for x in (1, 2)]\nprint('passed', result)",
}  # fmt: skip
SOMETHING = {
    "a function that is called": "def test_f():\n    assert f(1) == 2\ntest_f()",
    "functions found by name": "def test_f():\n    assert f(1) == 2\nfor n, g in list(globals().items()):\n    if n[:5] == 'test_': g()",
    "a runner that is asked": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"
        "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()"
    ),
    "a main program": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\nunittest.main()",
    "a coroutine": "import asyncio\nasync def test():\n    assert f(1) == 2\nasyncio.run(test())",
    "a list that must be empty": (
        "bad = []\nfor x in (1, 2):\n    try:\n        assert f(x) == 2 * x\n    except Exception as e:\n        bad.append(e)\nassert not bad"
    ),
    "an exit code": "import sys\nif f(1) != 2:\n    sys.exit(1)",
    "an exception": "if f(1) != 2:\n    raise ValueError('no')",
    "an exception that is expected": "try:\n    f('a', 1)\nexcept TypeError:\n    pass\nelse:\n    assert False",
    "what is left": "xs = [f(1)]\nassert xs == [2]",
    "a text": "assert str(f(1)) == '2'",
    "a loop over what comes": "for x in [f(1)]:\n    assert x == 2",
    "a type": "assert isinstance(f(1), int) and f(1) == 2",
    "a membership": "assert f(1) in {2, 3}",
    "an argument": "xs = [1]\nf(1)\nassert xs == [1] and f(1) == 2",
    "something else than a number": "assert f(1) != 5",
}  # fmt: skip
RIGHT, WRONG = "def f(x): return 2 * x", "def f(*x): return None"


@pytest.mark.slow
@pytest.mark.parametrize("what", NOTHING)
def test_a_test_that_decides_nothing_grades_nobody(sandbox: Bubblewrap, what: str) -> None:
    for solution in (RIGHT, WRONG):
        grade = grade_program(solution, ProgramTests((NOTHING[what],)), sandbox)
        assert grade.status == "ungraded", grade
        assert not grade.passed
        assert (
            "whatever the program does" in grade.explanation
            or "asks the program nothing" in grade.explanation
        )


@pytest.mark.slow
@pytest.mark.parametrize("what", SOMETHING)
def test_a_test_that_decides_something_grades(sandbox: Bubblewrap, what: str) -> None:
    right = grade_program(RIGHT, ProgramTests((SOMETHING[what],)), sandbox)
    assert right.solved, right
    if what != "something else than a number":
        wrong = grade_program(WRONG, ProgramTests((SOMETHING[what],)), sandbox)
        assert wrong.status == "graded"
        assert not wrong.passed


def test_one_empty_test_among_others_leaves_the_whole_ungraded(sandbox: Bubblewrap) -> None:
    tests = ProgramTests(("assert f(1) == 2", "def test_f():\n    assert f(1) == 2"))
    grade = grade_program(RIGHT, tests, sandbox)
    assert (grade.status, grade.score, grade.solved) == ("ungraded", 0.0, False)
    assert "test 1 " in grade.explanation
