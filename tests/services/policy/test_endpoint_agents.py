"""Agents behind another server of OpenAI's form: what callers set is applied there, and beside them local agents still apply it."""

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

CONTEXT = {"embedded": {**sections()["model"].get("embedded", {}), "context": 2048}}
SCHEMA: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("go", "stay")
]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA}}
QUESTION: Any = [{"role": "user", "content": "Which way?"}]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    """A team of a `far` agent, an endpoint of another team's server, and a local `near` one."""
    own = sections(model={**sections()["model"], **CONTEXT})
    team = {**own["team"], "agents": [{"name": "only"}, {"name": "other"}], "sampling": {"max_tokens": 200}}
    with (
        Trainer(**{**own, "team": team}) as first,
        serve_policy(first.setup, "there", Binding(), ServingLimits()) as there,
    ):
        far = {"name": "far", "weights": {"endpoint": f"{there.url}/v1/", "model": "only"}}
        both = {**team, "agents": [{"name": "near"}, far]}
        with (
            Trainer(**{**own, "team": both}) as second,
            serve_policy(second.setup, "here", Binding(), ServingLimits()) as here,
            OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0, timeout=60.0) as made,
        ):
            yield made


@pytest.mark.parametrize("agent", ["near", "far"])
def test_an_answer_follows_the_requested_schema(client: OpenAI, agent: str) -> None:
    reply = client.chat.completions.create(model=agent, messages=QUESTION, response_format=FORMAT)
    assert isinstance(json.loads(reply.choices[0].message.content or "")["ok"], bool)
    form: Any = {"format": {"type": "json_schema", "name": "ok", "schema": SCHEMA}}
    with client.responses.stream(model=agent, input="?", text=form) as stream:
        assert isinstance(json.loads(stream.get_final_response().output_text)["ok"], bool)


@pytest.mark.parametrize("agent", ["near", "far"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_made_and_its_result_is_read(client: OpenAI, agent: str, stream: bool) -> None:
    forced: Any = {"type": "function", "function": {"name": "stay"}}
    request: Any = {"model": agent, "tools": TOOLS, "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(messages=QUESTION, tool_choice=forced, **request) as pieces:
            message: Any = pieces.get_final_completion().choices[0].message
    else:
        reply = client.chat.completions.create(messages=QUESTION, tool_choice=forced, **request)
        message = reply.choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "stay"
    assert isinstance(json.loads(call.function.arguments)["ok"], bool)
    answered = [
        *QUESTION,
        message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "left"},
    ]
    client.chat.completions.create(messages=answered, max_tokens=4, **request)


@pytest.mark.parametrize("agent", ["near", "far"])
def test_a_forced_call_without_tools_is_refused(client: OpenAI, agent: str) -> None:
    with pytest.raises(BadRequestError, match=r"`tool_choice` requires a call, but there are no `tools`"):
        client.chat.completions.create(model=agent, messages=QUESTION, tool_choice="required")


def test_usage_is_what_the_endpoint_counts(client: OpenAI) -> None:
    """Its server renders the conversation with the same template as the local agent's."""
    near, far = (
        client.chat.completions.create(model=agent, messages=QUESTION, max_tokens=4).usage
        for agent in ("near", "far")
    )
    assert near is not None
    assert far is not None
    assert far.prompt_tokens == near.prompt_tokens
    assert far.completion_tokens <= 4
    written = client.responses.create(model="far", input="Which way?", max_output_tokens=4).usage
    assert written is not None
    assert written.input_tokens == near.prompt_tokens


def test_an_error_of_the_endpoint_is_the_callers(client: OpenAI) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "ok", "schema": {"type": 7}}}
    with pytest.raises(BadRequestError, match=r"far.*HTTP 400"):
        client.chat.completions.create(model="far", messages=QUESTION, response_format=wrong)
