"""A repeated call after a lost answer gets the same answer, and is one turn of its episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.services.policy.test_recording import episode, reward
from tests.support.breaking import breaking

from kapelle.services.policy.service import PolicyServer

QUESTION: list[Any] = [{"role": "user", "content": "2+2?"}]


def ask(client: OpenAI, session: str, **more: Any) -> Any:
    return client.chat.completions.create(
        model="duo/first",
        messages=QUESTION,
        max_tokens=8,
        extra_headers={"x-kapelle-session": session, **more.pop("headers", {})},
        **more,
    )


@pytest.mark.parametrize("n", [1, 2])
def test_a_lost_answer_is_repeated(server: PolicyServer, recorded: Path, n: int) -> None:
    session = f"lost-{n}"
    with (
        breaking(server.url.rpartition("/")[2], "before its answer", b"chat.completion") as relay,
        OpenAI(base_url=f"http://{relay.address}/v1", api_key="none", max_retries=4, timeout=60.0) as client,
    ):
        answer = ask(client, session, n=n)
        assert relay.broken.is_set()
        reply = reward(client, session, reward=1.0)
    assert "restarts" not in reply
    turns = episode(recorded, reply).turns
    assert [turn.text for turn in turns] == [choice.message.content for choice in answer.choices]
    assert len(turns) == n


def test_a_lost_stream_is_repeated(client: OpenAI, recorded: Path) -> None:
    again = {"x-stainless-retry-count": "1"}
    first = "".join(
        c.choices[0].delta.content or "" for c in ask(client, "streamed", stream=True) if c.choices
    )
    more = ask(client, "streamed", stream=True, headers=again)
    assert "".join(c.choices[0].delta.content or "" for c in more if c.choices) == first
    [turn] = episode(recorded, reward(client, "streamed", reward=1.0)).turns
    assert turn.text == first


def test_a_new_request_gets_a_new_answer(client: OpenAI, recorded: Path) -> None:
    """The same text without a retry, another question as a retry, and a retry in another session."""
    ask(client, "anew", headers={"idempotency-key": "a"})
    ask(client, "anew")
    ask(client, "anew", headers={"idempotency-key": "b"})
    ask(client, "anew", seed=4, headers={"x-stainless-retry-count": "1"})
    ask(client, "another", headers={"x-stainless-retry-count": "1"})
    assert len(episode(recorded, reward(client, "anew", reward=1.0)).turns) == 4
    ask(client, "anew", headers={"x-stainless-retry-count": "1"})
    assert len(episode(recorded, reward(client, "anew", reward=1.0)).turns) == 1, "a new session of that name"
