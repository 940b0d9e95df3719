"""Simultaneous calls of one program in training."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI
from tests.support.serving import Reciting, staged

from kapelle.engines.rollout.protocol import Request
from kapelle.rollout.setup import RolloutSetup


def begun(client: OpenAI) -> OpenAI:
    """Take a task and return a client of its session."""
    task = client.post("/task", body={}, cast_to=dict[str, Any])
    return client.with_options(default_headers={"x-kapelle-session": task["session"]})


def ask(client: OpenAI, words: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": words}]
    return client.chat.completions.create(model="team/first", messages=messages, **more)


def connected(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60.0)


def until(word: str, event: threading.Event) -> Callable[[Request], Any]:
    """Let answers to questions with a word wait for an event."""

    async def begin(request: Request) -> None:
        if word in request.messages[-1].content:
            await asyncio.to_thread(event.wait, 60.0)

    return begin


def test_a_short_answer_comes_while_a_long_one_is_sampled(setup: RolloutSetup) -> None:
    """Calls of one agent in one session are recorded with their prompts, in the order of their ends."""
    short = threading.Event()
    engine = Reciting(lambda request: f"to {request.messages[-1].content}", until("long", short))
    with (
        staged(setup, engine) as stage,
        connected(stage.url) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        own = begun(client)
        opening = ask(own, "opening").choices[0].message.content
        history = [{"role": "user", "content": "opening"}, {"role": "assistant", "content": opening}]
        long = [threads.submit(ask, own, f"long {k}") for k in range(2)]
        while len(engine.asked) < 3:  # both are under way
            threading.Event().wait(0.01)
        for k in range(3):
            assert ask(own, f"short {k}").choices[0].message.content == f"to short {k}"
        more: Any = [*history, {"role": "user", "content": "after the opening"}]
        own.chat.completions.create(model="team/first", messages=more)
        assert not any(each.done() for each in long), "they were waited for"
        short.set()
        assert {each.result().choices[0].message.content for each in long} == {"to long 0", "to long 1"}
        own.post("/reward", body={"reward": 0.5}, cast_to=object)
    [episode] = stage.episodes
    assert episode.error is None
    texts = [turn.text for turn in episode.turns]
    assert texts[:5] == ["to opening", *(f"to short {k}" for k in range(3)), "to after the opening"]
    assert sorted(texts[5:]) == ["to long 0", "to long 1"]
    assert [turn.index for turn in episode.turns] == list(range(7))
    assert [turn.completed_before for turn in episode.turns] == [0, 1, 2, 3, 4, 1, 1], (
        "what was over when each was asked"
    )
    for turn in episode.turns:
        asked = turn.text.removeprefix("to ")
        assert bytes(turn.prompt_ids).decode().endswith(f"user: {asked}\n")
    first, after = episode.turns[0], episode.turns[4]
    assert after.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert b"long" not in bytes(after.prompt_ids)
    messages = {request.messages[-1].content: request.messages for request in engine.asked}
    assert [m.content for m in messages["after the opening"]][-3:] == [
        "opening",
        "to opening",
        "after the opening",
    ]


def test_an_abandoned_answer_is_no_turn(setup: RolloutSetup) -> None:
    """After the caller disconnects, sampling ends and the episode continues."""
    never, ended = threading.Event(), threading.Event()
    engine = Reciting(lambda request: "words", until("slow", never))
    with staged(setup, engine) as stage, connected(stage.url) as client:
        own = begun(client)
        ask(own, "one")
        with pytest.raises(Exception, match="timed out"):
            ask(own.with_options(timeout=0.5), "slow")
        ask(own, "two")
        for _ in range(500):
            if engine.broken_off:
                break
            ended.wait(0.02)
        never.set()
        own.post("/reward", body={"reward": 1.0}, cast_to=object)
    [episode] = stage.episodes
    assert episode.error is None
    assert [turn.new_messages[-1].content for turn in episode.turns] == ["one", "two"]
    assert [request.messages[-1].content for request in engine.broken_off] == ["slow"]


def test_training_warns_once_of_sampling_settings_that_it_ignores(
    setup: RolloutSetup, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Reciting(lambda _: "words")
    with staged(setup, engine) as stage, connected(stage.url) as client:
        own = begun(client)
        for word in ("one", "two"):
            ask(own, word, logit_bias={"5": 1}, extra_body={"min_p": 0.5, "chat_template_kwargs": {"a": 1}})
        own.post("/reward", body={"reward": 1.0}, cast_to=object)
    assert all(request.sampling.adjusted is None for request in engine.asked)
    warned = [record.message.split("`")[1] for record in caplog.records if "no effect" in record.message]
    assert sorted(warned) == ["chat_template_kwargs", "logit_bias", "min_p"]


@pytest.mark.slow
def test_a_program_that_waits_for_answers_is_not_late(setup: RolloutSetup) -> None:
    async def slowly(request: Request) -> None:
        await asyncio.sleep(1.5 if "slow" in request.messages[-1].content else 0.0)

    with (
        staged(setup, Reciting(lambda _: "words", slowly), timeout=0.6) as stage,
        connected(stage.url) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        own = begun(client)
        slow = threads.submit(ask, own, "slow")
        ask(own, "quick")
        slow.result()
        own.post("/reward", body={"reward": 1.0}, cast_to=object)
    assert [episode.error for episode in stage.episodes] == [None]
