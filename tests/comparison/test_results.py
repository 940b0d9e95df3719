"""The results of a comparison: medians and quartiles over the finished runs."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.support.tiny import sections

from kapelle.comparison.contenders import Contender, Run, plan, read_contenders
from kapelle.comparison.results import (
    Measured,
    legend,
    measure,
    standings,
    table,
    write_results,
)
from kapelle.functional.statistics import Quartiles
from kapelle.setup.recipe import load_recipe


@pytest.fixture
def contenders(tmp_path: Path) -> tuple[Contender, ...]:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(sections(evaluation={"problems": 4})))
    return read_contenders(load_recipe(str(tmp_path / "tiny.yaml")), ["grpo", "rloo"])


def measured(label: str, seed: int, success: float, reward: dict[str, float], tokens: float) -> Measured:
    where = f"{label}/seed-{seed}"
    return Measured(label, seed, where, None, success, reward, tokens, 1.5, scored=99, problems=100, failed=1)


RUNS = [
    measured("grpo", 0, 0.1, {"ada": 1.0, "ben": 3.0}, 100.0),
    measured("grpo", 1, 0.9, {"ada": 5.0, "ben": 7.0}, 140.0),
    measured("grpo", 2, 0.5, {"ada": 0.0, "ben": 0.0}, 120.0),
    Measured("rloo", 0, "rloo/seed-0", "EngineError: no room"),
]


def test_a_row_has_medians_and_quartiles_of_finished_runs(contenders: tuple[Contender, ...]) -> None:
    grpo, rloo = standings(contenders, RUNS)
    assert (grpo.runs, grpo.failed) == (3, 0)
    assert grpo.success is not None
    assert (grpo.success.low, grpo.success.median, grpo.success.high) == pytest.approx((0.3, 0.5, 0.7))
    assert grpo.mean_return == Quartiles(1.0, 2.0, 4.0)
    assert grpo.tokens == Quartiles(110.0, 120.0, 130.0)
    assert (rloo.runs, rloo.failed, rloo.success, rloo.tokens) == (0, 1, None, None)
    head, first, second = table([grpo, rloo])
    assert head.split() == ["algorithm", "seeds", "success", "scored", "return", "tokens", "seconds"]
    cells = [
        "grpo",
        "3",
        "0.500 [0.300, 0.700]",
        "297 of 300, 3 failed",
        "2.000 [1.000, 4.000]",
        "120",
        "1.5",
    ]
    assert re.split(r"\s{2,}", first) == cells
    assert first.index("0.500") == head.index("success")
    assert second.split() == ["rloo", "0", "of", "1", "–", "–", "–", "–", "–"]


def test_runs_without_a_success_are_compared_by_return(contenders: tuple[Contender, ...]) -> None:
    paid = [replace(run, success=None, scored=0, failed=1) for run in RUNS[:3]]
    found = standings(contenders, paid)
    head, first, _ = table(found)
    assert head.split() == ["algorithm", "seeds", "played", "return", "tokens", "seconds"]
    assert re.split(r"\s{2,}", first)[2:4] == ["297 of 300, 3 failed", "2.000 [1.000, 4.000]"]
    assert "success" not in legend(found)
    assert "success" in legend(standings(contenders, RUNS))


def test_the_files_hold_every_run(contenders: tuple[Contender, ...], tmp_path: Path) -> None:
    folder = tmp_path / "all"
    result = write_results(folder, "tiny", contenders, RUNS)
    assert json.loads((folder / "compare.json").read_text()) == json.loads(json.dumps(result))
    assert result["budget"] == {"steps": 3, "tasks_per_step": 2, "episodes_per_task": 3}
    assert [run["mean_return"] for run in result["runs"]] == [2.0, 6.0, 0.0, None]
    rows = list(csv.DictReader(io.StringIO((folder / "compare.csv").read_text())))
    assert [(row["return/ada"], row["return/ben"]) for row in rows[:2]] == [("1.0", "3.0"), ("5.0", "7.0")]
    assert [rows[0][name] for name in ("scored", "problems", "failed")] == ["99", "100", "1"]
    assert (rows[3]["success"], rows[3]["error"]) == ("", "EngineError: no room")


ROW = {"problems": 4, "interval": None}


def recorded(run: Run, evaluations: list[object], metrics: list[object], state: str, step: int) -> None:
    run.path.mkdir(parents=True)
    (run.path / "config.yaml").write_text("{}")
    (run.path / "lock").touch()
    for name, rows in (("evaluations", evaluations), ("metrics", metrics)):
        (run.path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    status = {"state": state, "phase": "", "step": step, "pid": 1, "host": "x", "started": "", "updated": ""}
    (run.path / "status.json").write_text(json.dumps(status))


def test_a_run_is_measured_by_its_last_evaluation(contenders: tuple[Contender, ...], tmp_path: Path) -> None:
    done, unsolvable, stopped, never = plan(contenders, 2, tmp_path / "all")
    recorded(
        done,
        [
            {**ROW, "scored": 3, "failed": 1, "step": s, "success": s / 4, "reward": {"ada": s, "ben": 0.0}}
            for s in (0, 3)
        ],
        [{"step": s, "success": 0.5, "tokens/ada": 10, "tokens/ben": 2, "time/step": 0.5} for s in (1, 2, 3)],
        "finished",
        3,
    )
    recorded(
        unsolvable,
        [{**ROW, "step": s, "success": None, "reward": {"ada": 1.0 + s, "ben": 0.0}} for s in (0, 3)],
        [{"step": s, "return/ada": 1.0, "return/ben": 2.0, "time/step": 1.0} for s in (1, 2, 3)],
        "finished",
        3,
    )
    recorded(stopped, [{**ROW, "step": 0, "success": 0.25, "reward": {}}], [], "interrupted", 1)
    first = measure(done, tmp_path / "all")
    assert (first.success, first.reward, first.tokens, first.seconds) == (
        0.75,
        {"ada": 3, "ben": 0.0},
        36,
        1.5,
    )
    assert [(each["scored"], each["problems"], each["failed"]) for each in first.curve] == [(3, 4, 1)] * 2
    assert [(each["step"], each["tokens"]) for each in first.curve] == [(0, 0), (3, 3 * 12)]
    assert first.reason == ""
    few = tmp_path / "all" / "few"
    recorded(
        replace(done, path=few),
        [{**ROW, "step": 3, "success": 0.5, "reward": {}, "fewer": "all of its test split"}],
        [],
        "finished",
        3,
    )
    assert (
        measure(replace(done, path=few), tmp_path / "all").reason
        == "evaluated on 4 problems: all of its test split"
    )
    assert measure(stopped, tmp_path / "all").error == "not finished"
    assert measure(never, tmp_path / "all").error == "not finished"
