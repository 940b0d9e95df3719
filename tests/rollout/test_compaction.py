"""Conversations that no longer fit continue from their ends: what is kept, what is recorded, and that it is trained as it was read."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tiny import sections

from kapelle import Trainer
from kapelle.features.compaction.settings import CompactionConfig
from kapelle.rollout.compaction import compacted
from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.runs.exports import sft_rows
from kapelle.setup.recipe import resolve
from kapelle.types import Message, Turn

TALK = [Message("system", "s"), *(Message(("user", "assistant")[k % 2], f"m{k}") for k in range(9))]
"""A system message, five of the user and four answers."""


def said(messages: list[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


def test_the_ends_of_a_conversation_stay_under_a_note() -> None:
    rule = CompactionConfig(keep_first=1, keep_last=2)
    found, dropped = compacted(TALK, rule, lambda _: True)
    assert dropped == 6
    assert said(found) == [
        ("system", "s"),
        ("user", "m0\n\n[6 messages are omitted here.]"),
        ("assistant", "m7"),
        ("user", "m8"),
    ]


def test_messages_of_one_role_that_meet_become_one() -> None:
    rule = CompactionConfig(keep_first=1, keep_last=3, note="")
    found, dropped = compacted(TALK, rule, lambda _: True)
    assert (said(found)[1:], dropped) == ([("user", "m0\n\nm6"), ("assistant", "m7"), ("user", "m8")], 5)
    _, dropped = compacted(TALK, CompactionConfig(keep_first=1, keep_last=99), lambda _: True)
    assert dropped == 1, "at least one is removed"
    nothing_first, _ = compacted(TALK, CompactionConfig(keep_first=0, keep_last=2), lambda _: True)
    assert said(nothing_first) == [
        ("system", "s"),
        ("user", "[7 messages are omitted here.]"),
        *said(TALK[-2:]),
    ]


@given(st.integers(0, 4), st.integers(1, 12), st.integers(3, 30), st.booleans())
def test_what_stays_is_in_order_and_ends_as_before(first: int, last: int, size: int, system: bool) -> None:
    talk = [*([Message("system", "s")] if system else [])]
    talk += [Message(("user", "assistant")[k % 2], f"<{k}>") for k in range(2 * size + 1)]
    found, dropped = compacted(
        talk, CompactionConfig(keep_first=first, keep_last=last, note=""), lambda _: True
    )
    kept = [k for k in range(2 * size + 1) if any(f"<{k}>" in message.content for message in found)]
    assert kept == sorted(kept)
    assert kept[-1] == 2 * size
    assert len(kept) + dropped == 2 * size + 1
    roles = [message.role for message in found if message.role != "system"]
    assert all(one != other for one, other in pairwise(roles)) or first == 0


def config(**compaction: Any) -> dict[str, Any]:
    given = sections(
        environment={"name": "arithmetic"},
        workflow={"name": "debate", "rounds": 6},
        training={"steps": 1, "tasks_per_step": 2},
    )
    given["team"] = {**given["team"], "sampling": {"max_tokens": 6}}
    return {**given, "episode": {"compaction": compaction}, "evaluation": {"before_and_after": False}}


def turns(trainer: Trainer) -> list[Turn]:
    [step] = list(trainer.steps(1))
    return [turn for group in step.groups for episode in group.episodes for turn in episode.turns]


def test_a_long_debate_stays_below_the_limit_and_is_trained_as_it_was_read(tmp_path: Path) -> None:
    with Trainer(resolve(config(over=200, keep_last=2)), run_dir=tmp_path / "run") as trainer:
        [step] = list(trainer.steps(1))
        groups = step.groups
        assert all(episode.error is None for group in groups for episode in group.episodes)
        found = [turn for group in groups for e in group.episodes for turn in e.turns]
        assert any(turn.dropped for turn in found)
        assert max(len(turn.prompt_ids) for turn in found) <= 200
        assert step.metrics["parity/max"] < 1e-4, "it is trained as it was read"
        shares = [value for name, value in step.metrics.items() if name.startswith("compacted/")]
        assert shares
        assert all(0 < share < 1 for share in shares)
        episode = groups[0].episodes[0]
        for turn in (turn for turn in episode.turns if turn.dropped):
            renderer = trainer.setup.engine.renderer(turn.policy)
            assert renderer.start(turn.new_messages) == turn.prompt_ids, "what was read is what is recorded"
            assert f"[{turn.dropped} messages are omitted here.]" in "".join(
                m.content for m in turn.new_messages
            )
        assert load_episode(json.loads(dump_episode(episode))) == episode
        rows = {row["turn"]: row for row in sft_rows(0, episode)}
        shortened = next(turn for turn in episode.turns if turn.dropped)
        assert [m["content"] for m in rows[shortened.index]["messages"]] == [
            m.content for m in shortened.new_messages
        ]
    with Trainer(resolve(config(over=200, keep_last=2))) as again:
        assert [turn.completion_ids for turn in turns(again)] == [turn.completion_ids for turn in found]


def test_without_it_an_episode_that_outgrows_the_model_fails() -> None:
    given = config()
    given["workflow"] = {"name": "debate", "rounds": 9}
    with Trainer(resolve(given)) as trainer:  # `over: null`: where the answer would not fit
        [step] = list(trainer.steps(1))
        assert all(episode.error is None for group in step.groups for episode in group.episodes)
        assert (
            max(len(turn.prompt_ids) for g in step.groups for e in g.episodes for turn in e.turns) <= 256 - 6
        )
    del given["episode"]
    with (
        Trainer(resolve(given)) as trainer,
        pytest.raises(Exception, match=r"has \d+ tokens; its model reads.* 256"),
    ):
        list(trainer.steps(1))
