"""Tool calls with text, as clients assemble and return them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.support.serving import Reciting

from kapelle.rollout.setup import RolloutSetup
from kapelle.services.binding import Binding
from kapelle.services.policy.recording import read_recorded
from kapelle.services.policy.service import ServingLimits, serve_policy

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "look")
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.0, null]}}\n</tool_call>'
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
TEXTS = {
    "words and one call": (f"I add.\n\n{ADD}", "I add.", ["add"]),
    "thoughts and two calls": (
        f"<think>I could <tool_call> at once.</think>\n Both: \n{ADD}\n{LOOK}",
        "Both:",
        ["add", "look"],
    ),
    "words between and behind": (
        f" First {ADD} then {LOOK} and done. ",
        " First\nthen\nand done.",
        ["add", "look"],
    ),
    "no words": (f"\n{ADD}\n{LOOK}", None, ["add", "look"]),
    "no call": ("Nothing to call. \n", "Nothing to call. \n", []),
    "a call that breaks the form": ("Well \n<tool_call>{", "Well \n<tool_call>{", []),
}


def spoken(client: OpenAI, messages: list[Any], *, stream: bool) -> dict[str, Any]:
    """Send a request with tools and return the message, assembled from the stream."""
    request: Any = {"model": f"{model(client)}/first", "messages": messages, "tools": TOOLS}
    if not stream:
        whole: dict[str, Any] = client.chat.completions.create(**request).choices[0].message.model_dump()
        return {name: each for name, each in whole.items() if each is not None}
    words = ""
    calls: dict[int, dict[str, Any]] = {}
    for piece in client.chat.completions.create(**request, stream=True):
        for choice in piece.choices:
            words += choice.delta.content or ""
            assert len(choice.delta.tool_calls or ()) <= 1, "some clients read the first one"
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                built = calls.setdefault(
                    call.index, {"id": call.id, "name": call.function.name, "arguments": ""}
                )
                built["arguments"] += call.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": words or None}
    if calls:
        message["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for _, c in sorted(calls.items())
        ]
    return message


def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


def results(message: dict[str, Any]) -> list[Any]:
    called = message.get("tool_calls", ())
    return [{"role": "tool", "tool_call_id": c["id"], "content": "7"} for c in called] or [
        {"role": "user", "content": "go on"}
    ]


def kept_as(form: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as frameworks rewrite it."""
    kept: dict[str, Any] = json.loads(json.dumps(message))
    for call in kept.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    words = kept.get("content") or ""
    if form == "langchain":
        kept["content"] = words
    elif form == "parts":
        part = {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}
        kept["content"] = [part] if words else None
    elif form == "stripped" and kept.get("tool_calls"):
        kept["content"] = words.strip() or None
    elif form == "litellm":
        kept |= {"content": words or None, "function_call": None, "refusal": None, "audio": None}
    return kept


@pytest.mark.parametrize(
    ("kind", "form", "stream"),
    [
        ("words and one call", "langchain", True),
        ("thoughts and two calls", "stripped", False),
        ("words between and behind", "parts", True),
        ("no words", "litellm", False),
        ("a call that breaks the form", "openai", True),
    ],
)
def test_the_next_prompt_contains_every_word_and_call(
    kind: str, form: str, setup: RolloutSetup, tmp_path: Path, *, stream: bool
) -> None:
    text, words, names = TEXTS[kind]
    engine = Reciting(lambda _: text)
    with (
        serve_policy(replace(setup, engine=engine), "duo", Binding(), ServingLimits(), tmp_path) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "1+2?"}]
        message = spoken(client, messages, stream=stream)
        assert message.get("content") == words
        assert [call["function"]["name"] for call in message.get("tool_calls", ())] == names
        messages += [kept_as(form, message), *results(message)]
        spoken(client, messages, stream=stream)
        [session] = [each.name for each in server.service._recorder.sessions]  # type: ignore[union-attr]
        client.post(f"/sessions/{session}/reward", body={"reward": 1.0}, cast_to=object)
    [episode] = read_recorded(tmp_path)
    first, second = episode.turns
    assert (
        second.prompt_ids[: len(first.prompt_ids + first.completion_ids)]
        == first.prompt_ids + first.completion_ids
    )
    assert "restarts" not in episode.info
    assert [message.role for message in second.new_messages] == [each["role"] for each in results(message)]


def test_a_call_is_kept_if_the_limit_cuts_the_next_one(setup: RolloutSetup) -> None:
    engine = Reciting(lambda _: f"{ADD}\n{LOOK[:40]}", is_cut=lambda _: True)
    with (
        serve_policy(replace(setup, engine=engine), "duo", Binding(), ServingLimits()) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        request: Any = {"model": "first", "tools": TOOLS, "messages": [{"role": "user", "content": "1+2?"}]}
        with client.chat.completions.stream(**request) as pieces:
            streamed = pieces.get_final_completion().choices[0]
        for choice in (client.chat.completions.create(**request).choices[0], streamed):
            assert [call.function.name for call in choice.message.tool_calls or ()] == ["add"]
            assert (choice.finish_reason, choice.message.content or None) == ("tool_calls", None)
        own: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        with client.responses.stream(model="first", input="1+2?", tools=own) as events:
            streamed_response = events.get_final_response()
        for response in (client.responses.create(model="first", input="1+2?", tools=own), streamed_response):
            [item] = response.output
            assert (item.type, item.name, item.status) == ("function_call", "add", "completed")  # type: ignore[union-attr]
            assert response.status == "completed"
