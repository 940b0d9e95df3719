"""The Responses API, by OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response
from pydantic import TypeAdapter
from tests.support.serving import Reciting

from kapelle.engines.rollout.protocol import Request
from kapelle.rollout.setup import RolloutSetup
from kapelle.services.binding import Binding
from kapelle.services.policy.recording import read_recorded
from kapelle.services.policy.responses import StoredResponse, StoredResponses
from kapelle.services.policy.service import ServingLimits, serve_policy
from kapelle.services.request_errors import RequestError

TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in ("add", "look")
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@contextmanager
def reciting(setup: RolloutSetup, folder: Path | None, *texts: str) -> Iterator[tuple[OpenAI, Reciting]]:
    """Serve a team whose agents return these texts in turn, and the last one repeatedly."""
    left = list(texts)
    engine = Reciting(lambda _: left.pop(0) if len(left) > 1 else left[0])
    with (
        serve_policy(replace(setup, engine=engine), "duo", Binding(), ServingLimits(), folder) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, engine


def test_a_response_equals_the_chat_completion(client: OpenAI) -> None:
    """The same tokens for the same prompt, seed and settings; OpenAI's types accept the response."""
    answer = client.responses.create(
        model="duo/first",
        input="2+2?",
        max_output_tokens=6,
        temperature=0.7,
        top_p=0.9,
        metadata={"a": "b"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        extra_body={"seed": 5},
    )
    chat = client.chat.completions.create(
        model="duo/first",
        messages=[{"role": "user", "content": "2+2?"}],
        max_tokens=6,
        temperature=0.7,
        top_p=0.9,
        seed=5,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None
    assert chat.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    assert answer.status == "completed"
    assert (answer.incomplete_details is not None) == (chat.choices[0].finish_reason == "length")
    assert answer.metadata == {"a": "b"}
    assert chat.choices[0].logprobs is not None
    content: Any = answer.output[0]
    assert [each.logprob for each in content.content[0].logprobs] == [
        each.logprob for each in chat.choices[0].logprobs.content or ()
    ]
    TypeAdapter(Response).validate_python(answer.model_dump(by_alias=True, warnings=False), strict=False)


def test_the_events_of_a_stream_come_in_openais_order(setup: RolloutSetup) -> None:
    with reciting(setup, None, f"Both of them.\n{ADD}\n{LOOK}") as (client, _):
        events = list(client.responses.create(model="duo/first", input="?", tools=TOOLS, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        deltas = [kind for kind in kinds if kind == "output_text.delta"]
        assert len(deltas) > 1, "it came in pieces"
        assert [kind for kind in kinds if kind != "output_text.delta"] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"],
            "output_item.done",
            *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"],
            "output_item.done",
            "completed",
        ]
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        last: Any = events[-1]
        assert text == last.response.output_text == "Both of them."
        calls = last.response.output[1:]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("add", {"a": 1}),
            ("look", {}),
        ]
        for event in events:
            if event.type == "response.output_item.done":
                assert event.item == last.response.output[event.output_index]
        # The client's own helper puts the same together.
        with client.responses.stream(model="duo/first", input="?", tools=TOOLS) as stream:
            final = stream.get_final_response()
        assert final.output_text == text
        assert [each.type for each in final.output] == ["message", "function_call", "function_call"]


@pytest.mark.parametrize(("by", "stream"), [("items", True), ("id", False), ("chat", False)])
def test_an_answer_continues_with_its_exact_tokens(
    setup: RolloutSetup, tmp_path: Path, by: str, *, stream: bool
) -> None:
    """If a program returns the items, names the response, or changes to chat completions."""
    first = f" Well,\n{ADD}\n{LOOK}\n"
    with reciting(setup, tmp_path, first, "Done.") as (client, _):
        request: Any = {"model": "duo/first", "tools": TOOLS, "instructions": "Be brief."}
        answer: Any = client.responses.create(**request, input="1+2?", stream=stream)
        if stream:
            answer = list(answer)[-1].response
        calls = [item for item in answer.output if item.type == "function_call"]
        results: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls
        ]
        if by == "items":
            kept = [item.model_dump(exclude_none=True) for item in answer.output]
            items: Any = [
                {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
                *kept,
                *results,
            ]
            client.responses.create(**request, input=items)
        elif by == "id":
            again = client.responses.create(**request, input=results, previous_response_id=answer.id)
            assert again.previous_response_id == answer.id
        else:
            functions: Any = [
                {"type": "function", "function": {n: tool[n] for n in ("name", "parameters", "strict")}}
                for tool in TOOLS
            ]
            messages: Any = [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "1+2?"},
                {
                    "role": "assistant",
                    "content": answer.output_text,
                    "tool_calls": [
                        {
                            "id": c.call_id,
                            "type": "function",
                            "function": {"name": c.name, "arguments": c.arguments},
                        }
                        for c in calls
                    ],
                },
                *({"role": "tool", "tool_call_id": c.call_id, "content": "3"} for c in calls),
            ]
            client.chat.completions.create(model="duo/first", messages=messages, tools=functions)
        session = answer.model_extra["kapelle"]["session"]
        client.post(f"/sessions/{session}/reward", body={"reward": 1.0}, cast_to=object)
    [episode] = read_recorded(tmp_path)
    one, two = episode.turns
    assert two.prompt_ids[: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids
    assert bytes(one.completion_ids).decode() == first
    assert "restarts" not in episode.info
    assert [message.role for message in two.new_messages] == ["tool", "tool"]


def test_a_response_is_kept_until_it_is_deleted(client: OpenAI) -> None:
    answer = client.responses.create(model="duo/first", input="hello", max_output_tokens=4)
    assert client.responses.retrieve(answer.id).output == answer.output
    [item] = client.responses.input_items.list(answer.id).data
    assert item.model_dump()["content"][0]["text"] == "hello"
    client.responses.delete(answer.id)
    for again in (
        lambda: client.responses.retrieve(answer.id),
        lambda: client.responses.delete(answer.id),
        lambda: client.responses.create(model="duo/first", input="x", previous_response_id=answer.id),
        lambda: client.responses.input_items.list(answer.id),
    ):
        with pytest.raises(NotFoundError, match=answer.id):
            again()


def test_a_response_belongs_to_its_session(client: OpenAI) -> None:
    """Other sessions do not have it, and it ends with its session."""
    mine, other = ({"x-kapelle-session": name} for name in ("mine-r", "other-r"))
    answer = client.responses.create(model="duo/first", input="a", max_output_tokens=4, extra_headers=mine)
    request: Any = {
        "model": "duo/first",
        "input": "b",
        "max_output_tokens": 4,
        "previous_response_id": answer.id,
    }
    with pytest.raises(NotFoundError) as raised:
        client.responses.create(**request, extra_headers=other)
    assert raised.value.param == "previous_response_id"
    again = client.responses.create(**request)
    assert (again.model_extra or {})["kapelle"]["session"] == "mine-r"
    client.post("/sessions/mine-r/reward", body={"reward": 1.0}, cast_to=object)
    for each in (answer, again):
        with pytest.raises(NotFoundError):
            client.responses.retrieve(each.id)


class TestRoom:
    """The number and the size of kept responses are limited."""

    @staticmethod
    def kept(size: int) -> StoredResponse:
        return StoredResponse({}, None, (), (), size)

    def test_the_oldest_make_room(self) -> None:
        responses = StoredResponses(lambda _: True, most=3, characters=100)
        for name in "abcd":
            responses.keep(name, self.kept(10))
        with pytest.raises(RequestError, match="'a'"):
            responses.get("a", None)
        responses.keep("e", self.kept(85))
        assert len(responses) == 2
        responses.get("d", None)
        responses.keep("f", self.kept(1000))
        assert len(responses) == 1
        responses.get("f", None)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
        ({"input": []}, "input"),
        ({"input": "x" * 100_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"model": "duo", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"model": "duo", "include": ["message.output_text.logprobs"]}, "include"),
    ],
)  # fmt: skip
def test_an_unsupported_parameter_is_named(client: OpenAI, extra: dict[str, Any], named: str) -> None:
    with pytest.raises((BadRequestError, NotFoundError)) as raised:
        client.responses.create(**{"model": "duo/first", "input": "x", **extra})
    assert raised.value.param == named
    assert "`response_format`" not in raised.value.message


def test_parameters_without_effect_are_accepted(client: OpenAI) -> None:
    request: Any = {"model": "duo/first", "input": "1+1?", "max_output_tokens": 8, "extra_body": {"seed": 1}}
    expected = client.responses.create(**request).output_text
    for extra in (
        {"truncation": "auto"},
        {"include": ["reasoning.encrypted_content"]},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"user": "ann", "safety_identifier": "ann", "prompt_cache_key": "x"},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+1?"}]}]},
        {"input": [{"id": "rs_1", "type": "reasoning", "summary": []}, {"role": "user", "content": "1+1?"}]},
    ):
        assert client.responses.create(**{**request, **extra}).output_text == expected


def test_a_failed_stream_ends_with_an_error_event(setup: RolloutSetup) -> None:
    with reciting(setup, None, "Hm.") as (client, engine):
        client.responses.create(model="duo/first", input="?")

        async def broken(_: Request) -> None:
            raise ValueError("no words of a question")

        engine._begin = broken
        events = list(client.responses.create(model="duo/first", input="?", stream=True))
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    last: Any = events[-1]
    assert last.response.status == "failed"
    assert "see its log" in last.response.error.message


def test_thoughts_are_an_item_of_their_own(setup: RolloutSetup, tmp_path: Path) -> None:
    """Also in streams; whether returned or omitted, the next prompt has their sampled tokens."""
    with reciting(setup, tmp_path, f"<think>\nHm, hm.\n</think>\n\nI add.\n{ADD}", "3") as (client, engine):
        request: Any = {"model": "first", "tools": TOOLS}
        events = list(client.responses.create(**request, input="1+2?", stream=True))
        reply = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        last: Any = events[-1]
        thought, answer, call = last.response.output
        assert "".join(reply) == thought.content[0].text == "Hm, hm."
        assert len(reply) > 1
        assert answer.content[0].text == "I add."
        assert [event.sequence_number for event in events] == list(range(len(events)))
        for event in events:
            if event.type in ("response.output_item.added", "response.output_item.done"):
                assert event.item.id == last.response.output[event.output_index].id
        whole = client.responses.create(**request, input="1+2?")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        for kept in ([thought, answer, call], [answer, call]):
            items: Any = [{"role": "user", "content": "1+2?"}, *(each.model_dump() for each in kept), result]
            client.responses.create(**request, input=items)
        client.responses.create(**request, input=[result], previous_response_id=last.response.id)
        assert whole.output_text == "3"
    first = engine.asked[0].prompt_ids
    for again in engine.asked[2:]:
        assert again.prompt_ids[: len(first)] == first
        assert bytes(again.prompt_ids).count(b"Hm, hm.") == 1
