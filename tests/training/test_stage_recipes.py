"""The recipes of MRLM and MAPoRL train at a size that takes seconds, and mean what their comments say."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from tests.cli.conftest import call
from tests.support.step_times import check_times
from tests.support.tiny import SIZE

from kapelle.runs.reader import read_episodes, read_evaluations, read_metrics
from kapelle.setup.recipe import load_recipe
from kapelle.setup.team_builder import agent_configs

SMALL = (
    *(f"model.embedded.{key}={value}" for key, value in SIZE.items()),
    "team.lora.rank=2",
    "team.critic_lora.rank=2",
    "warmup=null",
    "training.steps=2",
    "training.tasks_per_step=2",
    "evaluation.before_and_after=false",
    "evaluation.every=0",
    "evaluation.problems=4",
    "checkpoint.every=1",
    "algorithm.epochs=1",
)
PAID = ("stages.1.algorithm.verifier=stage:judge", "stages.1.algorithm.least_auc=null")
"""The verifier of the first stage pays, though two steps have taught it nothing."""
ARITHMETIC = "environment={name: arithmetic, digits: 1}"
"""Takes the place of data that a machine may not have."""


def rows_of(recipe: str, run: Path, *settings: str) -> dict[str, list[dict[str, float]]]:
    """Train a recipe and return the metrics of each of its runs, by folder."""
    said = call("train", recipe, *SMALL, *settings, "--run-dir", str(run))
    assert said.code == 0, said.err
    folders = [p.parent for p in sorted(run.rglob("metrics.jsonl"))]
    rows = {"" if folder == run else folder.name: read_metrics(folder) for folder in folders}
    for row in chain(*rows.values()):
        check_times(row)
    return rows


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mrlm_ppo", "mrlm_grpo", "mrlm_dpo", "mrlm_sft"])
def test_mrlms_recipes_train(recipe: str, tmp_path: Path) -> None:
    # An untrained model is never right, and DPO compares right with wrong: here noise is paid.
    own = ("environment={name: 'tests.support.plugins:Digest'}",) if recipe == "mrlm_dpo" else ()
    (rows,) = rows_of(recipe, tmp_path / "run", *own).values()
    assert [row["step"] for row in rows] == [1, 2]
    assert any(name.startswith("loss/") for name in rows[0])


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mrlm_tools", "mrlm_conversation", "mrlm_conversation_model"])
def test_tools_and_conversations_train(recipe: str, tmp_path: Path) -> None:
    (rows,) = rows_of(
        recipe, tmp_path / "run", "team.sampling.max_tokens=8", "model.embedded.context=512"
    ).values()
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["failed_episodes"] == 0.0
    seats = {turn.agent for episode in read_episodes(tmp_path / "run") for turn in episode.turns}
    assert seats == {seat.name for seat in agent_configs(load_recipe(recipe).config.team)}
    trained = {name for name in rows[0] if name.startswith("loss/")}
    assert not any("user" in name or "frozen" in name for name in trained)


@pytest.mark.slow
def test_sft_then_ppo_goes_on_from_what_was_learned(tmp_path: Path) -> None:
    found = rows_of("mrlm_hybrid", tmp_path / "run")
    assert [*found] == ["01-sft", "02-ppo"]
    assert "nll/shared" in found["01-sft"][0]
    assert "value_error/critic:solver" in found["02-ppo"][0]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["maporl_gsm8k_debate", "maporl_sums_debate"])
def test_a_debate_is_judged_by_the_verifier_of_the_stage_before(recipe: str, tmp_path: Path) -> None:
    found = rows_of(recipe, tmp_path / "run", ARITHMETIC, *PAID)
    assert [*found] == ["01-judge", "02-debate"]
    assert "verifier_right_share" in found["01-judge"][0]
    assert {"loss/ada", "loss/ben", "verifier_score/ada"} < found["02-debate"][0].keys()


def test_a_verifier_is_calibrated_and_measured_again_on_those_whom_it_pays(tmp_path: Path) -> None:
    # An untrained model is never right: here noise is paid.
    run, noise = tmp_path / "run", "environment={name: 'tests.support.plugins:Digest'}"
    settings = ("evaluation.every=1", "evaluation.problems=12", "evaluation.problems_while_training=12")
    found = rows_of("maporl_worked_debate", run, noise, *settings, PAID[1])
    assert [*found] == ["01-judge", "02-debate"]
    judge = read_evaluations(run / "01-judge")[-1]["verifier"]
    folder = run / "01-judge" / "checkpoints" / "00000002" / "verifier"
    assert json.loads((folder / "verifier.json").read_text())["held_out"] == judge
    made = judge["calibrated"]
    assert made["calibration"]["kind"] == "isotonic"
    assert made["fitted"] + made["answers"] == judge["answers"]
    # What pays is the calibrated probability: it lies between those that were fitted.
    shares = [share for _, share in made["calibration"]["points"]]
    for row in found["02-debate"]:
        assert min(shares) <= row["verifier_score/ada"] <= max(shares)
    # At each evaluation of the debate the verifier is measured on what its debaters say: two agents, two rounds.
    rows = read_evaluations(run / "02-debate")
    assert [(row["step"], row["judged"]["answers"]) for row in rows] == [(1, 48)]
    assert all(row["success"] is not None for row in rows)
