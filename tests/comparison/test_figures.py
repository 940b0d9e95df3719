"""The figure for a paper: reading results, numbers, and files."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kapelle.comparison import plot
from kapelle.comparison.figures import ScoredRun, read_scores, summarise
from kapelle.errors import ConfigError, DataError, OutputError


def compared(folder: Path, scores: Mapping[str, Sequence[float | None]], **more: Any) -> Path:
    """Write the results of a comparison of 10 steps; None is a run that failed."""
    runs = [
        {
            "label": label,
            "seed": seed,
            "error": "EngineError: no room" if score is None else None,
            "success": score,
            "reward": {"ada": 1.0, "ben": -1.0},
            "curve": []
            if score is None
            else [
                {"step": 0, "tokens": 0, "success": 0.1, "reward": {"ada": 0.0, "ben": 0.0}},
                {
                    "step": 10,
                    "tokens": 100 * (1 + seed),
                    "success": score,
                    "reward": {"ada": 1.0, "ben": -1.0},
                },
            ],
        }
        for label, own in scores.items()
        for seed, score in enumerate(own)
    ]
    contenders = [{"label": label, "returns": None, **more} for label in scores]
    folder.mkdir(exist_ok=True)
    (folder / "compare.json").write_text(
        json.dumps({"recipe": folder.name, "contenders": contenders, "runs": runs})
    )
    return folder


def test_a_comparison_is_summarised(tmp_path: Path) -> None:
    folder = compared(tmp_path / "one", {"grpo": [0.4, 0.5, 0.6, 1.0], "rloo": [0.2, 0.5, None, 0.3]})
    [found] = summarise(read_scores([folder]), "tokens", 0)
    assert found.measure == "success"
    assert found.runs == {"grpo": 4, "rloo": 3}
    assert found.means["grpo"][0] == pytest.approx(0.55), "without the lowest and the highest run"
    assert found.means["rloo"][0] == pytest.approx(1 / 3)
    assert found.improvements["grpo", "rloo"][0] == pytest.approx((3 + 3 + 2 + 2.5) / 12)
    first, last = found.curves["one"]["grpo"]
    place, middle, interval = first
    assert place == 0.0
    assert (middle, *interval) == pytest.approx((0.1, 0.1, 0.1))
    assert last[:2] == pytest.approx((250.0, 0.55))
    [over_steps] = summarise(read_scores([folder]), "step", 0)
    assert [place for place, *_ in over_steps.curves["one"]["rloo"]] == [0.0, 10.0]


def test_a_curve_has_the_steps_at_which_all_runs_were_evaluated() -> None:
    def run(*steps: int) -> ScoredRun:
        return ScoredRun(
            "grpo", "one", {"success": 1.0}, [(step, 7.0 * step, {"success": 0.5}) for step in steps]
        )

    [found] = summarise([run(0, 5, 10), run(0, 10)], "tokens", 0)
    assert [place for place, *_ in found.curves["one"]["grpo"]] == [0.0, 70.0]


def test_comparisons_are_tasks_and_a_contender_needs_all(tmp_path: Path) -> None:
    one = compared(tmp_path / "one", {"grpo": [0.4, 0.6], "rloo": [0.1]})
    two = compared(tmp_path / "two", {"grpo": [0.8, 1.0]})
    [found] = summarise(read_scores([one, two]), "tokens", 0)
    assert found.means.keys() == {"grpo"}
    assert found.means["grpo"][0] == pytest.approx(0.7)
    assert found.curves["one"].keys() == {"grpo", "rloo"}


def test_each_role_is_a_measure_of_a_zero_sum_game(tmp_path: Path) -> None:
    compared(tmp_path / "poker", {"grpo": [0.0]}, returns={"ada": {}})
    values = json.loads((tmp_path / "poker" / "compare.json").read_text())
    for run in values["runs"]:
        run["success"] = None
    (tmp_path / "poker" / "compare.json").write_text(json.dumps(values))
    found = summarise(read_scores([tmp_path / "poker"]), "tokens", 0)
    assert [(each.measure, each.means["grpo"][0]) for each in found] == [
        ("return/ada", 1.0),
        ("return/ben", -1.0),
    ]
    again = compared(tmp_path / "other", {"grpo": [0.0]})
    (again / "compare.json").write_text(json.dumps({**values, "recipe": "other"}))
    with pytest.raises(ConfigError, match="different units"):
        summarise(read_scores([tmp_path / "poker", again]), "tokens", 0)
    both = read_scores([tmp_path / "poker", again])
    [seat] = summarise(both, "tokens", 0, "return/ben")
    assert (seat.measure, seat.runs, seat.means["grpo"][0]) == ("return/ben", {"grpo": 2}, -1.0)
    with pytest.raises(ConfigError, match=r"--metric return/adda .* Did you mean 'return/ada'"):
        summarise(both, "tokens", 0, "return/adda")


def test_returns_of_several_tasks_are_drawn_if_set(tmp_path: Path) -> None:
    for task, offset in (("one", 0.0), ("two", 10.0)):
        folder = compared(tmp_path / task, {"grpo": [0.4, 0.6], "rloo": [0.1, 0.2]})
        values = json.loads((folder / "compare.json").read_text())
        for k, run in enumerate(values["runs"]):
            run |= {"success": None, "reward": {"solver": offset + k}, "curve": []}
        (folder / "compare.json").write_text(json.dumps(values))
    folders = [tmp_path / "one", tmp_path / "two"]
    for metric in ("return", "success"):
        [found] = summarise(read_scores(folders), "tokens", 0, metric)
        assert found.measure == "return"
        assert found.improvements["rloo", "grpo"][0] == 1.0, "within each task"
    solved = compared(tmp_path / "three", {"grpo": [0.5], "rloo": [0.5]})
    with pytest.raises(DataError, match="--metric return"):
        summarise(read_scores([tmp_path / "one", solved]), "tokens", 0)


def test_evaluations_are_runs_of_a_team_and_its_baselines(tmp_path: Path) -> None:
    for seed, success in enumerate((0.5, 0.7)):
        alone = {"agents": ["solver"], "answers": 1, "success": 0.25, "reward": {}}
        row = {"environment": "arithmetic", "success": success, "reward": {}, "baselines": [alone]}
        (tmp_path / f"{seed}.json").write_text(json.dumps(row))
    files = [f"ours={tmp_path}/0.json", f"ours={tmp_path}/1.json"]
    [found] = summarise(read_scores(files), "tokens", 0)
    assert {label: mean for label, (mean, _) in found.means.items()} == {
        "ours": pytest.approx(0.6),
        "ours: solver alone": 0.25,
    }
    assert found.improvements["ours", "ours: solver alone"] == (1.0, (1.0, 1.0))


@pytest.mark.slow
def test_all_formats_are_written_reproducibly(tmp_path: Path) -> None:
    folder = compared(tmp_path / "one", {"grpo": [0.4, 0.5], "rloo": [0.2, 0.3]})
    plot(folder, [tmp_path / "a" / f"figure.{form}" for form in ("pdf", "png", "svg")])
    for form, start in (("pdf", b"%PDF-"), ("png", b"\x89PNG"), ("svg", b"<?xml")):
        assert (tmp_path / "a" / f"figure.{form}").read_bytes().startswith(start)
    plot(folder, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_bytes() == (tmp_path / "a" / "figure.svg").read_bytes()
    assert "grpo &gt; rloo" in (tmp_path / "a" / "figure.svg").read_text()


def test_errors_of_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    folder = compared(tmp_path / "one", {"grpo": [0.4]})
    with pytest.raises(ConfigError, match="jpg"):
        plot(folder, tmp_path / "figure.jpg")
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(DataError, match="contains no results"):
        plot(tmp_path / "other.json", tmp_path / "figure.svg")
    with pytest.raises(DataError, match="no finished run"):
        plot(compared(tmp_path / "two", {"grpo": [None]}), tmp_path / "figure.svg")
    with pytest.raises(OutputError, match="Use another --output"):
        plot(folder, tmp_path / "other.json" / "figure.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'kapelle\[plot\]'"):
        plot(tmp_path / "missing", tmp_path / "figure.svg")
