"""The steps of a worked solution and whether each is right, by hand."""

from __future__ import annotations

import time

import pytest

from kapelle.environments.grading.math.steps import worked_steps


@pytest.mark.parametrize(
    ("question", "solution", "steps"),
    [
        # The first side stands for the question; every sum stands for the side before it.
        ("47+85", "120+12=132", [("120+12", True), ("=132", True)]),
        ("47+85", "120+12=122", [("120+12", True), ("=122", False)]),
        # A carry lost in the first step: the second sum is right by itself, and leads nowhere.
        ("47+85", "110+12=122", [("110+12", False), ("=122", False)]),
        ("7*48", "280+56=336", [("280+56", True), ("=336", True)]),
        # A question in words is worth nothing that a side could be compared with.
        ("How many?", "48/2 = 24 and 48+24 = 70.", [("48/2 = 24", True), (" and 48+24 = 70", False)]),
        ("How many?", "In May <<48/2=24>>24 clips.", [("In May <<48/2=24", True)]),
        ("q", "10/3=3.33, 10/3=3.34", [("10/3=3.33", True), (", 10/3=3.34", False)]),
        ("q", "(1,000+2)*3 = 3006, $5*2=$10, 50%*4=2", [("(1,000+2)*3 = 3006", True), (", $5*2=$10", True), (", 50%*4=2", True)]),
        ("q", "1/0=0", [("1/0=0", False)]),
        ("q", "1, 2+2=4 and then 5=5=6", [("1, 2+2=4", True), (" and then 5=5", True), ("=6", False)]),
        ("47+85", "132", []),
        ("47+85", "", []),
        ("q", "x=5", []),
    ],
)  # fmt: skip
def test_by_hand(question: str, solution: str, steps: list[tuple[str, bool]]) -> None:
    found, place = [], 0
    for step in worked_steps(question, solution):
        found.append((solution[place : step.end], step.right))
        place = step.end
    assert found == steps


@pytest.mark.parametrize("text", ["1" * 20_000, "1+" * 10_000, "(" * 20_000, "1=" * 10_000, "1 " * 10_000])
def test_long_nonsense_is_fast(text: str) -> None:
    start = time.perf_counter()
    worked_steps(text, text)
    assert time.perf_counter() - start < 2.0
