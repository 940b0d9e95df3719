"""Which workers each rank is told of."""

from __future__ import annotations

from kapelle.cluster.placed import Placed, dealt, placed_here


def test_workers_are_dealt_in_turn() -> None:
    assert dealt(5, 2, 2) == [(2, 4, 6), (3, 5)]
    assert dealt(0, 3, 2) == [(), ()]


def test_a_rank_is_told_by_a_variable() -> None:
    placed = Placed("10.0.0.1:6379", "of this run", "kapelle-1", (2, 4))
    assert placed_here(placed.variable()) == placed
    assert placed_here({"RANK": "0"}) is None
