from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.support.viewed_runs import write_run

from kapelle.services.binding import Binding
from kapelle.services.http import HttpServer
from kapelle.viewer import curves
from kapelle.viewer.curves import CurveSource, grouped, page, source_of
from kapelle.viewer.library import Library
from kapelle.viewer.server import viewer


def source(label: str, *values: float | None) -> CurveSource:
    steps = [float(k + 1) for k in range(len(values))]
    return CurveSource(label, label, dict.fromkeys(("step", "time", "tokens"), steps), {"reward/a": values})


def test_a_group_is_its_median_and_quartiles() -> None:
    runs = [source("a", 1.0, 5.0), source("b", 2.0, 6.0), source("c", 9.0)]
    (one,) = grouped([("all", each) for each in runs])
    assert one.label == "all, median of 3"
    assert one.columns["reward/a"] == [2.0, 5.5]
    assert (one.low["reward/a"], one.high["reward/a"]) == ([1.5, 5.25], [5.5, 5.75])


def test_a_group_is_its_mean_with_students_interval() -> None:
    runs = [source("a", 1.0, 5.0, None), source("b", 2.0, 6.0), source("c", 9.0, 7.0)]
    (one,) = grouped([("all", each) for each in runs], "mean")
    assert one.label == "all, mean of 3"
    assert one.columns["reward/a"] == [4.0, 6.0, None]
    # t for 2 degrees of freedom is 4.3027: half of the interval is t times the deviation over the root of 3.
    assert one.low["reward/a"] == [
        pytest.approx(4 - 4.302653 * 19**0.5 / 3**0.5),
        pytest.approx(6 - 4.302653 / 3**0.5),
        None,
    ]
    assert one.high["reward/a"][1] == pytest.approx(6 + 4.302653 / 3**0.5)
    (two,) = grouped([("all", source("a", 1.0, 5.0)), ("all", source("b", 2.0))], "mean")
    assert (two.columns["reward/a"], two.low["reward/a"][1]) == ([1.5, 5.0], None), "one run has no interval"


def test_runs_of_different_lengths_are_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "POINTS", 4)
    lengths = {"a": (10, 0), "b": (7, 1), "c": (3, 2)}
    for name, (steps, seed) in lengths.items():
        write_run(tmp_path / name, steps=steps, seed=seed)
    library = Library([tmp_path])
    keys = "&".join(f"run={name}" for name in lengths)
    with HttpServer(Binding(), viewer(library, Binding())) as site:
        drawn = httpx.get(f"{site.url}/curves.json?{keys}&by=seed&spread=median").json()
    (one,) = drawn["sources"]
    panels = {panel["name"]: panel for section in drawn["sections"] for panel in section["panels"]}
    (reward, *_) = panels["reward"]["series"]
    assert one["axes"]["step"] == [3, 6, 8, 10], (
        "three steps to a point; the last one of `b` is of step 7 alone"
    )
    # (k + 1) / 20 for k of a stretch: steps 1 to 3 are 0.1 in the mean, 4 to 6 0.25; 7 to 9 are 0.4, of which b has 0.35.
    assert reward["y"] == pytest.approx([0.1, 0.25, 0.375, 0.5])


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
