"""`last_number` reads a whole number, as a person does, or none: a part of one is never taken for it."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kapelle.environments.grading.math.numeric import Number, grade_numeric, parse_number, same_figure
from kapelle.environments.grading.text.extraction import extract

WHOLE = [
    ("So there are 1 234 567 people.", "1234567"),
    ("So there are 1,234,567 people.", "1234567"),
    ("So there are 1\u2009234 people.", "1234"),
    ("So there are 12\u00a0345 people.", "12345"),
    ("So there are 12\u202f345.", "12345"),
    ("That is 1'234'567 francs", "1234567"),
    ("That is 1’234 francs", "1234"),
    ("The value is 1_000_000", "1000000"),
    ("The value is 1.000.000", "1000000"),
    (r"The value is $1{,}234$.", "1234"),
    (r"The value is $12\,345$.", "12345"),
    (r"The value is $12,\!345$.", "12345"),
    (r"The value is $12\ 345$.", "12345"),
    ("It weighs 1 234.5 kg", "1234.5"),
    ("They walk for 1 1/2 hours.", "3/2"),
    ("It takes 2 3/4 cups", "11/4"),
    ("It takes 1½ hours", "3/2"),
    ("It takes 2 ¾ hours", "11/4"),
    ("It is ½ of it", "1/2"),
    ("It is 3/4 of it", "3/4"),
    (r"It is $1\frac{1}{2}$ hours", "3/2"),
    (r"It is $\frac{3}{8}$.", "3/8"),
    ("It is -3/4.", "-3/4"),
    ("It is −5 degrees", "-5"),
    ("It is - 5", "-5"),
    ("The change is -$5", "-5"),
    ("About 2.5 million people", "2500000"),
    ("It costs $3 billion", "3000000000"),
    ("It holds 2 dozen", "24"),
    ("It holds 3 thousand.", "3000"),
    ("It is 6e3", "6000"),
    ("It is 1.5E-3", "0.0015"),
    ("The area is 12 cm^2.", "12"),
    ("The area is 12 m²", "12"),
    (r"The area is $12\text{ cm}^2$", "12"),
    (r"The angle is $45^\circ$.", "45"),
    ("The angle is 45°.", "45"),
    ("He paid US$5", "5"),
    ("He paid USD5", "5"),
    ("He needs 5kg.", "5"),
    ("It is the 12th", "12"),
    ("It is 12 - more than before.", "12"),
    ("No.5", "5"),
    ("So it is...5", "5"),
    ("The answer is 5!", "5"),
    ("3 + 4 = 7", "7"),
    ("Answer: +7", "7"),
]


@pytest.mark.parametrize(("text", "number"), WHOLE)
def test_a_whole_number_is_read(text: str, number: str) -> None:
    gold = Number(Fraction(number))
    assert grade_numeric(text, gold, ["last_number"], same_figure).score == 1.0


PARTS = [
    "The sum is 7 = 12 +",
    "The sum is 12 + x",
    "The sum is 12 + John's",
    "It is 12 -",
    "It is 12 - x",
    "So 6*2 = 12 =",
    "7 + 5 = ?",
    "It is 7 + 5",
    "It is 7+5",
    "It is 7 - 5",
    "It is x - 5",
    "It is x+5",
    "It is 7 × 5",
    "It is 7 x 5",
    "It is 7x5",
    "It is 7 ÷ 5",
    "It is 7·5",
    "It is 7 plus 5",
    "It is 7 minus 5",
    "It is 7 times 5",
    "It is 10 divided by 5",
    "It is 10 mod 7",
    "It is 10 choose 3",
    "It is 12 plus",
    "It is negative 5",
    "It is minus 5",
    "It is 10^{5}",
    "It is 10^5",
    "It is 1.5 × 10^5",
    "It is 1.5 × 10⁵",
    "It is 2(3)",
    "It is f(5)",
    "It is x_5",
    "It is x_{5}",
    "It is x5",
    "It is 101_2",
    "It is 101₂",
    "It is 5x",
    "It is 5n + 1 of 5n",
    "It is 3 + 5i",
    "It is 5π",
    "It costs $5k",
    "It costs 5M",
    "It is ±5",
    "At 3:45",
    "At 10:30 pm",
    "The ratio is 3:5",
    "On 2024-05-12",
    "On 05/12/2024",
    "Version 3.4.1",
    "Version v3",
    "From 3-5",
    "From 3–5",
    "From 3—5",
    "From 3~5",
    "From 3..5",
    "From 3...5",
    "It is 12'34",
    "It is 2 and 1/2 hours",
    "It is 2 and a half hours",
    "It is 2 and three quarters",
    "It is 12,34,56,7",
    "It is 1.234.567,8",
    "It costs 50 cents",
    r"It is $2\cdot 5$",
    r"It is $\sqrt{5}$",
    r"It is $\sqrt 5$",
    r"It is $5\sqrt{2}$",
    r"It is $2\times 5$",
    "It is 168/2",
    "It is ∛5",
    "It is 3 out of 5",
    "It is 3 of 5",
    "It is 3 by 5",
    "It costs 5bn",
    "It is 5‰",
    "It is 5'10",
]


@pytest.mark.parametrize("text", PARTS)
def test_a_part_of_a_number_is_none(text: str) -> None:
    assert grade_numeric(text, Number(Fraction(5)), ["last_number"]).status == "no_answer"


def test_percentages_are_read_with_their_sign_in_words() -> None:
    for text in ("about 50%", "about 50 %", "about 50 percent", "about 50 per cent", r"$50\%$", "50 pct"):
        found = extract(text, ["last_number"]).text
        assert found is not None
        assert parse_number(found) == Number(Fraction(50), percent=True), text
