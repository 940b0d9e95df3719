"""Programs read the rows of a data set, and graders outside of them reward their answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.services.policy.test_programs import echo
from tests.support.serving import Reciting, staged

from kapelle.rollout.setup import RolloutSetup

ENTRY = """
from openai import OpenAI

def episode(task):
    client = OpenAI()
    for agent in ("first", "second"):
        client.chat.completions.create(model=f"team/{agent}", messages=[{"role": "user", "content": task["question"]}])
    return task["row"]["hint"] if task["split"] == "train" else 0.5
"""
COMMAND = """
import json, sys
from openai import OpenAI

task = json.load(sys.stdin)
client = OpenAI()
client.chat.completions.create(model="team/first", messages=[{"role": "user", "content": task["question"]}])
client.post("/reward", body={"answer": task["row"]["hint"]}, cast_to=object)
"""
REWARDS = """
def share(completion, completions, answer):
    return sum(letter in answer for letter in completion) / len(answer) + 0.0 * len(completions)
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Four questions with an answer and a hint; the hints of even questions are correct."""
    file = tmp_path / "train.jsonl"
    made = [
        {"question": f"{k} + {k} = ?", "answer": f"#### {2 * k}", "hint": f"#### {2 * k + k % 2}"}
        for k in range(4)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in made), "utf-8")
    test = [{"question": "9 + 9 = ?", "answer": "#### 18", "hint": ""}]
    (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in test), "utf-8")
    return tmp_path


def test_a_grader_rewards_the_answer_of_an_entry(setup: RolloutSetup, rows: Path) -> None:
    (rows / "app.py").write_text(ENTRY, "utf-8")
    questions = {"name": "math", "path": str(rows), "config": None, "extraction": ["hash"]}
    with staged(setup, Reciting(echo), 4, entry=f"{rows}/app.py:episode", questions=questions) as stage:
        pass
    found = []
    for episode in stage.episodes:
        assert episode.error is None
        assert [turn.text for turn in episode.turns] == [f"to {episode.task.question}"] * 2
        assert set(episode.rewards) == {"first", "second"}
        assert set(episode.rewards.values()) == {episode.success}
        found.append((episode.task.question, episode.info["answer"], episode.success))
    assert found == [
        ("0 + 0 = ?", "#### 0", 1.0),
        ("1 + 1 = ?", "#### 3", 0.0),
        ("2 + 2 = ?", "#### 4", 1.0),
        ("3 + 3 = ?", "#### 7", 0.0),
    ]


def test_reward_functions_reward_the_answer_of_a_command(setup: RolloutSetup, rows: Path) -> None:
    """The function reads the answer and the columns of the row; by hand: the letters of `#### 3` that are in `#### 2`."""
    (rows / "app.py").write_text(COMMAND, "utf-8")
    (rows / "mine.py").write_text(REWARDS, "utf-8")
    questions = {"name": "rewarded", "path": str(rows), "rewards": f"{rows}/mine.py:share"}
    command = (sys.executable, f"{rows}/app.py")
    with staged(setup, Reciting(echo), 2, command=command, questions=questions) as stage:
        pass
    assert [episode.error for episode in stage.episodes] == [None, None]
    assert [dict(episode.rewards) for episode in stage.episodes] == [{"first": 1.0}, {"first": 5 / 6}]
    assert [episode.info["reward/share"] for episode in stage.episodes] == [1.0, 5 / 6]


def test_an_answer_without_a_grader_is_rejected(setup: RolloutSetup, tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text(ENTRY.replace('task["row"]["hint"]', '"42"'), "utf-8")
    with staged(setup, Reciting(echo), entry=f"{file}:episode") as stage:
        pass
    assert "This run has no grader for answers" in str(stage.episodes[0].error)
