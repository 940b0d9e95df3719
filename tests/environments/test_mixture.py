from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.workflows.stage import expert, lines, team_of

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments.mixture import Mixture
from kapelle.rollout.episodes import rollout
from kapelle.rollout.evaluation.evaluate import summarise
from kapelle.rollout.setup import RolloutSetup
from kapelle.runs.definitions import describe, rollout_metrics
from kapelle.setup.problems import choose_tasks
from kapelle.setup.recipe import lay_over
from kapelle.workflows.debate import Debate
from kapelle.workflows.solo import Solo

SUMS: dict[str, Any] = {"environment": {"name": "arithmetic"}, "weight": 3}
CHAINS: dict[str, Any] = {"environment": {"name": "multi_step", "difficulty": [2, 3]}}


def mixture(**parts: Any) -> Mixture:
    return Mixture(parts=parts or {"sums": SUMS, "chains": CHAINS})


def math(folder: Path, name: str, rows: int) -> dict[str, Any]:
    place = folder / name
    place.mkdir()
    for split in ("train", "test"):
        text = [json.dumps({"question": f"{name} {split} {k}?", "answer": f"#### {k}"}) for k in range(rows)]
        (place / f"{split}.jsonl").write_text("\n".join(text))
    return {"environment": {"name": "math", "path": str(place)}}


def test_tasks_are_drawn_by_weight_from_the_parts() -> None:
    environment = mixture()
    tasks = [environment.task("train", k) for k in range(400)]
    drawn = Counter(task.data["part"] for task in tasks)
    assert 270 < drawn["sums"] < 330
    for k, task in enumerate(tasks[:20]):
        part: Any = environment.parts[task.data["part"]].environment
        own = part.task("train", k)
        assert (task.question, task.data["data"]) == (own.question, own.data)
        assert task.id == f"{task.data['part']}/{own.id}"


async def test_success_is_reported_by_part() -> None:
    environment = mixture()
    say = {"a": lambda r: expert(environment)(r) if r.task.data["part"] == "sums" else "0 0"}
    setup = RolloutSetup(team_of("a"), environment, Solo(), ScriptedEngine(say))
    groups = await rollout(setup, [environment.task("train", k) for k in range(60)], 1, 0)
    row = rollout_metrics(groups)
    assert row["success/sums"] == 1.0
    assert row["success/chains"] < 0.2
    assert 0.5 < row["success"] < 0.95
    assert describe("success/sums") is not None
    parts = summarise(groups).parts
    assert parts["part/sums"].value == 1.0
    assert parts["part/sums"].scored + parts["part/chains"].scored == 60


async def test_finite_test_splits_contain_every_task_once(tmp_path: Path) -> None:
    environment = mixture(one=math(tmp_path, "one", 3), two=math(tmp_path, "two", 5))
    assert environment.size("test") == 8
    assert environment.size("train") is None
    tasks = choose_tasks(environment, "test", 99)
    assert len({task.id for task in tasks}) == 8
    assert {task.question for task in (environment.task("train", k) for k in range(200))} == {
        *(f"one train {k}?" for k in range(3)),
        *(f"two train {k}?" for k in range(5)),
    }
    setup = RolloutSetup(team_of("a"), environment, Solo(), ScriptedEngine({"a": expert(environment)}))
    assert summarise(await rollout(setup, tasks, 1, 0)).success == 1.0


async def test_a_workflow_of_questions_can_score_rounds() -> None:
    environment = mixture()
    say = expert(environment)
    setup = RolloutSetup(
        team_of("a", "b"),
        environment,
        Debate(score_rounds=True),
        ScriptedEngine({"a": say, "b": lines("?", "?")}),
    )
    [group] = await rollout(setup, [environment.task("test", 0)], 1, 0)
    [episode] = group.episodes
    assert episode.error is None
    assert [turn.score for turn in episode.turns] == [1.0, 0.0, 1.0, 0.0]
    assert episode.success == 1.0


def test_a_recipe_survives_being_written() -> None:
    values = {
        "environment": {"name": "mixture", "parts": {"sums": SUMS, "chains": CHAINS}},
        "workflow": {"name": "solo"},
        "algorithm": {"name": "grpo"},
    }
    recipe = lay_over([("mine", values)], ["environment.parts.sums.environment.digits=3"])
    environment = recipe.config.environment
    assert isinstance(environment, Mixture)
    assert len(environment.task("train", 1).question.split("+")[0]) in {2, 3}
    assert "digits: 3" in recipe.yaml()
    assert lay_over([("again", recipe.config.model_dump(mode="json"))]).config == recipe.config


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"x": {"environment": {"name": "arithmetik"}}}, "Did you mean 'arithmetic'"),
        ({"x": {"environment": {"digits": 2}}}, "name"),
        ({"x": {"environment": {"name": "arithmetic", "digit": 2}}}, "digit"),
        ({"x": {**SUMS, "weight": 0}}, "weight"),
    ],
)
def test_wrong_parts_are_errors(parts: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        mixture(**parts)
    with pytest.raises(ValidationError, match="parts"):
        Mixture(parts={})
