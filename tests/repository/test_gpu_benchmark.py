"""The benchmark for a GPU at a small size on a CPU: each part runs, writes each result at once, and is stopped in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu
from benchmarks.gpu_counts import KEPT

HERE = gpu.At("cpu", small=True)


def test_the_limits_add_up_to_fifteen_minutes() -> None:
    parts = gpu.parts(gpu.GPU)
    assert sum(part.limit for name, part in parts.items() if name not in gpu.NAMED_ONLY) <= 15 * 60
    assert list(parts) == ["machine", "correctness", "models", "steps", "long", "mismatch", "more"]


@pytest.mark.slow
def test_a_part_that_exceeds_its_limit_is_stopped_and_the_next_one_starts(tmp_path: Path) -> None:
    found = gpu.run(HERE, ["long", "mismatch"], tmp_path / "found.json", limit=0.01)
    assert {name: part["ended"] for name, part in found["parts"].items()} == dict.fromkeys(
        ("machine", "long", "mismatch"), "stopped after 0.01 s"
    )


def test_what_fails_is_said_and_does_not_stop_the_rest() -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("a kernel failed\nat an address")

    assert gpu._tried(fails, "cpu") == {"failed": "RuntimeError: a kernel failed"}
    assert gpu._tried(lambda: {"seconds": 1.0}, "cpu") == {"seconds": 1.0}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's
def test_every_part_measures_what_it_names(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    out.write_text("{}", "utf-8")
    for name in gpu.parts(HERE):
        gpu.run_part(name, "cpu", "1", str(out))
    found = json.loads(out.read_text("utf-8"))
    for part in gpu.parts(HERE).values():
        for place in part.works:
            measured: Any = found
            for each in place:
                measured = measured[each]
            assert measured, place
            assert "failed" not in measured, place
    assert (
        max(each["largest"] for each in found["kernels"].values()) == 0
    )  # the same operations on both sides
    for depth in found["mismatch"]["tiny"].values():
        assert 0 <= depth["kl, not negative"] < 1e-2
        assert depth["entropy"] > 0.1
    assert "conversations, even" in gpu.compare(found, json.loads(KEPT.read_text("utf-8")))
