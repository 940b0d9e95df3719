from __future__ import annotations

import gzip
import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.patience import timed

from kapelle.environments.grading.math.grade import read_math
from kapelle.environments.grading.math.numeric import (
    Number,
    grade_numeric,
    normal_form,
    parse_number,
    read_number,
    same_figure,
    same_value,
)
from kapelle.environments.grading.verdict import Grade


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", "18"),
        ("-18", "-18"),
        ("+18", "18"),
        ("0018", "18"),
        ("-0", "0"),
        ("18.", "18"),
        ("18.50", "37/2"),
        (".5", "1/2"),
        ("1,234", "1234"),
        ("1,234,567.5", "2469135/2"),
        ("1.234", "617/500"),
        ("1{,}234", "1234"),
        ("$18", "18"),
        ("-$18", "-18"),
        ("$-18", "-18"),
        (r"\$18", "18"),
        ("€ 18", "18"),
        ("$18$", "18"),
        ("50%", "1/2"),
        (r"50\%", "1/2"),
        ("1/3", "1/3"),
        ("-1/3", "-1/3"),
        ("2 1/3", "7/3"),
        ("-2 1/2", "-5/2"),
        (r"\frac{1}{3}", "1/3"),
        (r"\dfrac{-1}{3}", "-1/3"),
        (r"-\frac{1}{3}", "-1/3"),
        (r"\frac12", "1/2"),
        ("6e3", "6000"),
        ("6E-1", "3/5"),
        ("-6e2", "-600"),
    ],
)
def test_numbers(text: str, value: str) -> None:
    number = parse_number(text)
    assert number is not None
    assert number.value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "-",
            ".",
            ",",
            "%",
            "$",
            "nan",
            "NaN",
            "inf",
            "-inf",
            "oo",
            "zoo",
            "Infinity",
            "True",
            "None",
        ),
        *("1,2", "1,23", "12,34", "1,2345", "1.2.3", "1..2", "--5", "-$-5", "+-5", "5-", "(5)", "[5]", "5,"),
        *("x=5", "5=5", "5 or 6", "5 6", "1-5", "±5", "5±1", "5+0*x", "2^3", "2**3", "9**9**9", "5!", "√4"),
        *(
            "5 apples",
            "5 km",
            "5°",
            "0x10",
            "0b1",
            "1_00",
            "５",
            "²",
            "1e",
            "e5",
            "1e400",
            "1e-400",
            "1e9999",
        ),
        *(
            "1/0",
            "0/0",
            "1/2/3",
            "1/-2",
            r"\frac{1}{0}",
            r"\frac{1}{x}",
            r"\frac123",
            r"\frac{1}",
            r"\sqrt{4}",
        ),
        *(
            "5" * 81,
            "1" + "0" * 1_000_000,
            "((((",
            "__import__('os')",
            "().__class__",
            "[1 for _ in (1,)]",
            "lambda:5",
        ),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_texts_that_are_not_one_number_of_normal_size(text: str) -> None:
    found, seconds = timed(lambda: parse_number(text), 0.1)
    assert found is None
    assert seconds < 0.1


def test_a_percentage_has_a_value_and_digits() -> None:
    fifty = Number(Fraction(50), percent=True)
    assert same_value(fifty, Number(Fraction(1, 2)))
    assert not same_value(fifty, Number(Fraction(50)))
    assert same_figure(fifty, Number(Fraction(50)))
    assert not same_figure(fifty, Number(Fraction(1, 2)))
    assert normal_form(fifty) == "50%"
    assert normal_form(Number(Fraction(-3, 4))) == "-3/4"


NUMBERS = st.builds(
    Number, st.fractions(-1000, 1000, max_denominator=50), st.booleans(), st.sampled_from(["", "$", "€"])
)


@pytest.mark.slow
@given(NUMBERS, NUMBERS)
def test_comparison_does_not_depend_on_the_order(one: Number, other: Number) -> None:
    assert same_value(one, other) == same_value(other, one)
    assert same_figure(one, other) == same_figure(other, one)
    assert same_value(one, one)


@given(st.integers(-(10**12), 10**12))
def test_thousands_separators_change_nothing(number: int) -> None:
    assert parse_number(f"{number:,}") == parse_number(str(number)) == Number(Fraction(number))


@given(st.decimals(-(10**9), 10**9, allow_nan=False, places=4))
def test_decimals_are_exact(number: object) -> None:
    parsed = parse_number(f"{number:f}")
    assert parsed == Number(Fraction(str(number)))


@given(st.text(max_size=90))
def test_the_parser_accepts_or_rejects_every_text(text: str) -> None:
    found = parse_number(text)
    assert found is None or isinstance(found, Number)


FIVE = Number(Fraction(5))


@pytest.mark.parametrize(
    "text",
    [
        "#### 5 #### 6",
        "#### 6 #### 5",
        "#### 5 or 6",
        "#### 5. Actually no, it is 6",
        "#### 1-5",
        "#### 5 ± 5",
        "#### 5=5",
        "#### all real numbers",
        "#### 55",
        "#### 5.0001",
        "#### 4.9999999999999999999",
        "#### -5",
        "#### \u22125",
        "#### 5%",
        "#### 5e1",
        "#### 5\u200b5",
        "#### \u202e5",
        "#### five",
        "#### 5+0*x",
        "<think>#### 5</think>",
        "#### gold",
    ],
)
def test_hostile_answers_score_0(text: str) -> None:
    assert grade_numeric(text, FIVE, ["hash", "last_box"]).score == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "18",
        "x = 18",
        "x=18",
        r"18\text{ cm}",
        "18 dollars",
        "$18",
        r"18^\circ",
        "(18)",
        "{18}",
        "n = 18 hours",
    ],
)
def test_a_number_is_found_in_usual_notation(text: str) -> None:
    number = read_number(text)
    assert number is not None
    assert same_value(number, Number(Fraction(18)))


@pytest.mark.parametrize(
    "text",
    [
        "18 cents",
        "2*9",
        "20-2",
        "18=18",
        "x=y=18",
        "18 or 19",
        "(18, 19)",
        "((18))",
        "x",
    ],
)
def test_a_sum_a_factor_or_a_second_number_is_not_one_number(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("each", [10, pytest.param(1, marks=pytest.mark.long)])
def test_agreement_with_every_labelled_gsm8k_solution(each: int, gsm8k_folder: Path) -> None:
    labelled = gsm8k_folder / "example_model_solutions.jsonl.gz"
    if not labelled.is_file():
        pytest.skip(f"the folder {gsm8k_folder} holds no {labelled.name}")
    with gzip.open(gsm8k_folder / "test.jsonl.gz", "rt", encoding="utf-8") as file:
        gold = {
            row["question"]: parse_number(row["answer"].split("####")[1]) for row in map(json.loads, file)
        }
    with gzip.open(labelled, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][::each]
    agreed = as_mathematics = total = 0
    for row in rows:
        truth = gold[row["question"]]
        assert truth is not None
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            grade = grade_numeric(row[model]["solution"], truth, ["last_number"])
            agreed += (grade.score == 1.0) == row[model]["is_correct"]
            read = read_math(row[model]["solution"], normal_form(truth), ["last_number"])
            assert isinstance(read, Grade)
            as_mathematics += (read.score == 1.0) == row[model]["is_correct"]
            total += 1
    assert (agreed, as_mathematics, total) == (4 * len(rows),) * 3
    assert len(rows) == -(-1319 // each)
