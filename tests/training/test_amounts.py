"""How much is trained, in the words of verl and siiRL: epochs, steps of critics alone, and prompts that are too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.tiny import frozen_copy, learners_of, same_bits, sections

from kapelle import Trainer
from kapelle.cli import main
from kapelle.runs import checkpoint
from kapelle.runs.reader import read_latest
from kapelle.setup.recipe import resolve

LENGTHS = (4, 40, 8, 60, 12, 10, 6)
"""Characters of the training questions; the tokeniser's tokens are bytes."""


def rows(folder: Path) -> dict[str, Any]:
    """Write a train and a test file of such questions; return the environment that asks them."""
    for split, letters in (("train", "0123456"), ("test", "abcdefg")):
        asked = zip(letters, LENGTHS, strict=True)
        lines = [{"question": letter * length, "answer": f"#### {length}"} for letter, length in asked]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {"name": "math", "path": str(folder)}


def settings(folder: Path, name: str = "grpo", **over: Any) -> dict[str, Any]:
    given = sections(
        environment=rows(folder), algorithm={"name": name, "group_size": 2}, workflow={"name": "chain"}
    )
    return {**given, "training": {"tasks_per_step": 2}, **over}


def recipe(folder: Path, **over: Any) -> str:
    (folder / "own.yaml").write_text(yaml.safe_dump({"name": "own", **settings(folder, **over)}))
    return str(folder / "own.yaml")


def asked(trainer: Trainer) -> list[str]:
    return [group.task.question for step in trainer.steps() for group in step.groups]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("epochs", "steps"), [(1, 4), (2, 7), (0.5, 2)])
def test_epochs_are_steps_in_which_every_task_is_played_so_often(
    epochs: float, steps: int, tmp_path: Path
) -> None:
    with Trainer(resolve(settings(tmp_path, training={"tasks_per_step": 2, "epochs": epochs}))) as trainer:
        played = asked(trainer)
        assert (trainer.done, trainer.config.training.steps) == (steps, steps)
    counts = [played[: int(epochs * 7)].count(text) for text in sorted({*played})]
    assert set(counts) == {max(1, int(epochs))} or epochs < 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["marft", "happo"])
def test_critics_learn_alone_at_first_and_a_stopped_run_goes_on_alike(name: str, tmp_path: Path) -> None:
    given = settings(tmp_path, name, training={"tasks_per_step": 2, "steps": 4, "critic_warmup": 2})
    config = resolve({**given, "environment": {"name": "tests.support.plugins:Digest"}})

    def moved(run: Path, *counts: int) -> tuple[list[tuple[bool, bool]], Any]:
        found = []
        for count in counts:
            with Trainer(config, run_dir=run, resume=run.exists()) as trainer:
                learners = learners_of(trainer.engine)
                for _ in range(count):
                    before = {each: frozen_copy(learners[each].parameters) for each in learners}
                    list(trainer.steps(1))
                    changed = {
                        e for e in learners if not same_bits(before[e], frozen_copy(learners[e].parameters))
                    }
                    critics = {each for each in learners if each.startswith("critic:")}
                    found.append((bool(changed & critics), bool(changed - critics)))
                trainer.save()
        latest = read_latest(run)
        assert latest is not None
        return found, checkpoint.load(latest)["train"]["learners"]

    whole, last = moved(tmp_path / "whole", 4)
    assert whole == [(True, False), (True, False), (True, True), (True, True)]
    parts, again = moved(tmp_path / "parts", 1, 3)
    assert parts == whole
    assert all(same_bits(last[each]["weights"], again[each]["weights"]) for each in last)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["vdn", "qmix"])
def test_a_mixer_learns_alone_at_first(name: str, tmp_path: Path) -> None:
    fit = {"min_fill": 4, "updates": 5}
    given = settings(tmp_path, training={"tasks_per_step": 4, "steps": 4, "critic_warmup": 3})
    given |= {"algorithm": {"name": name, "group_size": 4, "credit_warmup_steps": 0, "fit": fit}}
    with Trainer(resolve({**given, "environment": {"name": "tests.support.plugins:Digest"}})) as trainer:
        learners = learners_of(trainer.engine)
        begun = {each: frozen_copy(learners[each].parameters) for each in learners}
        rows = [step.metrics for step in trainer.steps(3)]
        assert all(same_bits(begun[each], frozen_copy(learners[each].parameters)) for each in begun)
        assert all(row["mixer_loss"] > 0 for row in rows), "the mixer was fitted in each of them"
        assert rows[2]["mixer_loss"] != rows[1]["mixer_loss"]
        list(trainer.steps(1))
        assert not any(same_bits(begun[each], frozen_copy(learners[each].parameters)) for each in begun)


def test_prompts_that_are_too_long_are_left_out_of_training_and_of_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings(tmp_path, training={"tasks_per_step": 2, "epochs": 2})
    with Trainer(resolve(given)) as trainer:
        whole = {len(text) for text in asked(trainer)}
    assert whole == {*LENGTHS}
    most = first_prompt(given) + 12
    short = {**given, "tasks": {"max_prompt_tokens": most}}
    with Trainer(resolve(short)) as trainer:
        assert {len(text) for text in asked(trainer)} == {4, 8, 12, 10, 6}
        assert trainer.done == 5, "epochs count what is left"
        evaluation = trainer.evaluate(7)
        assert {len(group.task.question) for group in evaluation.groups} == {4, 8, 12, 10, 6}
    assert main(["validate", recipe(tmp_path, tasks={"max_prompt_tokens": most})]) == 0
    assert (
        f"train: 2 of 7 tasks have a first prompt of more than {most} tokens and are excluded"
        in capsys.readouterr().out
    )


def first_prompt(given: dict[str, Any]) -> int:
    """Return how many tokens the template adds to a question."""
    from kapelle.models.renderer import load_renderer
    from kapelle.types import Message

    config = resolve(given)
    return len(load_renderer("embedded", config.model).start([Message("user", "")]))


"""Characters of a question that the model reads, and after which it has no room for a whole answer."""
