"""Grades programs by what they print for an input; the comparison happens here, after the program is gone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kapelle.grading.code.text import runnable
from kapelle.grading.code.verdict import CodeGrade, TestOutcome
from kapelle.sandbox.contract import Backend, Limits, Result, run

_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,40}\.[0-9]{0,40}|\.[0-9]{1,40}|[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?")
_REAL = re.compile(r".*[.eE].*")
_ONE_DECIMAL = re.compile(r"[+-]?[0-9]+\.[1-9]")
_SPACES = re.compile(r"[ \t\r\f\v]+")
MOST_STOPPED = 3
"""Tests in which one program may reach a limit: a problem may have hundreds of tests, and each would take as long."""
MOST_SECONDS = 20
"""How many times the limit of one test all tests of a program may take together on the clock."""


@dataclass(frozen=True, slots=True)
class OutputTest:
    """One input and what must be printed for it."""

    stdin: str
    stdout: str
    """Never enters the sandbox."""
    tolerance: float = 1e-6
    """Most by which a printed number may differ, absolutely or relatively, where this one has a point or an
    exponent; whole numbers must match digit by digit, and so must `1.1` and `1.10`."""


def grade_output(
    solution: str, tests: tuple[OutputTest, ...], sandbox: Backend, limits: Limits | None = None
) -> CodeGrade:
    """Run a program once for each test and compare its standard output; a program that is out of its time is run no more.

    Raises SandboxError when the machine cannot give a sandbox.
    """
    limits = limits or Limits()
    files = {"solution.py": runnable(solution).encode("utf-8", "surrogatepass")}
    command = [sandbox.python, "-I", "-B", "solution.py"]
    outcomes, stopped, seconds = list[TestOutcome](), 0, 0.0
    for test in tests:
        if stopped == MOST_STOPPED or seconds > MOST_SECONDS * limits.wall_s:
            outcomes.append(TestOutcome("not_run", "the program had used up its time in earlier tests"))
            continue
        result = run(sandbox, files, command, test.stdin.encode(), limits)
        stopped, seconds = stopped + (result.limit is not None), seconds + result.wall_s
        outcomes.append(_outcome(result, test))
    return CodeGrade(tuple(outcomes))


def _outcome(result: Result, test: OutputTest) -> TestOutcome:
    if result.limit is not None:
        return TestOutcome("error", f"the program reached its limit of {result.limit}")
    try:
        printed = result.stdout.decode("utf-8")
    except UnicodeDecodeError:
        return TestOutcome("failed", "the output is not text in UTF-8")
    same = same_output(printed, test.stdout, test.tolerance)
    if same and result.ok:
        return TestOutcome("passed")
    said = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
    if same:
        ended = f"signal {result.signal}" if result.signal else f"exit code {result.exit_code}"
        return TestOutcome("error", "; ".join([f"the program ended with {ended}", *said])[:500])
    shown = repr(printed.strip()[:200]) if printed.strip() else "nothing"
    return TestOutcome("failed", "; ".join([f"the program printed {shown}", *said])[:500])


def same_output(printed: str, expected: str, tolerance: float = 1e-6) -> bool:
    """Return whether two outputs say the same: the same lines of the same words.

    Spaces and tabs between words, at line ends and empty lines at the end do not count; line breaks do.
    """
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(_same_word(x, y, tolerance) for x, y in zip(a, b, strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


def _lines(text: str) -> list[list[str]]:
    # Python's own `split` takes U+001C and a dozen other characters for spaces.
    lines = [_SPACES.split(line.strip(" \t\r\f\v")) for line in text.replace("\r\n", "\n").split("\n")]
    lines = [words if words != [""] else [] for words in lines]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_word(printed: str, expected: str, tolerance: float) -> bool:
    if printed == expected:
        return True
    if not (_REAL.fullmatch(expected) and _DECIMAL.fullmatch(expected) and _DECIMAL.fullmatch(printed)):
        return False
    # `1.1` and `1.10` are one number, and two versions, sections or prices.
    short, long = sorted((printed, expected), key=len)
    if long == f"{short}0" and _ONE_DECIMAL.fullmatch(short):
        return False
    a, b = float(printed), float(expected)
    return math.isfinite(a) and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
