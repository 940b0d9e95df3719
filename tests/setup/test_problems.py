"""A run trains on no problem that it is tested on, however it is spelt and wherever it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import sections

from kapelle import Trainer
from kapelle.environments.data.source import raw_rows
from kapelle.errors import ConfigError
from kapelle.setup.preparation import prepare
from kapelle.setup.problems import problem_of, same_words, untested
from kapelle.setup.recipe import resolve
from kapelle.training.selection import training_tasks

SAME = [
    ("What's 2,000 + 3?", "what’s  2000+3"),
    ("5 − 3", "5-3"),
    ("x² = 4", "x^2=4"),
    ("Ｆｕｌｌ width １２", "full width 12"),
]
OTHER = [
    ("2*3", "2/3"),
    ("3.5 apples", "35 apples"),
    ("(2+3)*4", "2+(3*4)"),
    ("(1, 2)", "(12)"),
    ("5!", "5"),
    ("x < 2", "x > 2"),
    ("कि", "का"),
    ("10,00", "1,000"),
    ("5²", "52"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_spelling_does_not_make_another_problem(one: str, other: str) -> None:
    assert same_words(one) == same_words(other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_numbers_and_signs_do(one: str, other: str) -> None:
    assert same_words(one) != same_words(other)


def written(folder: Path, *questions: str, split: str = "test") -> str:
    folder.mkdir(exist_ok=True)
    raw_rows.cache_clear()
    for name in ("train", "test"):
        own = questions if name == split else ("something else?",)
        rows = [{"question": question, "answer": "#### 1"} for question in own]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def settings(environment: dict[str, Any], tested: dict[str, Any], **changed: Any) -> dict[str, Any]:
    given = sections(
        environment=environment, workflow={"name": "chain"}, training={"steps": 3, "tasks_per_step": 4}
    )
    return {
        **given,
        "evaluation": {"problems": 8, "sets": {"held": tested}, "before_and_after": False},
        **changed,
    }


def drawn(config: Any, steps: int) -> list[str]:
    tasks = [training_tasks(config.environment, config, step) for step in range(1, steps + 1)]
    return [same_words(task.question) for each in tasks for task in each]


def test_a_test_problem_in_the_training_rows_is_an_error(tmp_path: Path) -> None:
    rows = {"name": "math", "path": written(tmp_path / "own", "How much is 1,200 + 3?", split="train")}
    tested = {"name": "math", "path": written(tmp_path / "set", "how much is:  1200+3 ?", "another one?")}
    with pytest.raises(
        ConfigError, match=r"`evaluation.sets.held`: 1 of its 2 problems are also in the training data"
    ):
        prepare(resolve(settings(rows, tested)))


def test_a_generator_leaves_out_the_rows_that_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = resolve(sections(environment={"name": "arithmetic"}, training={"steps": 3, "tasks_per_step": 4}))
    would = drawn(plain, 3)
    spelt = [f"{would[k].replace('+', '  + ')} ?" for k in (0, 5, 7)]
    tested = {"name": "math", "path": written(tmp_path / "set", *spelt)}
    config = resolve(settings({"name": "arithmetic"}, tested))
    now = drawn(config, 3)
    excluded = {same_words(each) for each in spelt}
    assert excluded.isdisjoint(now)
    kept = [k for k, each in enumerate(would) if each not in excluded]
    assert [now[k] for k in kept] == [would[k] for k in kept], "the others are drawn as without the set"
    assert len(now) == len(would)
    assert "`evaluation.sets.held` contains 3 of 2" in prepare(config).notes[0]


def test_a_test_set_with_all_training_problems_is_an_error(tmp_path: Path) -> None:
    games = {"name": "arithmetic", "digits": 1, "operators": ["+"]}
    every = [f"{a}+{b}" for a in range(10) for b in range(10)]
    tested = {"name": "math", "path": written(tmp_path / "set", *every)}
    with pytest.raises(ConfigError, match=r"`evaluation.sets.held` contains all \d+ problems of 256 tasks"):
        prepare(resolve(settings(games, tested)))


def test_games_and_pictures_are_no_equal_questions() -> None:
    games = {"name": "matrix", "game": "climbing"}
    config = resolve(settings(games, games, workflow={"name": "parallel"}))
    assert not prepare(config).notes
    task = config.environment.task("train", 0)
    free = untested(config)
    assert free is not None
    assert free(task)
    squares = resolve(sections(environment={"name": "squares"})).environment
    one, other = squares.task("train", 0), squares.task("train", 1)
    assert one.question == other.question
    assert problem_of(squares, one) != problem_of(squares, other)


def test_a_run_and_its_warm_up_play_none_of_them(tmp_path: Path) -> None:
    plain = resolve(sections(environment={"name": "arithmetic"}, training={"steps": 3, "tasks_per_step": 4}))
    shown = [plain.environment.task("train", k).question for k in range(4)]
    tested = {"name": "math", "path": written(tmp_path / "set", drawn(plain, 1)[0], *shown[:2])}
    warmup = {"steps": 1, "demonstrations": 4, "batch": 2}
    given = settings({"name": "arithmetic"}, tested, warmup=warmup)
    with Trainer(**given) as trainer:
        step = next(trainer.steps(1))
        questions = [same_words(group.task.question) for group in step.groups]
    assert same_words(drawn(plain, 1)[0]) not in questions
    from kapelle.features.warmup.key import stage_of, stage_team, warmup_key
    from kapelle.features.warmup.stage import demonstrations
    from kapelle.rollout.setup import make_rollout_setup
    from kapelle.setup.model_loading import load_models, teacher

    config = resolve(given)
    stage = stage_of(config)
    _, team = stage_team(stage)
    setup = make_rollout_setup(stage, team, teacher(stage, team, load_models(team, stage.model, {})))
    found = [group.task.question for group in demonstrations(setup, stage, 4)]
    assert found[:2] == shown[2:]
    assert warmup_key(config) != warmup_key(resolve(given | {"evaluation": {}}))
