"""Grades programs by calls with known results, compared here: one sandbox, no test program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kapelle.grading.code.candidates import Candidate, CandidateGone
from kapelle.grading.code.values import Plain, encode
from kapelle.grading.code.verdict import CodeGrade, TestOutcome
from kapelle.sandbox.contract import Backend, Limits


@dataclass(frozen=True, slots=True)
class CallTest:
    """One call and what it must return."""

    function: str
    arguments: tuple[Plain, ...]
    expected: Plain
    """Never leaves this process."""
    keywords: Mapping[str, Plain] = field(default_factory=dict)
    tolerance: float = 0.0
    """Most by which finite floats may differ, absolutely or relative to the expected one."""


def grade_calls(
    solution: str, tests: tuple[CallTest, ...], sandbox: Backend, limits: Limits | None = None
) -> CodeGrade:
    """Call a solution once for each test and compare what it returns; one that is lost is started again.

    Raises SandboxError when the machine cannot give a sandbox, ValueFault for arguments that have no encoding.
    """
    for test in tests:
        encode((list(test.arguments), dict(test.keywords)))
    candidate = Candidate(solution, sandbox, limits or Limits())
    try:
        return CodeGrade(tuple(_outcome(candidate, test) for test in tests))
    finally:
        candidate.close()


def _outcome(candidate: Candidate, test: CallTest) -> TestOutcome:
    try:
        kind, *rest = candidate.ask("call", test.function, list(test.arguments), dict(test.keywords))
    except CandidateGone as gone:
        candidate.renew()
        return TestOutcome("error", f"the candidate did not answer: {gone}")
    if kind == "error":
        return TestOutcome("error", f"{rest[0]}: {rest[1]}"[:500])
    if same_value(rest[0], test.expected, test.tolerance):
        return TestOutcome("passed")
    return TestOutcome("failed", "the call returned another value")


def same_value(got: Plain, expected: Plain, tolerance: float = 0.0) -> bool:
    """Return whether two values of built-in types are the same: types too, save that 2 and 2.0 are one number.

    NaN is the same as nothing, so it never matches; a list is never a tuple, a set never a frozenset.
    """
    if _is_number(got) and _is_number(expected):
        return _same_number(got, expected, tolerance)
    if type(got) is not type(expected):
        return False
    if isinstance(expected, (list, tuple)):
        pairs = zip(got, expected, strict=False)
        return len(got) == len(expected) and all(same_value(a, b, tolerance) for a, b in pairs)
    if isinstance(expected, dict):
        same_keys = got.keys() == expected.keys() and len(got) == len(expected)
        return same_keys and all(same_value(got[key], expected[key], tolerance) for key in expected)
    return bool(got == expected)


def _is_number(value: Plain) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same_number(got: float, expected: float, tolerance: float) -> bool:
    if got == expected:
        return True
    if not tolerance:
        return False
    try:
        return math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance) and math.isfinite(got)
    except OverflowError:
        return False
