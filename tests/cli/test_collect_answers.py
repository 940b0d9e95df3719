"""Graded answers as a file: written from a run, balanced, looked through, trained on, and what comes of it pays debaters."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.conftest import Kapelle, call
from tests.support.tiny import SIZE, sections, tiny_model

from kapelle.models.weights import save_model
from kapelle.runs.exports import balance
from kapelle.runs.reader import read_episodes, read_evaluations, read_metrics

TEAM = {"sharing": "frozen", "agents": 2, "critic_lora": {"rank": 2}, "sampling": {"max_tokens": 2}}
DEBATE = {"name": "debate", "rounds": 2, "score_rounds": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a frozen team whose answers are right or wrong by luck."""
    folder = tmp_path_factory.mktemp("judge")
    values = sections(
        environment={"name": "tests.support.plugins:Digest", "levels": 2, "tasks": 60},
        workflow=DEBATE,
        team=TEAM,
        algorithm={"name": "verifier", "group_size": 2},
        training={"steps": 1, "tasks_per_step": 2},
    )
    (folder / "judge.yaml").write_text(yaml.safe_dump(values))
    said = call("train", str(folder / "judge.yaml"), "--run-dir", str(folder / "run"))
    assert said.code == 0, said.err
    return folder / "run"


def collected(kapelle: Kapelle, run: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    said = kapelle("collect", str(run), "--for", "verifier", "--out", "a.jsonl", "--json", *words)
    assert said.code == 0, said.err
    return said.json, [json.loads(line) for line in Path("a.jsonl").read_bytes().splitlines()]


def kinds(rows: list[dict[str, Any]]) -> dict[str, Counter[bool]]:
    found: dict[str, Counter[bool]] = {}
    for row in rows:
        found.setdefault(row["question"], Counter())[row["is_correct"] > 0.5] += 1
    return found


class TestWriting:
    def test_each_question_has_as_many_right_as_wrong_answers_and_what_is_dropped_is_counted(
        self, kapelle: Kapelle, run: Path
    ) -> None:
        told, rows = collected(kapelle, run, "--tasks", "12", "--samples", "6")
        assert told["graded"] == 12 * 6 * 2 * 2
        assert told["answers"] == len(rows) > 0
        assert told["graded"] == sum(told[part] for part in ("answers", "repeated", "one_kind", "surplus"))
        assert all(counts[True] == counts[False] for counts in kinds(rows).values())
        assert len(kinds(rows)) == told["questions"]
        assert {row["agent"] for row in rows} == {"agent_0", "agent_1"}
        assert {row["round"] for row in rows} == {1, 2}
        assert all(row["task"].startswith("train-") for row in rows)
        assert len({(row["question"], row["solution"]) for row in rows}) == len(rows)


def row(question: str, solution: str, right: float, agent: str = "a", number: int = 1) -> dict[str, Any]:
    return {"question": question, "solution": solution, "is_correct": right, "agent": agent, "round": number}


MIXED = [
    *(row("q", text, 1.0) for text in ("1", "1", "one")),
    *(row("q", text, 0.0, "b", 2) for text in ("2", "3", "4")),
    row("easy", "5", 1.0),
    row("hard", "6", 0.0),
    row("hard", "7", 0.25),
]


class TestBalance:
    def test_by_hand(self) -> None:
        found = balance(MIXED, 0)
        assert {each["solution"] for each in found.rows if each["is_correct"]} == {"1", "one"}
        assert sum(not each["is_correct"] for each in found.rows) == 2
        assert (found.graded, found.repeated, found.one_kind, found.one_kind_questions, found.surplus) == (
            9, 1, 3, 2, 1,
        )  # fmt: skip

    def test_frequent_answers_are_kept_more_often(self) -> None:
        rows = [row("q", "1", 1.0), *(row("q", "2", 0.0) for _ in range(9)), row("q", "3", 0.0)]
        kept = Counter(each["solution"] for seed in range(200) for each in balance(rows, seed).rows)
        assert kept["1"] == 200
        assert 160 <= kept["2"] <= 198


class TestRefusals:
    def test_answers_of_one_kind_cannot_be_balanced(self, kapelle: Kapelle) -> None:
        # A model that was never trained does no sums.
        save_model(Path("model"), tiny_model())
        said = kapelle(
            "collect", "--model", "model", "--environment", "arithmetic", "team.sampling.max_tokens=3",
            "--for", "verifier", "--out", "a.jsonl", "--tasks", "2",
        )  # fmt: skip
        assert said.code == 2
        assert "None of the 2 questions has both correct and incorrect answers" in said.err
        assert "--no-balance" in said.err
        assert [path.name for path in Path().iterdir()] == ["model"]


@pytest.mark.slow
def test_a_verifier_trained_on_a_file_rewards_debaters(kapelle: Kapelle, run: Path) -> None:
    collected(kapelle, run, "--tasks", "60", "--samples", "6")
    tiny = [f"model.embedded.{key}={value}" for key, value in SIZE.items()]
    short = ("training.steps=4", "training.tasks_per_step=4", "evaluation.every=2")
    words = ("verifier_file", "environment.path=a.jsonl", *tiny, *short)
    said = kapelle("train", *words, "--run-dir", "judge", "--json")
    assert said.code == 0, said.err
    found = said.json["verifier"]
    assert found["questions"] >= found["both"] > 0
    assert 0 <= found["interval"][0] <= found["auc"] <= found["interval"][1] <= 1
    assert 0 <= found["calibration_error"] <= 1
    assert [row["step"] for row in read_evaluations(Path("judge"))] == [0, 2, 4]
    # What is tested on was never trained on: questions, not rows, are split.
    trained = {e.task.question for step in range(1, 5) for e in read_episodes(Path("judge"), step)}
    asked = {e.task.question for e in read_episodes(Path("judge"), 4, split="test")}
    assert trained
    assert asked
    assert not trained & asked

    folder = next(Path("judge/checkpoints").glob("*4")) / "verifier"
    values = sections(
        environment={"name": "tests.support.plugins:Digest", "levels": 2},
        workflow={**DEBATE, "score_rounds": False},
        algorithm={"name": "maporl", "verifier": str(folder), "least_auc": None},
        training={"steps": 1, "tasks_per_step": 2},
    )
    Path("debate.yaml").write_text(yaml.safe_dump(values))
    said = kapelle("train", "debate.yaml", "--run-dir", "debate")
    assert said.code == 0, said.err
    assert "verifier_score/agent_0" in read_metrics(Path("debate"))[0]
