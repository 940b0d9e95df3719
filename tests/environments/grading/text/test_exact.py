from __future__ import annotations

from kapelle.environments.grading.text.match import grade_exact


def test_needless_spaces_are_ignored() -> None:
    assert grade_exact(r"\boxed{ x + 1 }", "x+1", ["last_box"]).score == 1.0
    assert grade_exact(r"\boxed{x+1}", "X+1", ["last_box"]).score == 0.0
    assert grade_exact(r"\boxed{1+x}", "x+1", ["last_box"]).score == 0.0


def test_space_between_words_and_digits_separates() -> None:
    assert grade_exact(r"\boxed{New   York}", " New York", ["last_box"]).score == 1.0
    assert grade_exact(r"\boxed{NewYork}", "New York", ["last_box"]).score == 0.0
    assert grade_exact(r"\boxed{1 2}", "12", ["last_box"]).score == 0.0
