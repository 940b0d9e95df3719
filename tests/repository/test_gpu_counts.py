"""Estimates of GPU work are what their formula makes of the counts."""

from __future__ import annotations

import pytest
from benchmarks.gpu import compare
from benchmarks.gpu_counts import Card, estimate, plus, whole
from benchmarks.gpu_work import SHAPES, lengths

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


def test_uneven_turns_are_about_as_long_as_even_ones() -> None:
    even, uneven = (sorted(n for row in lengths(256, even=kind) for n in row) for kind in (True, False))
    assert set(even) == {32}
    assert 28 <= uneven[len(uneven) // 2] <= 36
    assert 1 <= uneven[0] < 8
    assert 150 < uneven[-1] <= 192


def test_what_was_measured_stands_beside_its_estimates() -> None:
    measured = {
        "environment": {"card": "NVIDIA H100 80GB HBM3", "torch": "2.13.0"},
        "constants": {"launch": 1e-5, "kernel": 2e-6, "gb_s": 1000.0, "tflop_s": 100.0},
        "models": {
            "0.6B, 2 agents": {"decode": {"seconds": 0.123}, "step": {"out of memory": "CUDA out of memory"}}
        },
    }
    lines = compare(measured, {"now": {"0.6B, 2 agents": {"decode": COUNTS}}}).splitlines()
    decode = next(line for line in lines if "decode" in line)
    by_maker = 0.0006 + 0.001 + 0.00004 + 4 / 3350 + 5 / 989
    assert decode.split()[-3:] == ["123.00", f"{1e3 * by_maker:.2f}", "57.04"]
    assert any("step" in line and "out of memory" in line for line in lines)
