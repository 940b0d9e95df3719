"""The recipes of MARFT, CORY, MARS, MAPoRL's teams and MRLM's mixture train at a size that takes seconds, and resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import call
from tests.training.test_stage_recipes import ARITHMETIC, SMALL

from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.tool_tasks import KINDS
from kapelle.runs.reader import read_episodes, read_metrics

QUICK = [setting for setting in SMALL if not setting.startswith("algorithm.")]
CASES: dict[str, tuple[str, ...]] = {
    "marft_math_duo": (ARITHMETIC,),
    "cory_gsm8k": (ARITHMETIC, "algorithm.swap_every=1"),
    "mars_hanabi_lora": (),
    "maporl_three_agents": (),
    "maporl_two_models": (),
    "maporl_turns": ("algorithm.order.interval=1",),
}
LEARNERS = {
    "marft_math_duo": ("reasoner", "actor"),
    "cory_gsm8k": ("pioneer", "observer"),
    "mars_hanabi_lora": ("first", "second"),
    "maporl_three_agents": ("ada", "ben", "cem"),
    "maporl_two_models": ("ada", "ben"),
}


def rows_of(recipe: str, run: Path, *settings: str) -> list[dict[str, float]]:
    said = call("train", recipe, *QUICK, *settings, "--run-dir", str(run))
    assert said.code == 0, said.err
    return read_metrics(run)


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", LEARNERS)
def test_every_agent_of_a_recipe_learns(recipe: str, tmp_path: Path) -> None:
    rows = rows_of(recipe, tmp_path / "run", *CASES[recipe])
    assert [row["step"] for row in rows] == [1, 2]
    for agent in LEARNERS[recipe]:
        assert f"loss/{agent}" in rows[0]
        assert rows[0][f"lr/{agent}"] > 0
    assert rows[0]["parity/max"] <= 1e-4


def test_one_rounds_weights_are_trained_at_a_time(tmp_path: Path) -> None:
    rows = rows_of("maporl_turns", tmp_path / "run", *CASES["maporl_turns"], "training.steps=3")
    rounds = ("opening", "reply", "closing")
    assert [[name for name in rounds if f"loss/{name}" in row] for row in rows] == [[name] for name in rounds]
    turns = next(iter(read_episodes(tmp_path / "run"))).turns
    assert [turn.policy for turn in turns] == [name for name in rounds for _ in ("ada", "ben")]


@pytest.mark.slow
def test_programs_sums_and_tools_that_act_are_mixed_without_data(tmp_path: Path, sandbox: Bubblewrap) -> None:
    row = json.dumps({"question": "What is 2 and 3?", "answer": "2+3=<<2+3=5>>5\n#### 5"})
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f"{row.replace('2', '4' if split == 'test' else '2')}\n")
    settings = (
        "environment.parts.code.environment.format=generated",
        f"environment.parts.math.environment.path={tmp_path}",
        "environment.parts.tools.environment.max_turns=2",
        "model.embedded.context=16384",
        "team.sampling.max_tokens=4",
        "training.tasks_per_step=12",
        "training.steps=1",
    )
    (metrics,) = rows_of("mrlm_multi", tmp_path / "run", *settings)
    assert {"success/code", "success/math", "success/tools"} <= metrics.keys()
    assert metrics["failed_episodes"] == 0.0
    acted = [episode for episode in read_episodes(tmp_path / "run") if episode.info["part"] == "tools"]
    assert acted
    assert {episode.info["kind"] for episode in acted} <= set(KINDS)
    assert all("create_event" in episode.turns[0].new_messages[-1].content for episode in acted)
