"""Requested forms of answers: schemas and forced calls, over both APIs and in training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from tests.support.tiny import sections

from kapelle.services.binding import Binding
from kapelle.services.policy.service import ServingLimits, serve_policy
from kapelle.training.trainer import Trainer

pytest.importorskip("llguidance")


def settings() -> dict[str, Any]:
    """Two agents with a context that holds schemas of tools."""
    given = sections()
    model = {**given["model"], "embedded": {**given["model"].get("embedded", {}), "context": 2048}}
    team = {**given["team"], "agents": [{"name": "first"}, {"name": "second"}]}
    return sections(team=team, model=model)


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with (
        Trainer(**settings()) as trainer,
        serve_policy(trainer.setup, "duo", Binding(), ServingLimits()) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0) as made,
    ):
        yield made


SCHEMA: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "way": {"enum": ["left", "right"]}},
    "required": ["ok", "way"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("go", "stay")
]
ASKED: Any = {"model": "second", "messages": [{"role": "user", "content": "Which way?"}], "max_tokens": 80}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "way", "strict": True, "schema": SCHEMA}}


def fits(text: str | None) -> None:
    read = json.loads(text or "")
    assert set(read) == {"ok", "way"}
    assert read["way"] in ("left", "right")


@pytest.mark.parametrize("seed", [1])
def test_an_answer_follows_the_requested_schema(client: OpenAI, seed: int) -> None:
    reply = client.chat.completions.create(**ASKED, seed=seed, response_format=FORMAT)
    assert reply.choices[0].finish_reason == "stop"
    fits(reply.choices[0].message.content)
    form: Any = {"format": {"type": "json_schema", "name": "way", "schema": SCHEMA}}
    fits(
        client.responses.create(
            model="second", input="?", text=form, max_output_tokens=80, extra_body={"seed": seed}
        ).output_text
    )
    text = ""
    for piece in client.chat.completions.create(**ASKED, seed=seed, response_format=FORMAT, stream=True):
        text += "".join(choice.delta.content or "" for choice in piece.choices)
    fits(text)


@pytest.mark.sample(2)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "stay"}}])
def test_a_forced_tool_call_is_made(client: OpenAI, choice: Any) -> None:
    for parallel in (True, False):
        reply = client.chat.completions.create(
            **{**ASKED, "max_tokens": 900},
            seed=1,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=parallel,
        )
        calls: Any = reply.choices[0].message.tool_calls
        assert calls
        assert reply.choices[0].message.content is None
        if not parallel or choice != "required":
            assert len(calls) == 1
        for call in calls:
            assert call.function.name in (("go", "stay") if choice == "required" else ("stay",))
            fits(call.function.arguments)
    own: Any = {"type": "function", "name": "go"}
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answered = client.responses.create(
        model="second", input="?", tools=tools, tool_choice=own, max_output_tokens=160
    )
    [item] = answered.output
    assert (item.type, item.name) == ("function_call", "go")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "object"}, "extra": 1},
                }
            },
            "response_format.json_schema.extra",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
            "response_format",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "run"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tool_choice.type"),
    ],
)
def test_an_impossible_request_is_an_error_with_its_name(
    client: OpenAI, extra: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadRequestError) as raised:
        client.chat.completions.create(**ASKED, **extra)
    assert raised.value.param == named


def test_a_form_that_needs_more_tokens_is_an_error_beforehand(client: OpenAI) -> None:
    for extra, most in (({"response_format": FORMAT}, 12), ({"tools": TOOLS, "tool_choice": "required"}, 30)):
        with pytest.raises(BadRequestError, match=f" {most} tokens") as raised:
            client.chat.completions.create(**{**ASKED, "max_tokens": most}, **extra)
        assert raised.value.param == "max_tokens"
    own: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    with pytest.raises(BadRequestError) as raised:
        client.responses.create(
            model="second", input="?", tools=own, tool_choice="required", max_output_tokens=30
        )
    assert raised.value.param == "max_output_tokens"


WRITES: Any = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "format": "path", "maxLength": 3},
        "modes": {"type": "array", "items": {"enum": ["r", "w"]}, "uniqueItems": True, "maxItems": 2},
    },
    "required": ["path", "modes"],
    "additionalProperties": False,
}
"""As Pydantic writes a `Path` and a `set`."""


def writing(**more: Any) -> Any:
    return [TOOLS[0], {"type": "function", "function": {"name": "write", "parameters": WRITES, **more}}]


def test_an_invalid_tool_is_named(client: OpenAI) -> None:
    """The error has its place, its name and a reason from the schema, over both APIs."""
    strict, errors = writing(strict=True), writing(parameters={"type": "thing"})
    for tools, extra, reason in (
        (strict, {"tool_choice": "required"}, "Unknown format: path."),
        (strict, {"response_format": FORMAT}, "Unknown format: path."),
        (errors, {"tool_choice": "required"}, "Invalid type: thing."),
    ):
        with pytest.raises(BadRequestError) as raised:
            client.chat.completions.create(**ASKED, tools=tools, **extra)
        assert raised.value.param == "tools.1.function.parameters"
        for words in ("`tools.1.function.parameters`: no call of the tool 'write'", reason):
            assert words in raised.value.message
        for words in ("llguidance", "%json", "start:", "call_1"):
            assert words not in raised.value.message
    own: Any = [{"type": "function", **tool["function"]} for tool in strict]
    with pytest.raises(BadRequestError, match=r"`tools\.1\.parameters`: no call") as raised:
        client.responses.create(model="second", input="?", tools=own, tool_choice="required")
    assert raised.value.param == "tools.1.parameters"
    client.chat.completions.create(
        **ASKED, tools=strict, tool_choice={"type": "function", "function": {"name": "go"}}
    )
