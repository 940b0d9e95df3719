from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.episode_lines import change_rows
from tests.support.viewed_runs import AGENTS, client_of, group, turn, write_run

from kapelle.runs.episode_json import dump_episode
from kapelle.types import Episode, Message, Task
from kapelle.viewer.episode import (
    conversation,
    episode_of,
    read_episode,
    read_step,
    sees,
    witnesses,
)
from kapelle.viewer.lines import parsed


def viewed(episode: Episode) -> Any:
    row = parsed(dump_episode(episode, step=1, group=0))
    assert row is not None
    return episode_of(row, 0)


def test_a_recorded_episode_is_read_as_it_was(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    read = read_episode(run, "train", 2, 2)
    (written, _) = group(2, 1).episodes
    assert read is not None
    assert (read.task, read.question, read.success, read.group) == ("t2-1", "2+1", 1.0, 1)
    assert [t.text for t in read.turns] == [t.text for t in written.turns]
    assert read.rewards == dict(written.rewards)
    again, siblings, count = read_step(run, "train", 2, 2)
    assert (again, [each.line for each in siblings], count) == (read, [2, 3], 4)
    assert read_step(run, "train", 2, 9) == (None, [], 4)
    assert read_episode(run, "train", 2, 9) is None
    assert read_episode(run, "test", 2, 0) is None


@pytest.mark.parametrize(
    ("said", "new_messages", "read"),
    [
        ("12", "1/2 L1 X R12345", False),
        ("12", "R12345, then 12", True),
        ("12", "12", True),
        ("7*8=56", "He wrote 7*8=56.", True),
        ("7*8=56", "17*8=561", False),
        ("好", "她说你好了", True),
        ("(1)", "a(1)b", True),
    ],
)
def test_quotes_end_at_word_boundaries(said: str, new_messages: str, read: bool) -> None:
    turns = (turn("solver", 0, said), turn("critic", 1, "ok", new_messages=(Message("user", new_messages),)))
    assert witnesses(viewed(Episode(Task("t", "q"), 0, AGENTS, turns)))[0] == (["critic"] if read else [])


def test_an_agent_sees_quoted_text_of_earlier_turns() -> None:
    turns = (
        turn("solver", 0, "secret plan", new_messages=(Message("user", "q"),)),
        turn("solver", 1, "hint 7", new_messages=()),
        turn("critic", 2, "ok", new_messages=(Message("user", "The solver said: hint 7"),)),
        turn("solver", 3, "late", new_messages=(Message("user", "ok"),)),
    )
    episode = viewed(Episode(Task("t", "q"), 0, AGENTS, turns))
    assert witnesses(episode) == {0: [], 1: ["critic"], 2: ["solver"], 3: []}
    hidden = [drawn["hidden"] for drawn in conversation(episode, {}, {}, "critic")]
    assert hidden == [True, False, False, True]
    assert not any(drawn["hidden"] for drawn in conversation(episode, {}, {}, ""))
    early = viewed(
        Episode(
            Task("t", "q"),
            0,
            AGENTS,
            (turns[0], turn("critic", 1, "x", completed_before=0, new_messages=turns[2].new_messages)),
        )
    ).turns
    assert not sees(early[1], early[0], [early[1]]), "it was not said yet when the prompt was fixed"


def test_summaries_and_removed_messages_are_marked(tmp_path: Path) -> None:
    def compact(line: int, row: dict[str, Any]) -> None:
        row["turns"][0]["summary"], row["turns"][1]["dropped"] = line == 0, 3

    change_rows(write_run(tmp_path / "run", steps=1) / "episodes" / "train", compact)
    with client_of(tmp_path) as web:
        first, second = (web.get(f"/run/run/episode/train/1/{line}").text for line in (0, 1))
    assert (first.count("summary of its conversation"), second.count("summary of its conversation")) == (1, 0)
    assert second.count("3 earlier messages removed from the conversation") == 1


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"task": [], "turns": {}, "rewards": 3, "agents": "x", "info": []},
        {
            "turns": [
                None,
                7,
                {
                    "agent": {"a": 1},
                    "prompt_ids": "x",
                    "logprobs": [None, "a", float("inf")],
                    "new_messages": [4],
                },
            ]
        },
        {
            "turns": [{"agent": "a", "index": -1, "completed_before": 10**30, "completion_ids": [1.5, None]}],
            "agents": [None, 3],
        },
        {"task": {"id": 5, "question": ["x"]}, "success": "yes", "error": {"a": 1}, "truncated": 1},
    ],
)
def test_any_row_can_be_shown(row: dict[str, Any]) -> None:
    episode = episode_of(row, 0)
    conversation(episode, {}, {}, "a")
    assert episode.tokens >= 0
