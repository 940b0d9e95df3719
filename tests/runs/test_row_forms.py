"""One bit of a row has turned: the row is refused by its place, or every reader still takes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import sections

from kapelle.comparison.contenders import Run
from kapelle.comparison.results import held_out, sampled, seats_of, unscored
from kapelle.errors import DataError
from kapelle.runs.reader import read_evaluations, read_metrics
from kapelle.runs.summary import last_evaluation, telling
from kapelle.setup.recipe import Recipe, resolve
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
JUDGED = PLAYED | {
    "success": None,
    "interval": None,
    "verifier": {"auc": 0.7, "auc_within": 0.7, "interval_within": [0.6, 0.8], "bins": [[0.1, 0.2, 3]]},
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    for name in ("config.yaml", "lock", "metrics.jsonl", "evaluations.jsonl"):
        (tmp_path / name).write_text("")
    return Run("one", Recipe(resolve(sections()), {}), tmp_path)


def flipped(row: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the row's line with each of its bits turned, in turn."""
    line = json.dumps(row).encode() + b"\n"
    for place in range(8 * (len(line) - 1)):
        turned = bytearray(line)
        turned[place // 8] ^= 1 << place % 8
        yield bytes(turned)


def of_metrics(run: Run) -> None:
    for row in read_metrics(run.path):
        telling(row)
    sampled(run), sampled(run, "solver")


def of_evaluations(run: Run) -> None:
    for row in read_evaluations(run.path):
        point = point_of(row)
        point.text(), point.counts(), point.verifier and judged(point.verifier)
    held_out(run), unscored([run]), seats_of([run]), last_evaluation(run.path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row", "read"),
    [
        ("metrics.jsonl", METRICS, of_metrics),
        ("evaluations.jsonl", PLAYED, of_evaluations),
        ("evaluations.jsonl", JUDGED, of_evaluations),
    ],
    ids=["metrics", "evaluation", "judgement"],
)
def test_no_bit_of_a_row_breaks_a_reader(
    run: Run, name: str, row: Mapping[str, Any], read: Callable[[Run], None]
) -> None:
    refused = taken = 0
    lines = list(flipped(row))
    for line in lines:
        (run.path / name).write_bytes(line)
        try:
            read(run)
        except DataError as error:
            refused += f"{name}, line 1 is damaged" in str(error)
        else:
            taken += 1
    assert refused + taken == len(lines)
    assert refused > taken > 0  # a digit may be another digit; a name may not be another name


@pytest.mark.parametrize("missing", ["step", "problems", "success", "interval", "reward"])
def test_an_evaluation_without_what_every_version_wrote_is_damaged(run: Run, missing: str) -> None:
    old = {name: PLAYED[name] for name in ("step", "problems", "success", "interval", "reward")}
    (run.path / "evaluations.jsonl").write_text(json.dumps(old) + "\n")
    assert read_evaluations(run.path) == [old]
    del old[missing]
    (run.path / "evaluations.jsonl").write_text(json.dumps(old) + "\n")
    with pytest.raises(DataError, match=f"evaluations.jsonl, line 1 is damaged: it has no '{missing}'"):
        read_evaluations(run.path)


def test_counts_of_agents_do_not_crowd_out_what_is_told() -> None:
    row = {
        "samples": 8.0,
        "scored": 8.0,
        "success": 0.5,
        "samples/a": 256.0,
        "reward/a": 1.0,
        "failed_episodes": 0.0,
    }
    assert telling(row) == {"success": 0.5, "reward/a": 1.0}
    assert telling({**row, "scored": 6.0}) == {
        "success": 0.5, "scored": 6.0, "samples": 8.0, "failed_episodes": 0.0, "reward/a": 1.0
    }  # fmt: skip
