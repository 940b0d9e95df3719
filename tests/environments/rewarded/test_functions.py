"""Parameters and results of reward functions, and the errors for others."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from kapelle.environments.rewarded import read_function
from kapelle.errors import ConfigError, EpisodeError

COLUMNS = frozenset({"question", "answer", "level"})
GIVEN = {"completion": "42", "completions": {"a": "x", "b": "42"}, "answer": "42", "level": 3}


def exact(completion: str, answer: str) -> bool:
    return completion == answer


async def later(completions: dict[str, str], level: int, bonus: float = 0.5) -> float:
    return len(completions) * level + bonus


class Many:
    """Numbers of which torch makes no single one."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


class Counted:
    def __call__(self, completion: str, **row: Any) -> float:
        return len(row)


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (exact, 1.0),
        (later, 6.5),
        (Counted(), 3.0),
        (lambda level: level / 2, 1.5),
        (functools.partial(later, bonus=1), 7.0),
        (lambda: None, None),
    ],
)
async def test_arguments_are_passed_by_name(function: Callable[..., Any], reward: float | None) -> None:
    read = read_function("f", function)
    read.check(COLUMNS, for_team=True)
    assert await read(GIVEN) == reward


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        (lambda completions, **kwargs: [1.5], 1.5),
        (lambda completions, **kwargs: [None], None),
        (lambda prompts, completions, answer, completion_ids: [2], 2.0),
    ],
)
async def test_a_function_for_batches_returns_a_list_of_one(function: Any, reward: float | None) -> None:
    read = read_function("f", function)
    read.check(COLUMNS, for_team=True)
    batch = {"prompts": ["q"], "completions": ["42"], "completion_ids": [[1]], "answer": ["42"]}
    assert await read(batch) == reward


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda anwser: 0.0, "`anwser`"),
        (lambda anwser: 0.0, "Did you mean 'answer'?"),
        (lambda agent: 0.0, "reward={'NAME': f}"),
        (lambda question: 0.0, "Rename the column"),
    ],
)
def test_a_parameter_without_a_value_is_an_error(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_function("f", function).check(COLUMNS | {"question"}, for_team=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3, "int"),
        (lambda *texts: 0.0, "`texts`"),
        (lambda text, /: 0.0, "`text`"),
        (print.__class__.__call__, "takes"),
    ],
)
def test_what_cannot_be_called_by_keyword_is_an_error(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_function("f", function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: [1.0], "returned list"),
        (lambda: {"a": 1.0}, "returned dict"),
        (lambda: "good", "`f` (test_functions.py, line "),
        (lambda: "good", "returned 'good'"),
        (lambda: 10**400, "not a finite number"),
        (Many, "not a finite number"),
        (lambda: float("nan"), "'nan'"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
async def test_the_result_must_be_a_number(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(EpisodeError, match=re.escape(message)):
        await read_function("f", function)({})


async def test_a_function_for_batches_must_return_a_list_of_numbers() -> None:
    def graded(completions: list[str], **rest: Any) -> list[dict[str, float]]:
        return [{"score": 1.0} for _ in completions]

    with pytest.raises(EpisodeError) as error:
        await read_function("graded", graded)({"completions": ["2"]})
    assert "`completions`" in str(error.value)


async def test_an_error_in_a_library_names_the_line_that_called_it() -> None:
    def parsed(completion: str) -> float:
        return float(yaml.safe_load(completion))

    with pytest.raises(EpisodeError) as error:
        await read_function("parsed", functools.partial(parsed))({"completion": "a: ["})
    line = parsed.__code__.co_firstlineno + 1
    assert "ParserError" in str(error.value)
    assert f"test_functions.py, line {line}" in str(error.value)
