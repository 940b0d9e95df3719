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
from kapelle.errors import DataError
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


def test_the_function_may_have_the_name_of_a_builtin(
    sandbox: Bubblewrap, mbpp_rows: list[dict[str, Any]]
) -> None:
    problem = mbpp(next(row for row in mbpp_rows if row["task_id"] == 126))
    assert "sum(" in problem.shown[0]
    assert problem.grade(solution_of(problem), sandbox, LIMITS).solved
    assert problem.grade("def f(): pass", sandbox, LIMITS).score == 0.0


def test_a_test_may_expect_an_exception(sandbox: Bubblewrap) -> None:
    tests = ProgramTests(("try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",))
    grade = partial(grade_program, tests=tests, sandbox=sandbox, allow_untrusted=True)
    assert grade("def f(x): raise ValueError('negative')").solved
    assert not grade("def f(x): raise AssertionError").solved
    assert not grade("def f(x): return 1").solved


def test_an_exit_in_one_test_does_not_affect_the_others(sandbox: Bubblewrap) -> None:
    tests = ProgramTests(("assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"))
    solution = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x"
    assert [test.status for test in grade_program(solution, tests, sandbox).tests] == [
        "passed",
        "error",
        "passed",
    ]


@pytest.mark.parametrize(
    "row", [{}, {"test_list": []}, {"test_list": ["assert ("], "code": "", "test_setup_code": "", "text": ""}]
)
def test_a_row_of_another_form_is_an_error(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="MBPP"):
        mbpp(row)
    with pytest.raises(DataError, match="HumanEval"):
        humaneval(row)


def test_an_object_of_the_candidates_is_neither_true_nor_false(sandbox: Bubblewrap) -> None:
    tests = ProgramTests(("assert even(4)", "assert not even(3)", "assert even(4) is True or even(3)"))
    solution = "class Yes:\n    def __len__(self): return 1\ndef even(x): return Yes()"
    assert grade_program(solution, tests, sandbox).score == 0.0
    assert grade_program("def even(x): return x % 2 == 0", tests, sandbox).solved


def test_objects_of_the_candidates_are_built_and_passed_back(sandbox: Bubblewrap) -> None:
    tests = ProgramTests(
        ("assert total(root) == 6", "root.left.value = 5\nassert total(root) == 9"),
        "root = Node(1)\nroot.left = Node(2)\nroot.right = Node(3)",
    )
    solution = (
        "class Node:\n    def __init__(self, value): self.value, self.left, self.right = value, None, None\n"
        "def total(n): return 0 if n is None else n.value + total(n.left) + total(n.right)"
    )
    assert grade_program(solution, tests, sandbox).solved
