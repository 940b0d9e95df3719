from __future__ import annotations

import pytest

from kapelle.grading.code.arguments import change, changeable, classes
from kapelle.grading.code.likeness import Made


@pytest.mark.parametrize(
    ("program", "names"),
    [
        ("k = f(xs)\nassert xs[:k] == [1, 2]", {"xs"}),
        ("k = f(xs)\nassert len(xs) == 2 and list(xs) == [1, 2]", {"xs"}),
        ("got = f(xs)\nassert got == sorted(xs)", set()),
        ("got = f(xs)\nassert got == xs", set()),
        ("got = f(xs)\nassert got == expected(xs)", set()),
        ("got = f(xs)\nassert got == 3 * xs[0]", set()),
        ("got = f(xs)\nfor x in xs:\n    assert x in got", set()),
    ],
)
def test_an_argument_may_change_where_nothing_is_worked_out_from_it(program: str, names: set[str]) -> None:
    assert changeable(program, {"expected", "xs", "got", "k", "x"}) == names


def test_what_is_given_to_calls_or_compared_with_them_is_a_class() -> None:
    assert classes("assert add(P(1), P(2)) == P(3)\nassert Largest([1]) == 1", ()) == {"P"}


def test_a_container_is_changed_in_place_as_deep_as_both_go() -> None:
    row = [1]
    grid = [row, {"a": 1}]
    change(grid, [[2, 3], {"b": 4}])
    assert grid == [[2, 3], {"b": 4}]
    assert row == [2, 3]


def test_a_state_tells_what_was_made_where_nobody_else_can_be_in_it() -> None:
    made = Made()
    made.add(["P", {"values": [1, 2]}], (2, 1))
    assert made.tells(["P", {"x": 4, "y": 6}], (4, 6))
    assert not made.tells(["P", {"x": 6, "y": 4}], (4, 6))
    assert not made.tells(["P", {"x": 4}], (4, 6))
    assert not made.tells(["P", {"values": [1, 2]}], (1, 2)), "P(2, 1) is the same"
    assert not made.tells(["P", {"values": list(range(20))}], (4, 6)), "anything is"
    assert not made.tells(["P", {}], ())
