from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from tests.environments.grading.code.cheats import CHEATS

from kapelle.environments.code import CodeProblem, humaneval_problem, mbpp_problem
from kapelle.environments.grading.code.grade import ProgramTests, grade_program
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits
from kapelle.runtime.row_files import DataRow

# Sets and tuples, a class of the candidate's, a function that is called `sum`, types as arguments, trees in the
# setup, complex numbers, regular expressions, and every 120th problem.
SAMPLE = [2, 601, 126, 533, 367, 124, 16, 927, 560, *range(1, 974, 120)]
LIMITS = Limits(wall_s=30.0, cpu_s=20.0)

HUMANEVAL_LIKE = {
    "task_id": "Shift/0",
    "prompt": 'def encode(s):\n    """Shift each letter by five."""\n    return "".join(chr((ord(c) - 92) % 26 + 97) for c in s)\n\n\n'
    'def decode(s):\n    """Undo `encode`."""\n',
    "canonical_solution": '    return "".join(chr((ord(c) - 102) % 26 + 97) for c in s)\n',
    "test": "METADATA = {}\n\ndef check(candidate):\n    for word in ['hello', 'z', '']:\n"
    "        assert candidate(encode(word)) == word\n",
    "entry_point": "decode",
}


CHECK = """

METADATA = {
    'author': 'jt',
    'dataset': 'test'
}


def check(candidate):

    # Check some simple cases
    assert candidate("mjqqt") == "hello", "This prints if this assert fails 1 (good for debugging!)"
    assert True, "This prints if this assert fails 2"
    for word, wanted in [("", ""), ("f", "a")] + [("a" * k, "v" * k) for k in range(3)]:
        assert candidate(word) == wanted
"""


def mbpp(fields: dict[str, Any]) -> CodeProblem:
    return mbpp_problem(DataRow("here", fields))


def humaneval(fields: dict[str, Any]) -> CodeProblem:
    return humaneval_problem(DataRow("here", fields))


def solution_of(problem: CodeProblem) -> str:
    assert problem.solution is not None
    return problem.solution


@pytest.mark.slow
def test_a_sample_of_honest_solutions_of_mbpp_passes(
    sandbox: Bubblewrap, mbpp_rows: list[dict[str, Any]]
) -> None:
    rows = {row["task_id"]: row for row in mbpp_rows}
    for number in SAMPLE:
        problem = mbpp(rows[number])
        grade = problem.grade(solution_of(problem), sandbox, LIMITS)
        assert grade.solved, (number, grade)
        assert grade.trusted


@pytest.mark.sandbox_full
@pytest.mark.parametrize("at_once", [1, 8])
def test_all_honest_solutions_of_mbpp_pass(
    sandbox: Bubblewrap, mbpp_rows: list[dict[str, Any]], at_once: int
) -> None:
    assert len(mbpp_rows) == 974

    def fault(row: dict[str, Any]) -> str:
        problem = mbpp(row)
        grade = problem.grade(solution_of(problem), sandbox, LIMITS)
        # It compares with `sys.getsizeof`, which is not the same everywhere.
        trusted = row["task_id"] != 596
        return "" if grade.solved and grade.trusted is trusted else f"{row['task_id']}: {grade}"

    with ThreadPoolExecutor(at_once) as threads:
        assert [text for text in threads.map(fault, mbpp_rows) if text] == []


def test_tests_that_use_the_helpers_of_a_prompt_are_not_trusted(sandbox: Bubblewrap) -> None:
    problem = humaneval(HUMANEVAL_LIKE)
    assert "`encode`" in problem.untrusted
    grade = problem.grade(solution_of(problem), sandbox, LIMITS)
    assert (grade.solved, grade.trusted) == (True, False)


def test_a_check_function_with_literals_is_trusted(sandbox: Bubblewrap) -> None:
    problem = humaneval({**HUMANEVAL_LIKE, "test": CHECK})
    assert not problem.untrusted
    assert problem.grade(solution_of(problem), sandbox, LIMITS).solved
    for what, cheat in CHEATS.items():
        grade = problem.grade(cheat.replace("{name}", "decode"), sandbox, LIMITS)
        assert (grade.score, grade.trusted) == (0.0, True), what


def test_an_entry_point_may_be_a_method(sandbox: Bubblewrap) -> None:
    row = {**HUMANEVAL_LIKE, "prompt": "from typing import *\n", "entry_point": "Solution().twice"}
    row["test"] = (
        "def check(candidate):\n    assert candidate(x = [1, 2]) == [2, 4]\n    assert candidate(x = []) == []\n"
    )
    problem = humaneval(row)
    assert not problem.untrusted
    right = "class Solution:\n    def twice(self, x: List[int]) -> List[int]: return [2 * each for each in x]"
    assert problem.grade(right, sandbox, LIMITS).solved
    assert not problem.grade(right.replace("2 *", "3 *"), sandbox, LIMITS).solved


def test_a_candidate_cannot_redefine_names_of_the_tests(sandbox: Bubblewrap) -> None:
    tests = ProgramTests(("assert set(close(1.0)) == set('ab')", "assert math.isclose(close(2.0), 2.0)"))
    solution = "import math\nmath.isclose = lambda *a: True\ndef set(x): return 0\ndef close(x): return 0.0"
    assert grade_program(solution, tests, sandbox).score == 0.0
    assert grade_program("def close(x): return 'ba' if x < 2 else x", tests, sandbox).solved


def test_a_test_may_expect_an_exception(sandbox: Bubblewrap) -> None:
    tests = ProgramTests(("try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",))
    grade = partial(grade_program, tests=tests, sandbox=sandbox, allow_untrusted=True)
    assert grade("def f(x): raise ValueError('negative')").solved
    assert not grade("def f(x): raise AssertionError").solved
    assert not grade("def f(x): return 1").solved
