"""Recorded data as episodes: texts, rewards, splits, and errors in files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.support.tiny import sections

from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.environments.recorded import Labelled, Preferences, Trajectories
from kapelle.errors import ConfigError, DataError
from kapelle.training.trainer import Trainer
from kapelle.types import Episode


def folder(
    place: Path, train: Sequence[Mapping[str, Any]], test: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Write both splits as JSON lines."""
    default = [
        {**row, **{k: f"other {row[k]}" for k in ("question", "prompt") if k in row}} for row in train[:1]
    ]
    for name, rows in (("train", train), ("test", test if test is not None else default)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(place)


def played(
    environment: dict[str, Any], algorithm: dict[str, Any] | None = None, **over: Any
) -> list[Episode]:
    """Return the episodes of one step with a teacher."""
    run = Trainer(
        **sections(
            **{
                "environment": environment,
                "workflow": {"name": "solo"},
                "algorithm": algorithm or {"name": "sft"},
                "team": {"agents": 1, "lora": {"rank": 2}},
                "training": {"steps": 1, "tasks_per_step": 1},
                **over,
            }
        )
    )
    return [episode for group in next(run.steps(1)).groups for episode in group.episodes]


def read_and_written(episode: Episode) -> list[tuple[str, str, str]]:
    """Return (agent, what it read, what it wrote) of every turn."""
    assert episode.error is None, episode.error
    return [(t.agent, t.new_messages[-1].content, t.text) for t in episode.turns]


class TestTrajectories:
    def test_a_question_and_an_answer(self, tmp_path: Path) -> None:
        path = folder(tmp_path, [{"question": "1+1", "answer": "2"}])
        (one,) = played({"name": "trajectories", "path": path})
        assert read_and_written(one) == [("agent_0", "1+1", "2")]
        assert (one.rewards, one.success) == ({"agent_0": 1.0}, 1.0)

    def test_each_agent_writes_its_own_part(self, tmp_path: Path) -> None:
        path = folder(tmp_path, [{"question": "47+85", "notes": "2,12+1", "answer": "132"}])
        (one,) = played(
            {"name": "trajectories", "path": path, "answers": {"reasoner": "notes"}},
            workflow={"name": "chain"},
            team={
                "agents": [{"name": "reasoner"}, {"name": "actor", "prompt": "{reasoner}"}],
                "lora": {"rank": 2},
            },
        )
        assert read_and_written(one) == [("reasoner", "47+85", "2,12+1"), ("actor", "2,12+1", "132")]

    def test_each_answer_in_a_conversation_is_a_turn(self, tmp_path: Path) -> None:
        rows = [
            {"talk": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Ho"},
                {"role": "tool", "content": "7"},
                {"role": "user", "content": "And?"},
                {"role": "assistant", "content": "Seven"},
            ]},
        ]  # fmt: skip
        path = folder(
            tmp_path, rows, [{"talk": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]}]
        )
        (one,) = played(
            {"name": "trajectories", "path": path, "messages_field": "talk"}, workflow={"name": "parallel"}
        )
        assert read_and_written(one) == [("agent_0", "Hi", "Ho"), ("agent_0", "And?", "Seven")]

    def test_collected_rows_belong_to_their_agent(self, tmp_path: Path) -> None:
        rows = [
            {"agent": "agent_1", "messages": [{"role": "user", "content": "2,11+1"}], "completion": "132"},
        ]
        other = [{**rows[0], "messages": [{"role": "user", "content": "1,1"}]}]
        (one,) = played(
            {
                "name": "trajectories",
                "path": folder(tmp_path, rows, other),
                "messages_field": "messages",
                "answer_field": "completion",
                "agent_field": "agent",
            },
            workflow={"name": "parallel"},
            team={"agents": 2, "lora": {"rank": 2}},
        )
        assert read_and_written(one) == [("agent_1", "2,11+1", "132")]

    def test_questions_of_the_test_split_are_excluded(self, tmp_path: Path) -> None:
        rows = [{"question": q, "answer": "x"} for q in "abc"]
        path = folder(tmp_path, rows, [{"question": "b", "answer": "y"}])
        environment = Trajectories(path=path)
        assert [environment.task("train", k).question for k in range(environment.size("train") or 0)] == [
            "a",
            "c",
        ]

    def test_the_line_and_field_of_what_is_missing(self, tmp_path: Path) -> None:
        path = folder(tmp_path, [{"question": "a", "answer": "x"}, {"question": "b", "anser": "y"}])
        with pytest.raises(DataError, match=r"line 2 has no field 'answer'"):
            Trajectories(path=path).check(["a"])

    def test_a_conversation_without_roles_is_refused_with_its_place(self, tmp_path: Path) -> None:
        path = folder(
            tmp_path, [{"talk": [{"role": "user"}]}], [{"talk": [{"role": "user", "content": "x"}]}]
        )
        with pytest.raises(DataError, match=r"line 1: message 0"):
            Trajectories(path=path, messages_field="talk").check(["a"])


PAIR = {"prompt": "Say a.", "chosen": "a", "rejected": "b"}


class TestPreferences:
    def test_a_group_is_a_pair_and_dpo_learns_from_it(self, tmp_path: Path) -> None:
        chosen, rejected = played(
            {"name": "preferences", "path": folder(tmp_path, [PAIR])}, {"name": "dpo", "data": "recorded"}
        )
        assert read_and_written(chosen) == [("agent_0", "Say a.", "a")]
        assert read_and_written(rejected) == [("agent_0", "Say a.", "b")]
        assert [e.rewards["agent_0"] for e in (chosen, rejected)] == [1.0, 0.0]

    def test_messages_and_conversations_are_answers_too(self, tmp_path: Path) -> None:
        rows = [
            {
                "talk": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Ho"},
                    {"from": "human", "value": "?"},
                ],
                "chosen": {"from": "gpt", "value": "yes"},
                "rejected": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "no"}],
            }
        ]
        other = [{**rows[0], "talk": [{"from": "human", "value": "Hi"}]}]
        environment = Preferences(path=folder(tmp_path, rows, other), question_field="talk")
        environment.check(["a"])
        task = environment.task("train", 0)
        assert task.question == "user: Hi\n\nassistant: Ho\n\nuser: ?"
        assert [environment.recorded("a", task, 0, k) for k in range(3)] == ["yes", "no", "yes"]
        assert environment.task("test", 0).question == "Hi"

    def test_equal_answers_are_no_pair(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="line 1"):
            Preferences(path=folder(tmp_path, [{**PAIR, "rejected": "a"}])).check(["a"])


class TestLabelled:
    ROWS: ClassVar = (
        {"question": "1+1", "s": {"text": "2", "ok": True}, "l": {"text": "3", "ok": False}},
        {"question": "1+1", "s": {"text": "4", "ok": 0.25}, "l": {"text": "2", "ok": True}},
    )
    FIELDS: ClassVar = {"s.text": "s.ok", "l.text": "l.ok"}

    def environment(self, place: Path, **over: Any) -> Labelled:
        return Labelled(path=folder(place, [{**self.ROWS[0], **over}, self.ROWS[1]]), solutions=self.FIELDS)

    def test_all_solutions_of_a_question_are_its_group(self, tmp_path: Path) -> None:
        group = played(
            self.environment(tmp_path).model_dump(),
            {"name": "verifier", "data": "recorded", "group_size": 4},
            team={"sharing": "frozen", "agents": 1},
        )
        assert [(e.turns[0].text, e.rewards["agent_0"]) for e in group] == [
            ("2", 1.0), ("3", 0.0), ("4", 0.25), ("2", 1.0),
        ]  # fmt: skip

    def test_a_label_that_is_none_is_refused_with_its_place(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"line 1: the label 's\.ok'"):
            self.environment(tmp_path, s={"text": "2", "ok": "yes"}).check(["a"])

    def test_a_field_inside_that_is_missing_is_named_whole(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"line 1 has no field 's\.text'"):
            self.environment(tmp_path, s={"txt": "2", "ok": True}).check(["a"])


class TestRefused:
    def test_playing_for_rewards_on_records(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="recorded"):
            played(
                {"name": "preferences", "path": folder(tmp_path, [PAIR])}, {"name": "grpo", "group_size": 2}
            )


def test_a_policy_on_records_is_paid_for_recorded_words_alone(tmp_path: Path) -> None:
    run = Trainer(
        **sections(
            environment={"name": "preferences", "path": folder(tmp_path, [PAIR])},
            workflow={"name": "solo"},
            algorithm={"name": "sft"},
            team={"agents": 1, "lora": {"rank": 2}, "sampling": {"max_tokens": 3}},
        )
    )
    result = run.evaluate(1)
    assert result.success is None
    assert result.failed == 0
    assert isinstance(run.engine, TorchTrainEngine)


@pytest.mark.data
class TestRealData:
    def test_harmless_transcripts(self, data_folder: Path) -> None:
        environment = Preferences(
            path=str(data_folder / "preference" / "hh_harmless_base_test.jsonl.gz"), question_field=None
        )
        total = sum(environment.size(split) or 0 for split in ("train", "test"))
        assert 2250 <= total <= 2312  # rows whose question is held out with another row's are omitted
        task = environment.task("train", 0)
        assert {message.role for message in task.messages[0]} == {"user", "assistant"}
        assert environment.recorded("a", task, 0, 0) != environment.recorded("a", task, 0, 1)

    def test_gsm8k_solutions_by_four_models(self, data_folder: Path) -> None:
        file = data_folder / "gsm8k" / "example_model_solutions.jsonl.gz"
        models = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
        environment = Labelled(path=str(file), solutions={f"{m}.solution": f"{m}.is_correct" for m in models})
        environment.check(["a"])
        with gzip.open(file, "rt") as lines:
            rows = [json.loads(line) for line in lines]
        assert sum(environment.size(split) or 0 for split in ("train", "test")) == len(
            {r["question"] for r in rows}
        )
        seen: dict[str, set[str]] = {}
        for split in ("train", "test"):
            for index in range(environment.size(split) or 0):
                seen.setdefault(environment.task(split, index).question, set()).add(split)
        assert all(len(splits) == 1 for splits in seen.values())
