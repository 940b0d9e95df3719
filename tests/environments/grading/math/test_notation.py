from __future__ import annotations

import pytest

from kapelle.environments.grading.math.notation import plain_notation


@pytest.mark.parametrize(
    ("written", "usual"),
    [
        ("2½", r"2\frac{1}{2}"),
        ("x²+y₁", "x^{2}+y_{1}"),
        ("10⁻³", "10^{-3}"),
        ("4√11+√(2)", r"4\sqrt{11}+\sqrt(2)"),
        (r"{1 \over 2}", r"\frac{1}{2}"),
        (r"\exp(x+(1))+1", "e^{x+(1)}+1"),
        (r"\exp(x", r"\exp(x"),
        ("]-1,2[ \\cup ]3,4]", "(-1,2) \\cup (3,4]"),
        (r"\{x \mid 0 \le x < 1\}", r"0 \le x < 1"),
        (r"\{A:B\}", r"\{A:B\}"),
        ("|x| = 3", r"x=\pm (3)"),
        ("0.(3)", r"\frac{3}{9}"),
        (r"0.\dot{1}2\dot{3}", r"\frac{123}{999}"),
        (r"5^{\text{th}}", "5"),
        (r"\underline{5}6", r"\underline{5}6"),
        ("(101)_2", "101_2"),
        ("1 & 2", "1, 2"),
        ("|v|", "|v|"),
    ],
)
def test_spellings_have_one_normal_form(written: str, usual: str) -> None:
    assert plain_notation(written) == usual
