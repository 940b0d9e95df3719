from __future__ import annotations

import pytest

from kapelle.viewer.pages import cut, one_line, render, shown, spark


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("a\x00b\x7f", "a␀b␡"),
        ("user\u202egnp.exe", "user⟨U+202E⟩gnp.exe"),
        ("a\ud800b", "a⟨U+D800⟩b"),
        ("zero\u200bwidth\ufeff", "zero⟨U+200B⟩width⟨U+FEFF⟩"),
        ("two\r\nlines\tand a tab\r", "two\nlines\tand a tab␍"),
        ("日本語 é 🙂", "日本語 é 🙂"),
    ],
)
def test_what_acts_or_hides_is_seen(text: str, seen: str) -> None:
    assert shown(text) == seen


def test_long_texts_are_cut_and_say_so() -> None:
    assert cut("x" * 30, 20) == f"{'x' * 20} … 10 more characters"
    assert one_line("a\n\n b" * 100, 9) == "a ba ba …"


def test_a_small_curve_stays_in_its_box() -> None:
    points = [tuple(map(float, point.split(","))) for point in spark([1.0, 5.0, 3.0]).split()]
    assert points == [(1.0, 20.0), (48.0, 2.0), (95.0, 11.0)]
    assert spark([1.0]) == ""


def test_markup_in_what_is_shown_is_text() -> None:
    page = render("wrong.html", status=404, message="<script>alert(1)</script>").decode()
    assert "&lt;script&gt;alert(1)" in page
