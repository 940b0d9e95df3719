"""Streamed answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
from openai import OpenAI
from tests.support.serving import Reciting

from kapelle.environments.arithmetic import Arithmetic
from kapelle.rollout.setup import RolloutSetup
from kapelle.services.binding import Binding
from kapelle.services.policy.service import ServingLimits, serve_policy

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "2+2?"}], "seed": 3, "max_tokens": 40}


def test_an_agents_pieces_make_the_whole(client: OpenAI) -> None:
    model = "duo/first"
    whole = client.chat.completions.create(model=model, **ASKED, n=2, logprobs=True)
    pieces = list(
        client.chat.completions.create(
            model=model, **ASKED, n=2, logprobs=True, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({piece.id for piece in pieces}) == 1
    assert pieces[-1].usage == whole.usage
    for k, choice in enumerate(whole.choices):
        own = [c for piece in pieces for c in piece.choices if c.index == k]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]
        received = [token for c in own if c.logprobs for token in c.logprobs.content or []]
        assert choice.logprobs is not None
        assert received == choice.logprobs.content
        assert sum(bool(c.delta.content) for c in own) > 1, "it came in pieces"


def test_a_team_answers_by_its_workflow(client: OpenAI) -> None:
    """Two agents debate for two rounds, and the answer contains their turns."""
    text = client.chat.completions.create(model="duo", **ASKED)
    assert text.choices[0].model_extra is not None
    turns = text.choices[0].model_extra["kapelle"]["turns"]
    assert [turn["agent"] for turn in turns] == ["first", "second"] * (len(turns) // 2)
    assert len(turns) >= 4
    assert text.choices[0].message.content in [turn["text"] for turn in turns[-2:]]
    assert text.usage is not None
    assert text.usage.completion_tokens == sum(turn["tokens"] for turn in turns)
    assert client.chat.completions.create(model="duo", **ASKED).choices == text.choices, "the seed repeats it"


def test_a_vote_counts_answers_that_the_environment_parses(setup: RolloutSetup, web: httpx.Client) -> None:
    """A text without a number is not a vote, also from the first agent."""
    texts = {"first": "I pass.", "second": "It is 4."}
    deciding = replace(setup, environment=Arithmetic(), engine=Reciting(lambda request: texts[request.agent]))
    with serve_policy(deciding, "duo", Binding(), ServingLimits()) as server:
        answer = web.post(f"{server.url}/v1/chat/completions", json={"model": "duo", **ASKED})
    assert answer.json()["choices"][0]["message"]["content"] == "It is 4."


def test_a_teams_turns_are_streamed_as_they_are_sampled(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="duo", **ASKED)
    pieces = list(client.chat.completions.create(model="duo", **ASKED, stream=True))
    assert (
        "".join(c.delta.content or "" for p in pieces for c in p.choices) == whole.choices[0].message.content
    )
    words: list[list[str]] = []
    now: dict[str, list[str]] = {}
    for piece in pieces:
        received = (piece.model_extra or {}).get("kapelle", {})
        if received.get("begins"):
            now[received["agent"]] = [received["agent"], ""]
            words.append(now[received["agent"]])
        elif "agent" in received:
            now[received["agent"]][1] += received["text"]
    assert whole.choices[0].model_extra is not None
    turns = whole.choices[0].model_extra["kapelle"]["turns"]
    assert words == [[turn["agent"], turn["text"]] for turn in turns]
