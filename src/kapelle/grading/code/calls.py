"""Grades programs by calls with known results, compared here: one sandbox, no test program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kapelle.grading.code import collected
from kapelle.grading.code.candidates import Candidate, CandidateGone
from kapelle.grading.code.values import Coroutine, Plain, Reference, encode
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
    """Most by which finite floats may differ, absolutely or relative to the expected one; whole numbers are exact."""
    one_of_one: bool = False
    """Whether an expected list of one item also stands for the item, and a tuple may be returned for a list: APPS's rule."""


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
        if kind == "value" and isinstance(rest[0], Coroutine):
            kind, *rest = candidate.ask("await", rest[0])
        if kind == "value" and isinstance(test.expected, list):
            kind, *rest = _listed(candidate, rest, _length(test))
    except CandidateGone as gone:
        candidate.renew()
        return TestOutcome("error", f"the candidate did not answer: {gone}")
    if kind == "error":
        names, text, _ = rest
        return TestOutcome("error", f"{names[0] if names else 'an error'}: {text}"[:500])
    if kind == "value" and _right(rest[0], test):
        return TestOutcome("passed")
    return TestOutcome("failed", "the call returned another value")


def _length(test: CallTest) -> int:
    """Return how many items a right result has at most."""
    inside = (item for item in test.expected if test.one_of_one and isinstance(item, list))
    return max(len(test.expected), *map(len, inside), 0)


def _right(got: Plain, test: CallTest) -> bool:
    if same_value(got, test.expected, test.tolerance):
        return True
    if not test.one_of_one:
        return False
    got, listed = _as_lists(got), isinstance(test.expected, list) and len(test.expected) == 1
    return any(
        same_value(got, expected, test.tolerance)
        for expected in (test.expected, *(test.expected if listed else ()))
    )


def _as_lists(value: Plain) -> Plain:
    """Return a value with a list for each tuple: JSON has none."""
    if isinstance(value, (list, tuple)):
        return [_as_lists(item) for item in value]
    return value


def _listed(candidate: Candidate, reply: list[Plain], size: int) -> tuple[Plain, ...]:
    """Return a reply with the items of a range, a generator or another object that is iterated, one past `size` at most."""
    value = collected.plain(reply[0])
    if isinstance(value, range):
        return "value", list(value[: size + 1]), {}
    if not isinstance(value, Reference):
        return "value", *reply
    iterator = candidate.ask("iterate", value)
    if iterator[0] != "value" or not isinstance(iterator[1], Reference):
        return iterator
    return candidate.ask("take", iterator[1], size + 1)


def same_value(got: Plain, expected: Plain, tolerance: float = 0.0) -> bool:
    """Return whether two values of built-in types are the same: types too, save that 2 and 2.0 are one number.

    NaN is the same as nothing, so it never matches; a list is never a tuple, a set never a frozenset, and `{True}` not `{1}`.
    """
    got, expected = collected.plain(got), collected.plain(expected)
    if _is_number(got) and _is_number(expected):
        return _same_number(got, expected, tolerance)
    if type(got) is not type(expected):
        return False
    if isinstance(expected, (list, tuple)):
        pairs = zip(got, expected, strict=False)
        return len(got) == len(expected) and all(same_value(a, b, tolerance) for a, b in pairs)
    if isinstance(expected, (set, frozenset)):
        return set(map(_exact, got)) == set(map(_exact, expected))
    if isinstance(expected, dict):
        ours, theirs = ({_exact(key): each[key] for key in each} for each in (got, expected))
        return ours.keys() == theirs.keys() and all(
            same_value(ours[key], theirs[key], tolerance) for key in theirs
        )
    return bool(got == expected)


def _exact(key: Plain) -> Plain:
    """Return a key that equals only keys of the same type, numbers aside."""
    if isinstance(key, (tuple, frozenset)):
        return type(key), type(key)(map(_exact, key))
    return int if _is_number(key) else type(key), key


def _is_number(value: Plain) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same_number(got: float, expected: float, tolerance: float) -> bool:
    if got == expected:
        return True
    # Whole numbers are exact.
    if not tolerance or isinstance(got, int) or isinstance(expected, int):
        return False
    return math.isfinite(got) and math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
