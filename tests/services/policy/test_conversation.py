"""Tools in OpenAI's form and in the forms of agents, in both directions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kapelle.services.policy.chat_form import PLAINLY, MessageReader, message_of, read_request
from kapelle.services.policy.recording import Sessions
from kapelle.services.policy.responses_form import read_items, read_response_request
from kapelle.services.policy.speech import SpeechForm
from kapelle.types import Turn

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TEXT = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1.50, "b": [true, null, "x"]}}\n</tool_call>'


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": "duo/first",
        "messages": [{"role": "user", "content": "1+2?"}, *messages],
        "tools": [TOOL],
        **more,
    }


def answer(text: str) -> dict[str, Any]:
    return message_of(SpeechForm().read(text))


def test_a_conversation_continues_after_a_call_with_any_arguments() -> None:
    """A client may parse and rewrite a call: other spaces, other order, 1.50 as 1.5."""
    sessions = Sessions()
    place = sessions.place("first", read_request(body()), None)
    turn = Turn("first", "p", 0, "", -1, 0, (1,), (2,), (0.0,), "stop", TEXT)
    sessions.keep(place, turn, SpeechForm().read(TEXT))
    called = answer(TEXT)
    function = called["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(dict(reversed(json.loads(function["arguments"]).items())), indent=1)
    result = {"role": "tool", "tool_call_id": "x", "content": "3.5"}
    again = sessions.place("first", read_request(body(called, result)), None)
    assert again.session is place.session
    assert again.after is not None
    assert again.after.turn.text == TEXT
    assert [message.content for message in again.new_messages] == ["3.5"]
    function["arguments"] = '{"a": 2}'
    assert sessions.find("first", read_request(body(called, result)), None) is None, "it never called that"
    assert sessions.find("second", read_request(body(called, result)), None) is None, "nor did another agent"


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("written", ["", "null"])
def test_no_arguments_are_an_empty_object(written: str) -> None:
    request = read_request(body(calling(written)))
    reply = PLAINLY.conversation(request.messages, request.tools, ())[-1]
    assert reply.content == '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    sessions, text = Sessions(), reply.content
    place = sessions.place("first", read_request(body()), None)
    turn = Turn("first", "p", 0, "", -1, 0, (1,), (2,), (0.0,), "stop", text)
    sessions.keep(place, turn, SpeechForm().read(text))
    assert sessions.find("first", request, None) is not None, "it is the answer that called without arguments"


BROKEN = ["a=1", "[1]", '{"a":' * 900 + "1" + "}" * 900]


@pytest.mark.parametrize("written", BROKEN, ids=lambda each: each[:8])
@pytest.mark.parametrize(
    ("form", "whole"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": ARGUMENTS}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": ARGUMENTS}]'),
        ("glm", "<tool_call>add\nARGUMENTS\n</tool_call>"),
        ("qwen_coder", "<tool_call>\n<function=add>\nARGUMENTS\n</function>\n</tool_call>"),
    ],
)
def test_malformed_arguments_keep_their_text(form: Any, whole: str, written: str) -> None:
    request = read_request(body(calling(written)))
    reply = MessageReader(form, structured=True).conversation(request.messages, request.tools, ())[-1]
    assert reply.content == whole.replace("ARGUMENTS", written)
    assert json.loads(reply.structured or "")["tool_calls"][0]["function"]["arguments"] == written
    items = [
        {"role": "user", "content": "1+1?"},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": written},
    ]
    assert (
        MessageReader(form)
        .messages(read_items(read_response_request({"model": "m", "input": items}).input))[-1]
        .content
        == reply.content
    )
