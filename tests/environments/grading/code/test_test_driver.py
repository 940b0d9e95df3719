"""Test programs beside the candidate, where that is allowed: whatever Python runs, runs; what decides nothing grades no one."""

from __future__ import annotations

import pytest

from kapelle.environments.grading.code.grade import ProgramTests, grade_program
from kapelle.environments.sandbox.bubblewrap import Bubblewrap

CASE = "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.wanted = 2\n"
STYLES = {
    "a test case": CASE + "    def test(self): self.assertEqual(f(1), self.wanted)",
    "a main program": CASE + "    def test(self): self.assertEqual(f(1), self.wanted)\nunittest.main()",
    "what pytest finds": "import random\ndef test_f():\n    random.seed(1)\n    x = random.randint(1, 9)\n    assert f(x) == 2 * x",
    "an import of the solution": "from solution import f\nimport solution\nassert f(1) == f(1) == solution.f(1) == 2",
    "files": "import os, tempfile\nwith tempfile.TemporaryDirectory() as d:\n    p = os.path.join(d, 'x')\n    open(p, 'w').write('1')\n"
    "    assert f(int(open(p).read())) == 2",
    "environment variables": "import os\nfrom unittest.mock import patch\nwith patch.dict(os.environ, {'X': '1'}):\n"
    "    assert f(int(os.environ['X'])) == 2",
    "patched modules": "from unittest import mock\nwith mock.patch('math.sqrt', return_value=7):\n    import math\n"
    "    assert f(math.sqrt(4)) == 14",
    "an argument that is changed": "xs = [1]\nf(xs)\nassert xs == [1] and f(1) == 2",
    "a main guard": "if __name__ == '__main__':\n    import sys\n    assert f(1) == f(1) == 2",
    "an exit code": "import sys\nif f(1) != 2:\n    sys.exit(1)",
    "a coroutine": "import asyncio\nasync def test():\n    assert f(1) == 2\nasyncio.run(test())",
    "a list of eleven nodes": (
        "class Node:\n    def __init__(self, next): self.next = next\n    def __eq__(self, other): return self.next == other.next\n"
        "n = None\nfor _ in range(11): n = Node(n)\nassert f(n and 1) == 2 and n == n"
    ),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_tests_of_any_style_run_with_the_program(sandbox: Bubblewrap, style: str) -> None:
    tests = ProgramTests((STYLES[style],))
    right = grade_program("def f(x): return 2 * x", tests, sandbox, allow_untrusted=True)
    assert (right.solved, right.trusted) == (True, False), right
    wrong = grade_program("def f(x): return None", tests, sandbox, allow_untrusted=True)
    assert (wrong.status, wrong.passed) == ("graded", 0)


def test_each_test_is_reported_by_itself_and_the_first_that_ends_the_process_ends_the_others(
    sandbox: Bubblewrap,
) -> None:
    solution = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x"
    tests = ProgramTests(tuple(f"assert f({n}) is f({n}) == {n}" for n in (1, 3, 2, 4)))
    grade = grade_program(solution, tests, sandbox, allow_untrusted=True)
    assert [test.status for test in grade.tests] == ["passed", "passed", "error", "error"]
