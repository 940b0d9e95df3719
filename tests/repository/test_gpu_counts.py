"""Estimates of GPU work are what their formula makes of the counts."""

from __future__ import annotations

import pytest
from benchmarks.gpu_counts import KEPT, Card, estimate, plus, table, whole
from benchmarks.gpu_work import SHAPES

COUNTS = {
    "launches": 100,
    "replays": 1,
    "kernels": 1000,
    "waits": 2,
    "copies": 3,
    "bytes": 4e9,
    "flops": 5e12,
}


def test_an_estimate_adds_launches_kernels_waits_bytes_and_operations() -> None:
    # 100 x 6 us + 1000 x 1 us + 2 x 20 us + 4 GB at 1000 GB/s + 5 TFLOP at 100 TFLOP/s
    assert estimate(COUNTS, Card(1000, 100, "")) == pytest.approx(0.0006 + 0.001 + 0.00004 + 0.004 + 0.05)
    # Of a card's own: 100 x 10 us + 1000 x 2 us
    own = estimate(COUNTS, Card(1000, 100, ""), 1e-5, 2e-6)
    assert own == pytest.approx(0.001 + 0.002 + 0.00004 + 0.004 + 0.05)


def test_a_whole_model_is_its_layers_and_the_rest() -> None:
    found = whole(lambda shape: {"launches": 7 + 11 * shape.layers}, SHAPES["0.6B"])
    assert found == {"launches": 7 + 11 * 28}
    assert plus({"a": 5}, {"a": 2}, -2) == {"a": 1}
