"""Several answers to a problem (avg@k, pass@k, maj@k) and several sets of problems, each with rates of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from tests.support.episodes import episode, group, turn
from tests.support.tiny import sections
from tests.workflows.stage import TASK, Say, lines, play

from kapelle import Trainer
from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.math import Math
from kapelle.errors import ConfigError
from kapelle.functional.statistics import mean_interval
from kapelle.rollout.evaluation.evaluate import at_k, summarise
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.setup.preparation import prepare
from kapelle.setup.recipe import resolve
from kapelle.types import Group, Task
from kapelle.workflow import Workflow
from kapelle.workflows.debate import Debate
from kapelle.workflows.reflect import Reflect
from kapelle.workflows.vote import Vote

SOLVED = ((1, 0, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 0, 0), (1, 1, 0))
"""Which answers to each problem are right; one answer to the last problem failed."""


def groups() -> list[Group]:
    found = []
    for k, scores in enumerate(SOLVED):
        episodes = [
            episode(turn("a", 0), task=Task(f"t{k}", f"q{k}"), success=float(score)) for score in scores
        ]
        failed = [episode(turn("a", 0), task=Task(f"t{k}", f"q{k}"), error="gone")] * (4 - len(scores))
        found.append(group(*episodes, *failed))
    return found


def rates(samples: int = 4) -> dict[str, Any]:
    return at_k(groups(), samples, Math.model_construct(), 0)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_is_the_chance_that_one_of_k_drawn_answers_is_right(k: int) -> None:
    enough = [scores for scores in SOLVED if len(scores) >= k]
    drawn = [fmean(any(chosen) for chosen in combinations(scores, k)) for scores in enough]
    found = rates()[f"pass@{k}"]
    assert found.value == pytest.approx(fmean(drawn))
    assert (found.scored, found.played) == (len(enough), 5)


def test_the_success_is_the_mean_over_problems_and_its_interval_is_over_them() -> None:
    means = [fmean(scores) for scores in SOLVED]
    found = summarise(groups())
    assert (found.problems, found.scored, found.failed) == (5, 5, 0)
    assert found.success == pytest.approx(fmean(means))
    assert found.interval == pytest.approx(mean_interval(means), abs=1e-9) or found.interval == pytest.approx(
        tuple(min(1.0, max(0.0, end)) for end in mean_interval(means) or ())
    )
    assert rates()["avg@4"].value == found.success


VOTES = (("9", "9", "9"), ("132", "132", "9"), ("132", "132", "7"))
"""What three agents say in three attempts at a task whose answer is 132; the teams' own votes are for 9, 132 and 132."""


@pytest.mark.parametrize(
    ("workflow", "attempts"),
    [
        (Vote(), [dict(zip("abc", map(lines, said), strict=True)) for said in VOTES]),
        (Debate(rounds=1), [dict(zip("abc", map(lines, said), strict=True)) for said in VOTES]),
        (
            Reflect(attempts=2),
            [
                {"a": lines("9"), "b": lines("9 is it. ACCEPT\nACCEPT")},
                {"a": lines("132"), "b": lines("It is no 9.\nACCEPT")},
                {"a": lines("9", "132"), "b": lines("9 is wrong.")},
            ],
        ),
    ],
    ids=["vote", "debate", "reflect"],
)
async def test_the_majority_is_over_answers_of_the_team_and_no_agent_s(
    workflow: Workflow, attempts: list[dict[str, Say]]
) -> None:
    played = [await play(Arithmetic(), workflow, list(scripts), scripts, TASK) for scripts in attempts]
    whole = group(*(each for [each] in played))
    assert [each.success for each in whole.episodes] == [0.0, 1.0, 1.0]
    assert at_k([whole], 3, Arithmetic(), 0)["maj@3"].value == 1.0
    again = load_groups(json.loads(line) for line in dump_groups(0, [whole]).splitlines())
    assert at_k(again, 3, Arithmetic(), 0)["maj@3"].value == 1.0, "the file of episodes keeps the answers"


def test_where_no_answer_is_named_the_last_text_is_it() -> None:
    said = [replace(turn("a", 0), text=text) for text in ("9", "132", "132")]
    whole = group(*(episode(each, task=TASK, success=float(each.text == "132")) for each in said))
    assert at_k([whole], 3, Arithmetic(), 0)["maj@3"].value == 1.0


def rows(folder: Path, name: str, *numbers: int) -> str:
    """Write problems of one kind, each asking for its number; return the file."""
    (folder / name).mkdir(exist_ok=True)
    for split, shift in (("train", 0), ("test", 100)):
        lines = [{"question": f"{name} {k + shift}?", "answer": f"#### {k}"} for k in numbers]
        (folder / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / name)


def settings(folder: Path, **evaluation: Any) -> dict[str, Any]:
    given = sections(
        environment={"name": "math", "path": rows(folder, "main", 1, 2, 3)},
        workflow={"name": "chain"},
        training={"steps": 1, "tasks_per_step": 2},
    )
    sets = {
        name: {"name": "math", "path": rows(folder, name, *numbers)}
        for name, numbers in (("easy", (1, 2)), ("hard", (3, 4, 5)))
    }
    return {**given, "evaluation": {"problems": 10, "sets": sets, **evaluation}}


def recipe(folder: Path, **evaluation: Any) -> str:
    (folder / "own.yaml").write_text(yaml.safe_dump({"name": "own", **settings(folder, **evaluation)}))
    return str(folder / "own.yaml")


def test_the_episodes_of_a_set_name_it_as_their_part(tmp_path: Path) -> None:
    with Trainer(resolve(settings(tmp_path, greedy=False, samples=2))) as trainer:
        found = trainer.evaluate()
        assert [(each.task.part, len(each.episodes)) for each in found.groups] == [
            *[("", 2)] * 3, *[("easy", 2)] * 2, *[("hard", 2)] * 3,
        ]  # fmt: skip
        again = trainer.evaluate()
        assert again.row() == found.row(), "the same seeds, the same answers"


def test_a_problem_that_is_trained_on_is_no_test(tmp_path: Path) -> None:
    given = settings(tmp_path)
    trained = (tmp_path / "main" / "train.jsonl").read_text().splitlines()[0].replace("main 1", "MAIN  1")
    with (tmp_path / "hard" / "test.jsonl").open("a") as file:
        file.write("\n" + trained)
    with pytest.raises(
        ConfigError,
        match=r"`evaluation\.sets\.hard`: 1 of its 4 problems are also in the training data .*'MAIN  1\?'",
    ):
        prepare(resolve(given))
