from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Kapelle, Said
from tests.support.stopping import interrupt_at
from tests.support.tiny import tiny_model

from kapelle.cli import collect
from kapelle.environments.recorded import Preferences
from kapelle.models.weights import save_model
from kapelle.runtime.row_files import read_rows


def rows(path: str = "sft.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]


def rows_of(path: str) -> list[dict[str, Any]]:
    return [dict(row.fields) for row in read_rows(Path(path))]


def collecting(run: Path, tasks: int, samples: int) -> tuple[str, ...]:
    """The words that collect every episode of so many tasks."""
    out = ("--out", "sft.jsonl", "--min-reward", "0")
    return ("collect", str(run), *out, "--tasks", str(tasks), "--samples", str(samples))


def test_episodes_of_train_tasks_become_rows_for_sft(kapelle: Kapelle, finished: tuple[Path, Said]) -> None:
    words = collecting(finished[0], tasks=3, samples=2)
    said = kapelle(*words, "--json")
    assert said.code == 0, said.err
    found = rows()
    assert (said.json["played"], said.json["kept"], said.json["turns"]) == (6, 6, len(found)) == (6, 6, 12)
    assert [(row["agent"], row["episode"]) for row in found[:4]] == [
        ("reasoner", 0),
        ("actor", 0),
        ("reasoner", 1),
        ("actor", 1),
    ]
    assert all(row["task"].startswith("train-") for row in found)
    assert found[1]["messages"] == [{"role": "user", "content": found[0]["completion"]}]
    assert {row["version"] for row in found} == {2}
    assert [path.name for path in Path().iterdir()] == ["sft.jsonl"]


def test_a_reward_that_no_episode_reached_comes_with_the_highest_one(
    kapelle: Kapelle, finished: tuple[Path, Said]
) -> None:
    for words in (("--tasks", "2"), ("--recorded", "")):
        collect_from = ("collect", str(finished[0]), "--out", f"{words[0][2:]}.jsonl", *words)
        said = kapelle(*collect_from, "--min-reward", "7")
        assert said.code == 2
        highest = re.search(r"the highest is (\d+)\.", said.err)
        assert highest is not None, said.err


def test_what_a_further_set_tests_is_not_collected(kapelle: Kapelle) -> None:
    save_model(Path("model"), tiny_model())
    words = (
        "collect", "--model", "model", "--environment", "arithmetic", "team.sampling.max_tokens=3",
        "--min-reward", "0", "--tasks", "4", "--samples", "1",
    )  # fmt: skip
    assert kapelle(*words, "--out", "all.jsonl").code == 0
    asked = [row["messages"][-1]["content"] for row in rows("all.jsonl")]
    Path("set").mkdir()
    for name, question in (("test", f" {asked[1].replace('+', ' + ')} ?"), ("train", "another?")):
        Path("set", f"{name}.jsonl").write_text(json.dumps({"question": question, "answer": "#### 1"}))
    said = kapelle(*words, "--out", "rest.jsonl", "evaluation.sets.held={name: math, path: set}")
    assert said.code == 0, said
    left = [row["messages"][-1]["content"] for row in rows("rest.jsonl")]
    assert len(left) == len(asked)
    assert [each for each in asked if each in left] == [asked[0], *asked[2:]]


def test_ctrl_c_keeps_what_was_collected(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, finished: tuple[Path, Said]
) -> None:
    monkeypatch.setattr(collect, "TASKS_AT_ONCE", 2)
    interrupt_at("4/", collect, monkeypatch)
    said = kapelle(*collecting(finished[0], tasks=8, samples=1), "--json")
    assert (said.code, said.json["stopped_by"], said.json["kept"]) == (130, 130, 4)
    assert len({row["task"] for row in rows()}) == 4


class TestWithoutSettings:
    """What is collected is read as it is: `mrlm collect … -n N -o FILE.json` in the words of MRLM's README."""

    def collected(self, kapelle: Kapelle, run: Path, *words: str) -> list[dict[str, Any]]:
        said = kapelle("collect", str(run), *words)
        assert said.code == 0, said.err
        return rows_of(words[words.index("-o") + 1])

    def test_completions_with_different_rewards_become_preferences(self, kapelle: Kapelle) -> None:
        asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
        others = [{"role": "user", "content": f"{k}+2"} for k in range(40)]
        rows = [
            {"agent": "a", "messages": asked, "completion": text, "reward": reward, "task": "train-0"}
            for text, reward in (("3", 0.0), ("2", 1.0), ("two", 0.5))
        ]
        for k, other in enumerate(others):
            rows += [
                {"agent": "a", "messages": [other], "completion": f"{k}", "reward": 0.0, "task": "t"},
                {"agent": "a", "messages": [other], "completion": f"{k + 1}", "reward": 1.0, "task": "t"},
            ]
        rows.append(
            {
                "agent": "a",
                "messages": [{"role": "user", "content": "9+9"}],
                "completion": "18",
                "reward": 1.0,
                "task": "t",
            }
        )
        Path("pairs.json").write_text(json.dumps(rows))
        settings = Preferences(path="pairs.json")
        tasks = [
            settings.task(split, k) for split in ("train", "test") for k in range(settings.size(split) or 0)
        ]
        assert len(tasks) == 41, "one pair for each question that was answered both ways"
        (one,) = [task for task in tasks if task.question == "1+1"]
        assert [settings.recorded("a", one, 0, sample) for sample in range(2)] == ["2", "3"]
