from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.viewed_runs import write_run

from kapelle.viewer.curves import Source, color, grouped, page, source_of
from kapelle.viewer.library import Library
from kapelle.viewer.presenting import alike, differing


def source(label: str, *values: float | None) -> Source:
    steps = [float(k + 1) for k in range(len(values))]
    return Source(label, label, dict.fromkeys(("step", "time", "tokens"), steps), {"reward/a": values})


def test_a_group_is_its_median_and_quartiles() -> None:
    runs = [source("a", 1.0, 5.0), source("b", 2.0, 6.0), source("c", 9.0)]
    (one,) = grouped([("all", each) for each in runs])
    assert one.label == "all, median of 3"
    assert one.columns["reward/a"] == [2.0, 5.5]
    assert (one.low["reward/a"], one.high["reward/a"]) == ([1.5, 5.25], [5.5, 5.75])


def test_a_run_alone_is_no_group() -> None:
    (one,) = grouped([("all", source("a", 1.0))])
    assert one.label == "a"
    assert not one.low


def test_panels_are_families_with_a_curve_for_each_agent(tmp_path: Path) -> None:
    write_run(tmp_path / "r")
    (run,) = Library([tmp_path]).runs()
    drawn = page([source_of(run)], ["solver", "critic"])
    panels = {panel["name"]: panel for section in drawn["sections"] for panel in section["panels"]}
    assert [series["who"] for series in panels["reward"]["series"]] == ["solver", "critic"]
    assert panels["success"]["meaning"]
    assert "time/update" not in panels
    (bands,) = drawn["times"]
    assert [band["name"] for band in bands["bands"]] == ["generate", "update", "idle"]
    assert bands["bands"][1]["top"][0] == pytest.approx(0.5)
    assert drawn["sources"][0]["evaluations"][0]["at"] == {"step": 8, "time": 4.0, "tokens": 800.0}


def test_an_agent_has_one_color_everywhere() -> None:
    assert color("critic", ["solver", "critic"]) == color("part/critic", ["solver", "critic"]) == 2
    assert color("", ["solver"]) == 0


def test_runs_that_differ_by_seed_alone_are_alike(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {"a": {}, "b": {"seed": 1}, "c": {"lr": 0.1}}
    for name, settings in cases.items():
        write_run(tmp_path / name, steps=1, **settings)
    a, b, c = sorted(Library([tmp_path]).runs(), key=lambda run: run.key)
    assert alike(a) == alike(b) != alike(c)
    assert {row["name"]: row["values"] for row in differing([a, b, c])} == {
        "seed": [0, 1, 0],
        "optimizer.lr": [0.001, 0.001, 0.1],
    }
