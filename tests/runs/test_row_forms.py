"""A flipped bit of a row raises DataError with its place, or every reader still accepts the row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kapelle.errors import DataError
from kapelle.runs.reader import read_evaluations, read_metrics
from kapelle.runs.summary import last_evaluation, telling
from kapelle.training.console import judged, point_of

METRICS = {"step": 3, "return/solver": 0.25, "success": 0.5, "time/step": 1.5, "tokens/solver": 12.0}
PLAYED = {
    "step": 3,
    "problems": 8,
    "success": 0.5,
    "interval": [0.2, 0.8],
    "reward": {"solver": 0.5},
    "tokens": 12.5,
    "scored": 8,
    "failed": 0,
    "reason": "",
    "parts": {"seen": {"success": 0.5, "scored": 4, "problems": 4}},
    "games": True,
    "part_reward": {"kuhn": {"solver": 0.5}},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("config.yaml", "lock", "metrics.jsonl", "evaluations.jsonl"):
        (tmp_path / name).write_text("")
    return tmp_path


def flipped(row: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the row's line once for each bit, with that bit flipped."""
    line = json.dumps(row).encode() + b"\n"
    for place in range(0, 8 * (len(line) - 1), 5):  # 5 and 8 share no factor: all eight places occur
        turned = bytearray(line)
        turned[place // 8] ^= 1 << place % 8
        yield bytes(turned)


def of_metrics(run: Path) -> None:
    for row in read_metrics(run):
        telling(row)


def of_evaluations(run: Path) -> None:
    for row in read_evaluations(run):
        point = point_of(row)
        point.text(), point.counts(), point.verifier and judged(point.verifier)
    last_evaluation(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row", "read"),
    [
        ("metrics.jsonl", METRICS, of_metrics),
        ("evaluations.jsonl", PLAYED, of_evaluations),
    ],
    ids=["metrics", "evaluation"],
)
def test_a_flipped_bit_of_a_row_breaks_no_reader(
    run: Path, name: str, row: Mapping[str, Any], read: Callable[[Path], None]
) -> None:
    refused = taken = 0
    lines = list(flipped(row))
    for line in lines:
        (run / name).write_bytes(line)
        try:
            read(run)
        except DataError as error:
            refused += f"{name}, line 1 is damaged" in str(error)
        else:
            taken += 1
    assert refused + taken == len(lines)
    assert min(refused, taken) > 0


@pytest.mark.parametrize("missing", ["step", "problems", "success", "interval", "reward"])
def test_an_evaluation_without_a_required_field_is_damaged(run: Path, missing: str) -> None:
    old = {name: PLAYED[name] for name in ("step", "problems", "success", "interval", "reward")}
    (run / "evaluations.jsonl").write_text(json.dumps(old) + "\n")
    assert read_evaluations(run) == [old]
    del old[missing]
    (run / "evaluations.jsonl").write_text(json.dumps(old) + "\n")
    with pytest.raises(DataError, match=missing):
        read_evaluations(run)
