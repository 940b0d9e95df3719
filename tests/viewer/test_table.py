from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kapelle.viewer.library import MetricTable
from kapelle.viewer.lines import Tail


def write(run: Path, *rows: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_columns_are_as_long_as_the_run_whatever_a_step_lacks(tmp_path: Path) -> None:
    table = MetricTable(Tail(tmp_path / "metrics.jsonl"))
    write(tmp_path, {"step": 1, "a": 1.0}, {"step": 2, "b": 2.0}, {"step": 3, "a": "x", "b": True})
    table.refresh()
    assert table.columns == {"a": [1.0, None, None], "b": [None, 2.0, None]}
    assert table.last() == {}


def test_time_and_tokens_add_up(tmp_path: Path) -> None:
    table = MetricTable(Tail(tmp_path / "metrics.jsonl"))
    write(
        tmp_path,
        {"step": 1, "time/step": 2.0, "tokens/a": 10.0, "tokens/b": 5.0},
        {"step": 2, "time/step": 3.0},
    )
    table.refresh()
    assert table.axes == {"step": [1, 2], "time": [2, 5], "tokens": [15, 15]}


def test_rows_that_were_taken_back_are_forgotten(tmp_path: Path) -> None:
    table = MetricTable(Tail(tmp_path / "metrics.jsonl"))
    write(tmp_path, {"step": 1, "a": 1.0}, {"step": 2, "a": 2.0})
    table.refresh()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}\n')
    table.refresh()
    assert table.columns == {"a": [1.0]}


def thinned(
    steps: list[float], values: list[float | None], width: int
) -> tuple[list[float], list[float | None]]:
    axes = {"step": steps, "time": steps, "tokens": steps}
    table = MetricTable(Tail(Path("absent")), columns={"a": values}, axes=axes)
    ends, means = table.thinned(width)
    return ends["step"], means["a"]


def test_a_long_curve_becomes_means_of_stretches() -> None:
    steps = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert thinned(steps, [1.0, 3.0, 4.0, 8.0, 7.0], 2) == ([2, 4, 5], [2.0, 6.0, 7.0])
    assert thinned(steps, [1.0, 3.0, None, 8.0, None], 2) == ([2, 4, 5], [2.0, 8.0, None])
    assert thinned([1.0, 2.0], [None, 1.0], 1) == ([1, 2], [None, 1.0])
    assert thinned([1.0, 1.0], [2.0, 1.0], 1) == ([1, 1], [2.0, 1.0]), "rows of one step stay apart"
    assert thinned([3.0, 4.0, 5.0], [1.0, 2.0, 4.0], 2) == ([4, 5], [1.5, 4.0]), (
        "cut at the same steps as a run that begins at 1"
    )
    assert thinned([], [], 2) == ([], [])
