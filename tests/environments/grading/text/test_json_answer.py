from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.patience import timed

from kapelle.environments.grading.text.json_answer import (
    MAX_DEPTH,
    NotJson,
    grade_json,
    parse_json,
    same_json,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nests deeper"),
        ("[" * 100_000, "nests deeper"),
        ('{"a": ' * 10_000, "nests deeper"),
        ('"' + "x" * 100_000 + '"', "at most 100,000"),
        ('{"a": 1, "a": 2}', "a key twice"),
        ('[{"a": 1, "a": 1}]', "a key twice"),
        ("NaN", "NaN, which is not JSON"),
        ("[Infinity]", "Infinity"),
        ("-Infinity", "Infinity"),
        ("1" * 41, "41 digits"),
        ("1" * 90_000, "digits"),
        ("1e309", "too large"),
        ("1e99999999", "too large"),
        ("1." + "1" * 60, "too large"),
        ("", "not JSON"),
        ("{1: 2}", "not JSON"),
        ("{'a': 1}", "not JSON"),
        ("1 2", "not JSON"),
        ("[1,]", "not JSON"),
        ("__import__('os')", "not JSON"),
        ('"\\ud800', "not JSON"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_not_read(text: str, message: str) -> None:
    def refuse() -> None:
        with pytest.raises(NotJson, match=message):
            parse_json(text)

    assert timed(refuse, 0.5)[1] < 0.5


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', True),
        ("[1, 2]", "[2, 1]", False),
        ("1", "1.0", True),
        ("0.1", "1e-1", True),
        ("0.1", "0.10000000000000001", False),
        ("1", "true", False),
        ("0", "false", False),
        ("null", "false", False),
        ('"1"', "1", False),
        ('{"a": 1}', '{"a": 1, "b": null}', False),
        ("[]", "{}", False),
    ],
)
def test_sameness(one: str, other: str, same: bool) -> None:
    assert same_json(parse_json(one), parse_json(other)) is same
    assert same_json(parse_json(other), parse_json(one)) is same


@pytest.mark.parametrize(
    ("text", "score", "status"),
    [
        ('{"a": [1, 2]}', 1.0, "graded"),
        ('```json\n{"a": [1, 2]}\n```', 1.0, "graded"),
        ('I think: <answer>{"a": [1, 2]}</answer>', 1.0, "graded"),
        ('<think>{"a": [1]}</think>{"a": [1, 2]}', 1.0, "graded"),
        ('{"a": [2, 1]}', 0.0, "graded"),
        ('I think: {"a": [1, 2]}', 1.0, "graded"),
        ('The answer is {"a": [1, 2]}.', 1.0, "graded"),
        ('Here it is:\n\n{"a": [1, 2]}\n\nIt has one key.', 1.0, "graded"),
        ('Here it is:\n```json\n{"a": [1, 2]}\n```', 1.0, "graded"),
        ('Here it is:\n```\n{"a": [1, 2]}\n```\nIt has one key.', 1.0, "graded"),
        ('It is {"a": [1]} or {"a": [1, 2]}', 0.0, "no_answer"),
        ('It is {"a": [1]}\n{"a": [1, 2]}', 0.0, "no_answer"),
        ('It is {"a": [1, 3]}.', 0.0, "graded"),
        ('It is not {"a": [1, 2}.', 0.0, "no_answer"),
        ('```json\n{"a": [1, 2]}\n```\n```json\n{"a": [1]}\n```', 0.0, "no_answer"),
        ('<answer>{"a": [1, 2]}</answer><answer>{"a": 1}</answer>', 0.0, "no_answer"),
        ("", 0.0, "no_answer"),
    ],
)
def test_grading(text: str, score: float, status: str) -> None:
    grade = grade_json(text, {"a": [1, 2]})
    assert (grade.score, grade.status) == (score, status)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_what_python_writes_is_read_back_and_sameness_is_symmetric(one: Any, other: Any) -> None:
    assert same_json(parse_json(json.dumps(one)), one)
    assert same_json(one, other) == same_json(other, one)


@given(st.text(alphabet='[]{}",:0123456789eE.-+truefalsn\\u \n', max_size=80))
def test_the_reader_accepts_or_rejects_every_text(text: str) -> None:
    try:
        parse_json(text)
    except NotJson:
        return
    assert json.loads(text) is not NotImplemented
