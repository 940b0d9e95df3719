"""Which tasks a run learns from: of fitting difficulty, easy ones first; and the same after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import frozen_copy, learners_of, same_bits, sections

from kapelle import Trainer
from kapelle.errors import ConfigError
from kapelle.runs.reader import read_metrics
from kapelle.setup.preparation import prepare
from kapelle.setup.recipe import resolve

LEVELS = (3, 1, 4, 1, 5, 2, 2, 4)


def rows(folder: Path) -> dict[str, Any]:
    """Write tasks of several levels; return the environment that asks them."""
    for split, begin in (("train", 0), ("test", 50)):
        lines = [
            {"question": f"task {k + begin}", "answer": f"#### {k}", "level": f"Level {level}"}
            for k, level in enumerate(LEVELS)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {"name": "math", "path": str(folder)}


NOISE: dict[str, Any] = {"name": "tests.support.plugins:Digest", "tasks": 8, "levels": 2}
"""Eight tasks on which noise succeeds about half the time."""


def settings(environment: dict[str, Any], **tasks: Any) -> dict[str, Any]:
    given = sections(
        environment=environment, workflow={"name": "chain"}, training={"steps": 4, "tasks_per_step": 2}
    )
    return {**given, "tasks": tasks}


def played(trainer: Trainer, count: int) -> list[list[str]]:
    return [[group.task.id for group in step.groups] for step in trainer.steps(count)]


def weights(trainer: Trainer) -> dict[str, Any]:
    return {name: frozen_copy(each.parameters) for name, each in learners_of(trainer.engine).items()}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "tasks",
    [
        {"difficulty": {"low": 0.1, "high": 0.9, "samples": 6}},
        {"difficulty": {"samples": 3}, "curriculum": {"start": 0.25, "steps": 3}},
        {"replay": {"groups": 2, "capacity": 4}},
        {"difficulty": {"samples": 3}, "replay": {"max_age": 2}, "curriculum": {"steps": 2}},
    ],
    ids=["difficulty", "curriculum", "replay", "all"],
)
def test_a_run_that_was_stopped_plays_and_learns_the_same(tasks: dict[str, Any], tmp_path: Path) -> None:
    config = resolve(settings(NOISE, **tasks))
    with Trainer(config, run_dir=tmp_path / "whole") as whole:
        tasks_played, last = played(whole, 4), weights(whole)
    with Trainer(config, run_dir=tmp_path / "parts") as first:
        begun = played(first, 2)
        first.save()
    with Trainer(config, run_dir=tmp_path / "parts", resume=True) as second:
        assert begun + played(second, 2) == tasks_played
        assert same_bits(last, weights(second))
    metrics = [
        [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(tmp_path / run)]
        for run in ("whole", "parts")
    ]
    assert metrics[0] == metrics[1]


def test_tasks_that_are_solved_too_rarely_or_too_often_are_left_out(tmp_path: Path) -> None:
    with Trainer(resolve(settings(NOISE, difficulty={"low": 0.3, "high": 0.6, "samples": 5}))) as trainer:
        source = trainer.loop.rollouts.tasks
        [step] = trainer.steps(1)
        rates = dict(trainer.loop.features["tasks.difficulty"].state()["rates"])
        assert len(rates) == 8
        assert len({*rates.values()}) > 1
        fit = {f"train-{k}" for k, rate in rates.items() if 0.3 <= rate <= 0.6}
        assert 0 < len(fit) < 8
        assert step.metrics["tasks_left"] == len(fit)
        assert {task.id for number in range(1, 9) for task in source.of(number)} == fit, (
            "and each of the others comes"
        )


def test_easy_tasks_come_first_and_then_all_of_them(tmp_path: Path) -> None:
    given = settings(rows(tmp_path), curriculum={"by": "level", "start": 0.25, "steps": 4})
    with Trainer(resolve(given)) as trainer:
        source = trainer.loop.rollouts.tasks
        levels = [
            {LEVELS[int(task.id.rpartition("-")[2])] for task in source.of(step)} for step in range(1, 5)
        ]
        assert levels[0] == {1}, "a quarter of eight tasks are the two of level 1"
        # ⌈8 · 7/16⌉ = 4 tasks are those up to level 2; ⌈8 · 10/16⌉ = 5 those up to 3; ⌈8 · 13/16⌉ = 7 those up to 4.
        assert all(level <= most for each, most in zip(levels, (1, 2, 3, 4), strict=True) for level in each)
        epoch = [task.id for step in (5, 6, 7, 8) for task in source.of(step)]
        assert len({*epoch}) == 8, "after it every task comes once in an epoch"


def test_tasks_without_end_get_harder_too(tmp_path: Path) -> None:
    stories = {"name": "word_problems", "difficulty": [1, 4]}
    given = {
        **settings(stories, curriculum={"by": "difficulty", "start": 0.2, "steps": 10}),
        "model": {"embedded": {"context": 2048}},
    }
    with Trainer(resolve(given)) as trainer:
        source = trainer.loop.rollouts.tasks
        hardest = [max(task.data["difficulty"] for task in source.of(step)) for step in range(1, 40)]
    assert (hardest[0], max(hardest[:3])) == (1, 2) or hardest[0] == 1
    assert max(hardest[11:]) == 4


@pytest.mark.parametrize(
    ("environment", "over", "says"),
    [
        (NOISE, {"tasks": {"difficulty": {"low": 0.9, "high": 0.1}}}, "`low: 0.9` is above `high: 0.1`"),
        (
            NOISE,
            {"tasks": {"curriculum": {"by": "level"}}},
            r"`tasks\.curriculum\.by: level` is not a field of task .* \(its fields: ",
        ),
        (
            NOISE,
            {"tasks": {"difficulty": {}}, "training": {"epochs": 2}},
            r"Set `training\.steps` instead",
        ),
        (NOISE, {"tasks": {"curriculum": {}}}, r"Set `tasks\.difficulty: {}` too"),
        (NOISE, {"tasks": {"replay": {}}, "algorithm": {"name": "sft"}}, r"`sft` collects none"),
    ],
)
def test_bad_choices_are_refused_in_one_line(
    environment: dict[str, Any], over: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        prepare(resolve({**settings(environment), **over}))
    assert "\n" not in str(refused.value)
