from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.support.episodes import episode, group, turn

from kapelle.runs.exports import dump_rows, episode_reward, good_episodes, preferred, sft_rows
from kapelle.types import Message

FIRST = turn("a", 0, text="2,11", new_messages=(Message("system", "Add."), Message("user", "47+85")))
OTHER = turn("b", 1, text="122", new_messages=(Message("user", "2,11"),))
NEXT = replace(
    turn("a", 2, text="2,11+1", new_messages=(Message("user", "wrong"),)),
    prompt_ids=(*FIRST.prompt_ids, *FIRST.completion_ids, 7),
)
TALK = episode(FIRST, OTHER, NEXT, rewards={"b": 1.0}, success=0.5)


def test_a_row_is_the_agents_conversation_and_its_answer() -> None:
    rows = sft_rows(3, TALK)
    assert [(row["turn"], row["agent"], row["completion"]) for row in rows] == [
        (0, "a", "2,11"),
        (1, "b", "122"),
        (2, "a", "2,11+1"),
    ]
    assert rows[1]["messages"] == [{"role": "user", "content": "2,11"}]
    assert rows[2]["messages"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "47+85"},
        {"role": "assistant", "content": "2,11"},
        {"role": "user", "content": "wrong"},
    ]
    assert {(row["task"], row["episode"], row["reward"], row["weights_hash"]) for row in rows} == {
        ("t0", 3, 0.5, "h")
    }


def test_a_new_conversation_has_no_earlier_messages() -> None:
    anew = replace(NEXT, prompt_ids=(8, 9))
    row = sft_rows(0, episode(FIRST, OTHER, anew, success=1.0))[2]
    assert row["messages"] == [{"role": "user", "content": "wrong"}]


def test_the_reward_is_the_score_or_the_mean_return() -> None:
    assert episode_reward(TALK) == 0.5
    game = episode(turn("a", 0, reward=1.0), turn("b", 1), rewards={"a": 2.0, "b": 1.0})
    assert episode_reward(game) == 2.0


def test_only_episodes_that_ended_well_are_kept() -> None:
    attempts = [
        episode(turn("a", 0), success=success, error=error)
        for success, error in ((0.9, None), (1.0, None), (1.0, "broke"), (0.2, None))
    ]
    assert [number for number, _ in good_episodes([group(*attempts)], 0.9)] == [0, 1]
    assert list(good_episodes([group(*attempts)], 1.1)) == []


@pytest.mark.parametrize("text", ["ü ✓", "line\nbreak", "\ud800", '"quoted"'])
def test_every_text_comes_back_from_one_line(text: str) -> None:
    data = dump_rows(sft_rows(0, episode(turn("a", 0, text=text), success=1.0)))
    assert data.count(b"\n") == 1
    assert json.loads(data)["completion"] == text


def test_pairs_are_the_answers_furthest_apart_that_differ() -> None:
    def row(messages: str, completion: str, reward: float) -> dict[str, object]:
        return {"agent": "a", "messages": messages, "completion": completion, "reward": reward}

    rows = [
        row("one", "12", 0.0), row("one", "13", 1.0), row("one", "14", 0.5),
        row("two", "same", 1.0), row("two", "same", 0.0), row("two", "other", 0.25),
        row("three", "same", 1.0), row("three", "same", 0.0),
        row("four", "alone", 1.0),
    ]  # fmt: skip
    assert preferred(rows) == [rows[1], rows[0], rows[3], rows[5]]
