from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from tests.grading.code.cheats import CHEATS

from kapelle.errors import DataError
from kapelle.grading.code.grade import ProgramTests, grade_program
from kapelle.grading.code.tasks import CodeTask, humaneval_task, mbpp_task
from kapelle.sandbox.bubblewrap import Bubblewrap
from kapelle.sandbox.contract import Limits

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


def cheating_solutions(task: CodeTask) -> dict[str, str]:
    """Return programs that must score 0 on a problem, by what they try."""
    name = task.tests.candidate[0] if task.tests.candidate else "solution"
    return {what: text.replace("{name}", name) for what, text in CHEATS.items()}


@pytest.mark.slow
def test_a_sample_of_honest_solutions_of_mbpp_passes(
    sandbox: Bubblewrap, mbpp_rows: list[dict[str, Any]]
) -> None:
    rows = {row["task_id"]: row for row in mbpp_rows}
    for number in SAMPLE:
        task = mbpp_task(rows[number])
        grade = grade_program(task.solution, task.tests, sandbox, LIMITS)
        assert grade.solved, (task.id, grade)


@pytest.mark.sandbox_full
@pytest.mark.parametrize("at_once", [1, 8])
def test_all_honest_solutions_of_mbpp_pass(
    sandbox: Bubblewrap, mbpp_rows: list[dict[str, Any]], at_once: int
) -> None:
    assert len(mbpp_rows) == 974

    def fault(row: dict[str, Any]) -> str:
        task = mbpp_task(row)
        grade = grade_program(task.solution, task.tests, sandbox, LIMITS, allow_untrusted=True)
        return "" if grade.solved and grade.trusted is (task.id != "mbpp-596") else f"{task.id}: {grade}"

    with ThreadPoolExecutor(at_once) as threads:
        assert [text for text in threads.map(fault, mbpp_rows) if text] == []


@pytest.mark.slow
def test_cheating_solutions_of_mbpp_score_nothing(
    sandbox: Bubblewrap, mbpp_rows: list[dict[str, Any]]
) -> None:
    for row in mbpp_rows[5:972:322]:
        task = mbpp_task(row)
        for what, solution in cheating_solutions(task).items():
            assert grade_program(solution, task.tests, sandbox, LIMITS).score == 0.0, (task.id, what)


def test_tests_that_use_the_helpers_of_a_prompt_are_not_trusted(sandbox: Bubblewrap) -> None:
    task = humaneval_task(HUMANEVAL_LIKE)
    refused = grade_program(task.solution, task.tests, sandbox)
    assert (refused.status, refused.score, refused.trusted) == ("ungraded", 0.0, False)
    assert "uses `encode`" in refused.explanation
    allowed = grade_program(task.solution, task.tests, sandbox, allow_untrusted=True)
    assert (allowed.solved, allowed.trusted) == (True, False)


def test_a_check_function_with_literals_is_trusted(sandbox: Bubblewrap) -> None:
    task = humaneval_task({**HUMANEVAL_LIKE, "test": CHECK})
    assert grade_program(task.solution, task.tests, sandbox).solved
    for what, solution in cheating_solutions(task).items():
        grade = grade_program(solution, task.tests, sandbox)
        assert (grade.score, grade.trusted) == (0.0, True), what


def test_a_candidate_cannot_redefine_what_the_tests_mean(sandbox: Bubblewrap) -> None:
    tests = ProgramTests(("assert set(close(1.0)) == set('ab')", "assert math.isclose(close(2.0), 2.0)"))
    solution = "import math\nmath.isclose = lambda *a: True\ndef set(x): return 0\ndef close(x): return 0.0"
    assert grade_program(solution, tests, sandbox).score == 0.0
    assert grade_program("def close(x): return 'ba' if x < 2 else x", tests, sandbox).solved


def test_the_name_that_a_problem_asks_for_may_be_a_builtin_one(mbpp_rows: list[dict[str, Any]]) -> None:
    row = next(row for row in mbpp_rows if row["task_id"] == 126)
    assert mbpp_task(row).tests.candidate == ("sum",)


def test_the_prompt_shows_one_test_and_hides_the_others(mbpp_rows: list[dict[str, Any]]) -> None:
    task = mbpp_task(mbpp_rows[0])
    shown, *hidden = task.tests.programs
    assert shown.strip() in task.prompt
    assert hidden
    assert not any(program.strip() in task.prompt for program in hidden)


def test_tests_that_are_no_programs_say_nothing_about_the_candidate(sandbox: Bubblewrap) -> None:
    grade = grade_program("def f(): return 1", ProgramTests(("assert f( ==",)), sandbox)
    assert (grade.status, grade.score) == ("ungraded", 0.0)


def test_a_test_may_expect_an_exception(sandbox: Bubblewrap) -> None:
    tests = ProgramTests(("try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",))
    grade = partial(grade_program, tests=tests, sandbox=sandbox, allow_untrusted=True)
    assert grade("def f(x): raise ValueError('negative')").solved
    assert not grade("def f(x): raise AssertionError").solved
    assert not grade("def f(x): return 1").solved


def test_a_test_that_ends_the_candidate_costs_the_others_nothing(sandbox: Bubblewrap) -> None:
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
def test_a_row_of_another_form_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="MBPP"):
        mbpp_task(row)
    with pytest.raises(DataError, match="HumanEval"):
        humaneval_task(row)


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
