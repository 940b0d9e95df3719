"""Tasks of the real package inspect_ai, answered by teams (`make test-apps`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.workflows.stage import expert, lines, play

from kapelle.environments.adapters.inspect_tasks import Inspect
from kapelle.errors import ConfigError
from kapelle.rollout.conformance import conform
from kapelle.workflows.debate import Debate
from kapelle.workflows.solo import Solo

pytestmark = pytest.mark.apps
pytest.importorskip("inspect_ai")

FILE = Path(__file__).parent / "inspect_capitals.py"


def world(task: str, **settings: Any) -> Inspect:
    return Inspect(path=f"{FILE}:{task}", **settings)


async def test_a_scorer_pays_what_agents_answer_to_what_the_solver_shows() -> None:
    environment = world("sums")
    task = environment.task("train", 2)
    gold = str(task.data["answer"])
    half = str(int(gold) // 2)
    assert task.question == f"Add.\n\n{half}+{half}"
    said = {"a": lines("17", f"It is {gold}"), "b": lines("1", "1")}
    (episode,) = await play(environment, Debate(rounds=2), ["a", "b"], said, task)
    assert episode.error is None
    assert episode.rewards == {"a": 1.0, "b": 0.0}


async def test_lettered_choices_are_read_by_the_solver() -> None:
    environment = world("lettered")
    task = environment.task("train", 0)
    assert "B) " in task.question
    (right,) = await play(environment, Solo(), ["a"], {"a": expert(environment)}, task)
    (wrong,) = await play(environment, Solo(), ["a"], {"a": lines("ANSWER: A")}, task)
    assert (right.rewards, wrong.rewards) == ({"a": 1.0}, {"a": 0.0})


async def test_of_several_values_one_pays_and_what_breaks_fails_the_episode() -> None:
    for settings, said, expected in (
        ({"value": "near"}, "4", None),
        ({"value": "far"}, "4", "not a number from 0 to 1"),
        ({}, "4", "environment.value"),
        ({"value": "near"}, "crash", "failed on"),
    ):
        environment = world("sums", scorer=1, **settings)
        (episode,) = await play(environment, Solo(), ["a"], {"a": lines(said)}, environment.task("train", 0))
        if expected is None:
            assert episode.rewards == {"a": 0.5}
        else:
            assert expected in (episode.error or "")
    environment = world("sums", args={"twice": True})
    (episode,) = await play(environment, Solo(), ["a"], {"a": lines("4")}, environment.task("train", 0))
    assert episode.error is not None


def test_samples_lie_in_one_split_and_what_is_not_there_is_refused() -> None:
    environment = world("sums")
    splits: dict[str, set[str]] = {
        "train": {environment.task("train", k).question for k in range(environment.size("train") or 0)},
        "test": {environment.task("test", k).question for k in range(environment.size("test") or 0)},
    }
    assert len(splits["train"]) + len(splits["test"]) == 30
    assert not splits["train"] & splits["test"]
    assert json.dumps(dict(environment.sources))
    with pytest.raises(ConfigError, match="has 2 scorers"):
        world("sums", scorer=2).check(["a"])
    with pytest.raises(ConfigError, match="cannot be created"):
        world("sums", args={"colour": "red"}).check(["a"])


@pytest.mark.parametrize("task", ["sums", "lettered"])
async def test_it_conforms(task: str) -> None:
    findings = await conform(world(task), ["solver"], tasks=3)
    # One letter is right for every sample of `lettered`: solutions of other tasks are paid there.
    assert {f.name for f in findings if f.status == "failed"} <= (
        {"cheating"} if task == "lettered" else set()
    )
