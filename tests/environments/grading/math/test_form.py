from __future__ import annotations

import pytest

from kapelle.environments.grading.math.sameness import math_form


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}"),
        (r"\frac{3}{1+\sqrt2}", r"3\sqrt2-3"),
        (r"\frac12 - \frac{i}{2}", r"\frac{1-i}{2}"),
        (r"\frac{1}{\sqrt{99999989}}", r"\frac{\sqrt{99999989}}{99999989}"),
        ("½", "0.5"),
        ("|x|=3", r"x=\pm 3"),
        (r"(-\infty,\infty)", r"\text{all real numbers}"),
        (r"\log_2 3", r"\log_{2}3"),
        (r"\frac{\pi}{3}\text{ radians}", r"\pi/3"),
    ],
)
def test_spellings_of_one_value_are_one_vote(one: str, other: str) -> None:
    assert math_form(one) == math_form(other)


@pytest.mark.parametrize(
    ("one", "other"), [("90", "90 radians"), (r"\frac{1}{\sqrt2}", r"\sqrt2"), ("1/i", "i")]
)
def test_other_values_are_other_votes(one: str, other: str) -> None:
    assert math_form(one) != math_form(other)
