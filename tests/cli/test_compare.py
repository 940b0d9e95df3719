"""`kapelle compare`: one table and one folder, continued where it stopped; a failed run stops no other."""

from __future__ import annotations

import csv
import json
import multiprocessing
from pathlib import Path
from statistics import median

import pytest
import yaml
from tests.cli.conftest import Kapelle
from tests.support.killed_runs import preloaded
from tests.support.tiny import sections

from kapelle.runs.reader import read_evaluations, read_metrics
from kapelle.setup.recipe import load_recipe
from kapelle.training.trainer import Trainer


@pytest.fixture(autouse=True)
def _processes_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs be forks of a process that has imported the library; tests/comparison starts them afresh."""
    context = preloaded()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: context)


def write(folder: Path) -> str:
    values = sections(
        evaluation={"problems": 4},
        training={"steps": 2, "tasks_per_step": 2},
        algorithm={"name": "grpo", "group_size": 2},
    )
    (folder / "tiny.yaml").write_text(yaml.safe_dump({"name": "tiny", **values}))
    return str(folder / "tiny.yaml")


@pytest.mark.long
@pytest.mark.slow
def test_algorithms_are_compared_over_seeds(kapelle: Kapelle, tmp_path: Path) -> None:
    recipe, folder = write(tmp_path), tmp_path / "all"
    words = ("compare", recipe, "--seeds", "2", "--jobs", "2", "--run-dir", str(folder), "--json")
    first = kapelle(*words, "--algorithms", "grpo")
    assert first.code == 0, first.err
    [standing] = first.json["contenders"]
    runs = first.json["runs"]
    assert [(r["label"], r["seed"], r["error"]) for r in runs] == [("grpo", 0, None), ("grpo", 1, None)]
    assert first.json["budget"] == {"steps": 2, "tasks_per_step": 2, "episodes_per_task": 2}
    assert standing["mean_return"]["median"] == pytest.approx(median(r["mean_return"] for r in runs))
    assert json.loads((folder / "compare.json").read_text())["runs"] == runs
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF-")
    curve = json.loads((folder / "compare.json").read_text())["runs"][0]["curve"]
    assert [(at["step"], at["tokens"]) for at in curve] == [(0, 0), (2, runs[0]["tokens"])]

    # The same run by itself, in this process, comes to the same.
    with Trainer(load_recipe(recipe, (), ["seed=1"]).config, run_dir=tmp_path / "alone") as trainer:
        trainer.train()
    there = folder / "grpo" / "seed-1"
    assert read_evaluations(tmp_path / "alone") == read_evaluations(there)
    assert runs[1]["reward"] == read_evaluations(there)[-1]["reward"]
    assert runs[1]["tokens"] == sum(r["tokens/agent_0"] + r["tokens/agent_1"] for r in read_metrics(there))

    # Another algorithm joins; what was done is not done again.
    kept = {name: (folder / "grpo" / name / "status.json").read_bytes() for name in ("seed-0", "seed-1")}
    more = kapelle(*words, "--algorithms", "grpo,rloo")
    assert more.code == 0, more.err
    assert "2 of 4 runs are already finished" in more.err
    assert kept == {name: (folder / "grpo" / name / "status.json").read_bytes() for name in kept}
    with (folder / "compare.csv").open() as file:
        assert [(row["label"], row["seed"]) for row in csv.DictReader(file)] == [
            ("grpo", "0"),
            ("grpo", "1"),
            ("rloo", "0"),
            ("rloo", "1"),
        ]
    other = kapelle(*words, "--algorithms", "grpo", "optimizer.lr=1")
    assert (other.code, "other settings: optimizer.lr" in other.err) == (2, True)


def test_wrong_arguments_end_before_a_run(kapelle: Kapelle, tmp_path: Path) -> None:
    done = kapelle("compare", write(tmp_path), "--algorithms", "grpo,ppo", "--run-dir", str(tmp_path / "r"))
    assert done.code == 2
    assert "`ppo` cannot be compared here" in done.err
    assert not (tmp_path / "r").exists()
