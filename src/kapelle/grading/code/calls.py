"""Grades programs by calls with known results, compared here: one sandbox, no test program."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kapelle.grading.code.candidates import Candidate, CandidateGone
from kapelle.grading.code.values import Plain, ValueFault, encode, plain
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
    """Whether an expected list of one item also stands for the item, and a tuple may be returned for a list, and a number be a key for its text: APPS's rule."""


def grade_calls(
    solution: str, tests: tuple[CallTest, ...], sandbox: Backend, limits: Limits | None = None
) -> CodeGrade:
    """Call a solution once for each test and compare what it returns; one that is lost is started again.

    Raises SandboxError when the machine cannot give a sandbox, ValueFault for arguments that have no encoding.
    """
    for test in tests:
        encode((test.arguments, dict(test.keywords)))
    if not tests:
        return CodeGrade((), "ungraded", "there is no test")
    candidate = Candidate(solution, sandbox, limits or Limits())
    try:
        return CodeGrade(tuple(_outcome(candidate, test) for test in tests))
    finally:
        candidate.close()


class _Stays:
    """An object that stays with the candidate."""

    def __init__(self, number: str, nature: str) -> None:
        self.number, self.nature = number, nature


def _resolve(kind: str, *parts: Plain) -> Plain:
    """Return what stands here for a part of a reply: objects stay, values of the candidate's classes are the values that they are."""
    if kind == "object" and list(map(type, parts)) == [str, str]:
        return _Stays(*parts)
    if kind in ("sub", "nan"):
        return parts[0]
    raise ValueFault(f"the unknown kind {kind[:20]!r}")


def _refer(value: Plain) -> tuple[str, ...] | None:
    return ("object", value.number) if isinstance(value, _Stays) else None


def _outcome(candidate: Candidate, test: CallTest) -> TestOutcome:
    def ask(*question: Plain) -> tuple[str, Plain]:
        return candidate.ask(*question, refer=_refer, resolve=_resolve)

    try:
        kind, found = ask("call named", test.function, test.arguments, dict(test.keywords))
        if kind == "value" and isinstance(found, _Stays) and found.nature == "coroutine":
            kind, found = ask("await", found)
        if kind == "value" and isinstance(test.expected, list):
            kind, found = _listed(ask, found, _length(test))
    except CandidateGone as gone:
        candidate.renew()
        return TestOutcome("error", f"the candidate did not answer: {gone}")
    if kind == "error":
        names, text, *_ = found if type(found) is tuple and len(found) > 1 else (("an error",), "")
        return TestOutcome("error", f"{names[0] if names else 'an error'}: {text}"[:500])
    try:
        right = _right(found, test)
    except RecursionError:  # what is right is as deep as what is expected
        right = False
    return TestOutcome("passed") if right else TestOutcome("failed", "the call returned another value")


def _length(test: CallTest) -> int:
    """Return how many items a right result has at most."""
    inside = (item for item in test.expected if test.one_of_one and isinstance(item, list))
    return max(len(test.expected), *map(len, inside), 0)


def _right(got: Plain, test: CallTest) -> bool:
    if same_value(got, test.expected, test.tolerance):
        return True
    if not test.one_of_one:
        return False
    listed = isinstance(test.expected, list) and len(test.expected) == 1
    return any(
        same_value(_as_json(got, expected), expected, test.tolerance)
        for expected in (test.expected, *(test.expected if listed else ()))
    )


def _as_json(value: Plain, like: Plain) -> Plain:
    """Return a value as JSON would say it: with a list for each tuple, and a text for each key where a text is expected."""
    value = plain(value)
    if isinstance(value, (list, tuple)) and isinstance(like, list) and len(value) == len(like):
        return [_as_json(item, each) for item, each in zip(value, like, strict=True)]
    if isinstance(value, dict) and isinstance(like, dict):
        found = {}
        for key, item in value.items():
            told = json.dumps(key) if isinstance(key, (bool, int, float)) or key is None else key
            name = told if type(key) is not str and told in like and told not in value else key
            found[name] = _as_json(item, like.get(name))
        return found
    return value


def _listed(ask: Callable[..., tuple[str, Plain]], found: Plain, size: int) -> tuple[str, Plain]:
    """Return a reply with the items of a range, a generator or another object that is iterated, one past `size` at most."""
    value: Any = plain(found)
    if type(value) in (range, *_VIEWS):
        return "value", list(islice(value, size + 1))
    if not isinstance(value, _Stays):
        return "value", value
    kind, found = ask("iterate", value)
    if kind == "value" and isinstance(found, _Stays):
        kind, found = ask("take", found, size + 1)
        return kind, found[0] if kind == "value" and type(found) is tuple and found else found
    return kind, found


_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def same_value(got: Plain, expected: Plain, tolerance: float = 0.0) -> bool:
    """Return whether two values of built-in types are the same: types too, save that 2 and 2.0 are one number.

    NaN is the same as nothing, so it never matches; a list is never a tuple, a set never a frozenset, and `{True}` not `{1}`.
    """
    left = [(got, expected)]  # values may be nested deeper than calls
    while left:
        one, other = map(plain, left.pop())
        if _is_number(one) and _is_number(other):
            same = _same_number(one, other, tolerance)
        elif type(one) is not type(other):
            same = False
        elif isinstance(other, (list, tuple)):
            same = len(one) == len(other)
            left += zip(one, other, strict=False)
        elif isinstance(other, (set, frozenset)):
            same = set(map(_exact, one)) == set(map(_exact, other))
        elif isinstance(other, dict):
            ours, theirs = ({_exact(key): each[key] for key in each} for each in (one, other))
            same = ours.keys() == theirs.keys()
            left += [(ours[key], theirs[key]) for key in theirs] if same else []
        else:
            same = bool(one == other)
        if not same:
            return False
    return True


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
