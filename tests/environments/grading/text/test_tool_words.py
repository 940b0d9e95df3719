"""Pairs of texts that BFCL's own comparison takes for the same, and which of them are."""

from __future__ import annotations

from functools import partial

import pytest
from tests.support.patience import timed

from kapelle.environments.grading.text.tool_call import is_formula, same_words


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("New York, NY", "new york NY"),
        ("New York, NY", "NewYork,NY"),
        ("Washington D.C.", "Washington DC"),
        ("pet_friendly", "pet friendly"),
        ("king-size", "King size"),
        ("and/or", "and or"),
        ("S&P-500", "S&P 500"),
        ("Jan.28,2021", "Jan 28, 2021"),
        ("Jan_28,_2021", "Jan 28, 2021"),
        ("2022-03-11", "2022/03/11"),
        ("12.05.2022", "12/05/2022"),
        ("2022-03-11.", "2022-03-11"),
        ("5 km", "5km"),
        ("Bob-123", "Bob 123"),
        ("3x**2 + 2x - 1", "3x**2+2x-1"),
        ("lambda x: exp(-x**2)", "lambda x: exp(-x^2)"),
        ("O'Neill", 'o"neill'),
    ],
)
def test_the_same_words(one: str, other: str) -> None:
    assert same_words(one, other)
    assert same_words(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1.5", "15"),
        ("-5", "5"),
        ("at -5", "at 5"),
        (".5", "5"),
        ("1/2", "12"),
        ("1/2", "1-2"),
        ("2*3", "2 3"),
        ("1, 2", "12"),
        ("2022-03-11", "2022-031-1"),
        ("2022-03-11", "20220311"),
        ("2022-03/11", "2022-03-11"),
        ("x*y", "x/y"),
        ("x - y", "x y"),
        ("a+b", "ab"),
        ("3x**2 + 2x - 1", "3x**2 + 2x * 1"),
        ("3x**2 + 2x - 1", "3x2 + 2x1"),
        ("price*quantity", "price/quantity"),
        ("income - cost", "income / cost"),
        ("m^2", "m2"),
        ("Bern", "Berne"),
        ("192.168.11.33", "192.16.811.33"),
    ],
)
def test_other_words(one: str, other: str) -> None:
    assert not same_words(one, other)
    assert not same_words(other, one)


def test_what_a_formula_is() -> None:
    assert is_formula("y=x**2")
    assert is_formula("lambda x: sin(x) / 2")
    assert not is_formula("2022-03-11")
    assert not is_formula("self-help")
    assert not is_formula("sin x")


def test_long_texts_cost_little() -> None:
    for piece in ("- ", "a-", "1/", "2022-01-01 ", "x*", "_._"):
        assert timed(partial(same_words, piece * 40_000, piece * 40_000 + "x"), 2.0)[1] < 2.0
