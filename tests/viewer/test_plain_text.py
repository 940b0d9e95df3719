from __future__ import annotations

import pytest

from kapelle.viewer.pages import render, shown


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


def test_markup_in_what_is_shown_is_text() -> None:
    page = render("wrong.html", status=404, message="<script>alert(1)</script>").decode()
    assert "&lt;script&gt;alert(1)" in page
