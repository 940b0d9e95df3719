from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.patience import timed

from kapelle.environments.grading.math.algebra import TooLarge
from kapelle.environments.grading.math.answers import read_answer
from kapelle.environments.grading.math.expression import Unfamiliar, Unreadable
from kapelle.environments.grading.math.sameness import Percent, same_answer


def same(one: str, other: str, percent: Percent = "figure") -> bool:
    left, right = read_answer(one), read_answer(other)
    verdict = same_answer(left, right, percent)
    assert same_answer(right, left, percent) is verdict, "sameness is symmetric"
    assert same_answer(left, left)
    assert same_answer(right, right)
    return verdict


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("0.5", r"\frac12"),
        ("1,234.50", r"1234\frac12"),
        ("2 1/3", r"\frac73"),
        (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"),
        (r"\sqrt{72}", r"6\sqrt{2}"),
        (r"\sqrt{-4}", "2i"),
        (r"(1+i)^2", "2i"),
        (r"\frac{1}{1+\sqrt2}", r"\sqrt2-1"),
        (r"(x+1)(x-1)", "x^2-1"),
        (r"\frac{x^2-1}{x-1}", "x+1"),
        (r"4^{1/2}", "2"),
        ("5!", "120"),
        (r"\binom{5}{2}", "10"),
        (r"2\pi r", r"r \cdot 2\pi"),
        ("x=5", "5"),
        ("y=2x+1", "2x-y+1=0"),
        (r"\pm 2", "2,-2"),
        (r"1\pm\sqrt{2}", r"1-\sqrt2, 1+\sqrt2"),
        ("1,2,3", "3, 1 \\text{ and } 2"),
        (r"\{1,2,2\}", r"\{2,1\}"),
        (r"\{1,2\}", "2,1"),
        ("(1, 2)", r"\left(1,\frac{4}{2}\right)"),
        ("[0,1)", r"\left[0,1\right)"),
        (r"(-\infty,0]\cup[1,\infty)", r"[1,\infty) \cup (-\infty, 0]"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
        (r"\text{Evelyn}", "evelyn"),
        (r"\text{(C)}", "C"),
        ("45^\\circ", r"\frac{\pi}{4}"),
        ("45^\\circ", "45"),
        (r"5\text{ cm}^2", "5"),
        (r"12\%", "12"),
        ("1012_3", "1012_{3}"),
        (r"x \in [1,2]", "[1,2]"),
        (r"\emptyset", r"\{\}"),
        ("$5$", r"\(5\)"),
    ],
)
def test_the_same(one: str, other: str) -> None:
    assert same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1.234", "1,234"),
        ("1,2", "1.2"),
        ("0.333", "1/3"),
        (r"\sqrt2", "1.41421356237309504880"),
        (r"\pi", "3.14159265358979"),
        ("x+1", "x-1"),
        ("x", "y"),
        ("x=5", "y=5"),
        ("5+0*x", "5"),
        ("5x/x", "5"),
        ("x+2y=3", "x+2y+z-z=3"),
        ("5=5", "5"),
        ("0=0", "x=5"),
        ("2,1,1", "1,2"),
        (r"\{1,2\}", "1,2,2"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "1,2"),
        (r"\pm 5", "5"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", "(1,2)"),
        ("101_2", "5"),
        ("101_2", "101_3"),
        ("5 cm", "5 m"),
        ("5 million", "5"),
        (r"\$5", "€5"),
        (r"\pi/4^\circ", r"\pi/4"),
        ("True", "1"),
        ("oo", r"\infty"),
        ("all real numbers", "5"),
    ],
)
def test_not_the_same(one: str, other: str) -> None:
    assert not same(one, other)


def test_a_percentage_is_its_figure_or_hundredths() -> None:
    assert same(r"50\%", "50")
    assert not same(r"50\%", "0.5")
    assert same(r"50\%", "0.5", "hundredths")
    assert not same(r"50\%", "50", "hundredths")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "x=",
            "1,,2",
            "1+",
            "*5",
            r"\frac12 3",
            r"\frac123",
            "1/2x",
            "2 3",
            "2^3^4",
        ),
        *(
            "((((",
            "(5",
            "5)",
            "{5",
            "[1,2",
            r"\sqrt 25",
            r"2\frac32",
            "5!!",
            "x=5=6",
            r"1\pm2\pm3",
            r"\frac{1}{0}",
        ),
        *(
            "0/0",
            "0^0",
            "0^{-1}",
            "9^{9^9}",
            "2**(10**10)",
            "21!",
            "1e99",
            "x^{100}",
            "(a+b+c+d+e)^{60}",
            "7_3",
        ),
        *("9" * 300, "(" * 200, "-" * 300, "1+" * 199 + "1+1", ",".join("1" * 33), "{" * 30 + "5" + "}" * 30),
        *("5" + " " * 400, "12_1", r"\binom{999}{3}", r"(1+1/9999999999999999999)^{50}"),
    ],
    ids=lambda text: repr(text[:24]),
)
def test_texts_that_must_not_be_read_as_answers(text: str) -> None:
    def refuse() -> None:
        with pytest.raises(Unreadable):
            read_answer(text)

    assert timed(refuse, 0.5)[1] < 0.5


@pytest.mark.parametrize(
    "text",
    [
        *(
            r"\sin x",
            "x+y>5",
            "x > 5 > y",
            r"\sqrt[3]{2}",
            "2^x",
            "x^{1/2}",
            "f(2)",
            r"\log_2 8",
            "x^2=4, y=2",
            "12:00",
            "１",
        ),
        *(
            "__import__('os')",
            "[x for x in y]",
            "lambda: 5",
            r"x=1, y=2, x=3",
            r"\cos 20^\circ",
        ),
        r"\sqrt{99999999999}",
    ],
)
def test_notation_for_another_reader(text: str) -> None:
    with pytest.raises(Unfamiliar):
        read_answer(text)


EXPRESSIONS = st.recursive(
    st.sampled_from(["1", "2", "3", "10", "0.5", "x", "y", r"\pi", r"\sqrt{2}", r"\sqrt{3}", "i"]),
    lambda inner: st.one_of(
        st.builds("({}+{})".format, inner, inner),
        st.builds("({}-{})".format, inner, inner),
        st.builds(r"{}\cdot {}".format, inner, inner),
        st.builds(r"\frac{{{}}}{{{}}}".format, inner, inner),
        st.builds("({})^{{2}}".format, inner),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS, EXPRESSIONS)
def test_algebraic_identities_hold(one: str, other: str) -> None:
    identities = [
        (f"({one})+({other})", f"({other})+({one})"),
        (f"({one})({other})", f"({other})({one})"),
        (f"(({one})+({other}))^2", f"({one})^2+2({one})({other})+({other})^2"),
        (f"(({one})+({other}))(({one})-({other}))", f"({one})^2-({other})^2"),
    ]
    for left, right in identities:
        try:
            assert same(left, right)
        except (Unreadable, TooLarge):
            continue


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_the_order_counts_in_points_and_not_in_lists(values: list[int], random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = (", ".join(map(str, each)) for each in (values, shuffled))
    assert same(one, other)
    assert same(rf"\{{{one}\}}", rf"\{{{other}\}}")
    assert same(f"({one})", f"({other})") is (values == shuffled)


@given(st.fractions(-100, 100, max_denominator=30), st.fractions(-100, 100, max_denominator=30))
def test_fractions_are_the_same_when_they_are(one: object, other: object) -> None:
    assert same(rf"\frac{{{one}}}{{1}}", str(other)) is (one == other)
