"""The recipes of MARFT, CORY, MARS and MRLM's mixture train at a size that takes seconds, and resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import call
from tests.training.test_stage_recipes import ARITHMETIC, SMALL

from kapelle.runs.reader import read_metrics
from kapelle.setup.recipe import builtin_recipes

QUICK = [setting for setting in SMALL if not setting.startswith("algorithm.")]
CASES: dict[str, tuple[str, ...]] = {
    "marft_math_duo": (ARITHMETIC,),
    "cory_gsm8k": (ARITHMETIC, "algorithm.swap_every=1"),
    "mars_hanabi_lora": (),
}
LEARNERS = {
    "marft_math_duo": ("reasoner", "actor"),
    "cory_gsm8k": ("pioneer", "observer"),
    "mars_hanabi_lora": ("first", "second"),
}


def rows_of(recipe: str, run: Path, *settings: str) -> list[dict[str, float]]:
    said = call("train", recipe, *QUICK, *settings, "--run-dir", str(run))
    assert said.code == 0, said.err
    return read_metrics(run)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", CASES)
def test_every_agent_of_a_recipe_learns(recipe: str, tmp_path: Path) -> None:
    rows = rows_of(recipe, tmp_path / "run", *CASES[recipe])
    assert [row["step"] for row in rows] == [1, 2]
    for agent in LEARNERS[recipe]:
        assert f"loss/{agent}" in rows[0]
        assert rows[0][f"lr/{agent}"] > 0
    assert rows[0]["parity/max"] <= 1e-4


def test_marft_is_played_at_both_levels(tmp_path: Path) -> None:
    rows = rows_of("marft_math_duo", tmp_path / "run", ARITHMETIC, "algorithm.level=token")
    assert "value_error/critic:reasoner" in rows[0]


@pytest.mark.slow
@pytest.mark.data
def test_work_of_three_kinds_is_mixed_and_told_apart(data_folder: Path, tmp_path: Path) -> None:
    settings = (
        f"environment.parts.code.environment.path={data_folder / 'mbpp' / 'mbpp.jsonl.gz'}",
        f"environment.parts.math.environment.path={data_folder / 'gsm8k'}",
        f"environment.parts.tools.environment.path={data_folder / 'bfcl'}",
        "model.embedded.context=8192",
        "team.sampling.max_tokens=4",
        "algorithm.group_size=2",
        "training.tasks_per_step=12",
        "training.steps=1",
    )
    (row,) = rows_of("mrlm_multi", tmp_path / "run", *settings)
    assert {"success/code", "success/math", "success/tools"} <= row.keys()
    assert row["failed_episodes"] == 0.0


@pytest.mark.parametrize("recipe", [*CASES, "mrlm_multi"])
def test_a_recipe_names_where_training_and_testing_come_from(recipe: str) -> None:
    text = builtin_recipes()[recipe]
    assert "train" in text.split("environment:")[1].split("workflow:")[0]
    assert "test" in text.split("environment:")[1].split("workflow:")[0]
