from __future__ import annotations

import pytest

from kapelle.environments.grading.code.grade import (
    CallTest,
    OutputTest,
    grade_calls,
    grade_output,
    same_output,
)
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("1 2\n", "1 2"),
        ("1 2 \n\n\n", "1 2\n"),
        ("1\t2\r\n3\r\n", "1 2\n3\n"),
        ("  yes\n", "yes\n"),
        ("3.1415926\n", "3.14159265\n"),
        ("1000000.4\n", "1000000.0\n"),
        ("2\n", "2.0\n"),
        ("2.5e3", "2500.0"),
        (".5", "0.5"),
        ("0.5", "0.500000"),
        ("1.10", "1.10"),
        ("1.1", "1.10"),
        ("0.50", "0.5"),
        ("0.5", "0.50"),
        ("0.500", "0.5"),
        ("-1.10 2.0", "-1.1 2.00"),
        ("1.1", "1.100"),
        ("2", "2.00"),
        ("0.30000000000000004", "0.3"),
        ("1\v2\f3", "1 2 3"),
        ("", "\n"),
    ],
)
def test_outputs_that_say_the_same(printed: str, expected: str) -> None:
    assert same_output(printed, expected)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("1 2", "1\n2"),
        ("1\n\n2", "1\n2"),
        ("12", "1 2"),
        ("1", "2"),
        ("3.1416", "3.14159265"),
        ("2.0", "2"),
        ("100000000000000001", "100000000000000002"),
        ("nan", "1.0"),
        ("nan", "0.0"),
        ("inf", "1e300"),
        ("1e999", "1.0"),
        ("1e998", "1e999"),
        ("0x1p1", "2.0"),
        ("1_000.0", "1000.0"),
        ("٣.0", "3.0"),
        ("Yes", "yes"),
        ("1\x1c2", "1 2"),
        ("1 2", "1\x1c2"),
        ("1\u20282", "1 2"),
        ("1\xa02", "1 2"),
        ("1\x852", "1 2"),
        ("", "0"),
        ("1.0 1.0", "1.0"),
        ("1.0" + "0" * 10_000 + "9", "1.0"),
    ],
)
def test_outputs_that_differ(printed: str, expected: str) -> None:
    assert not same_output(printed, expected)


def test_each_input_is_a_run_of_its_own(sandbox: Bubblewrap) -> None:
    tests = tuple(OutputTest(f"{n}\n", f"{n * n}\n") for n in (3, -4, 5))
    honest = "print(int(input()) ** 2)"
    assert grade_output(honest, tests, sandbox).solved
    assert grade_output(
        "n = int(input())\nprint(9 if n > 0 else n * n)", tests, sandbox
    ).score == pytest.approx(2 / 3)
    # What one run leaves does not reach the next.
    leaves = "import os\nprint(0 if os.path.exists('x') else int(input()) ** 2)\nopen('x', 'w').close()"
    assert grade_output(leaves, tests, sandbox).solved


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("raise SystemExit(1)", "exit code 1"),
        ("import sys; sys.exit('sorry')", "exit code 1; sorry"),
        ("1 / 0", "exit code 1; ZeroDivisionError: division by zero"),
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("import os; os.abort()", "signal 6"),
    ],
)
def test_a_program_that_ends_with_an_error_has_not_passed(sandbox: Bubblewrap, end: str, said: str) -> None:
    [outcome] = grade_output(f"print(7, flush=True)\n{end}", (OutputTest("", "7\n"),), sandbox).tests
    assert outcome.status == "error"
    assert f"the program ended with {said}" in outcome.explanation


@pytest.mark.parametrize("end", ["exit()", "import sys; sys.exit(0)", "import os; os._exit(0)", "pass"])
def test_a_program_that_ends_well_has_passed(sandbox: Bubblewrap, end: str) -> None:
    assert grade_output(f"print(7, flush=True)\n{end}", (OutputTest("", "7\n"),), sandbox).solved


def test_a_program_stops_after_its_limit_in_three_tests(sandbox: Bubblewrap) -> None:
    tests = tuple(OutputTest(f"{n}\n", f"{n}\n") for n in range(6))
    solution = "n = int(input())\nprint(n if n not in (0, 2, 3) else 'x' * 9999)"
    grade = grade_output(solution, tests, sandbox, Limits(output_bytes=1000))
    assert [test.status for test in grade.tests] == [
        "error",
        "passed",
        "error",
        "error",
        "not_run",
        "not_run",
    ]
    assert grade.status == "graded"
    assert grade.score == pytest.approx(1 / 6)


def test_a_crash_of_the_candidate_affects_only_its_call(sandbox: Bubblewrap) -> None:
    solution = "import os\ndef half(x):\n    if x == 2: os._exit(3)\n    return x / 2"
    tests = tuple(CallTest("half", (x,), x / 2) for x in (1, 2, 3))
    assert [test.status for test in grade_calls(solution, tests, sandbox).tests] == [
        "passed",
        "error",
        "passed",
    ]
