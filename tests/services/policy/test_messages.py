"""Anthropic's Messages API over plain HTTP. `tests/apps/test_messages.py` has Anthropic's own client."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.hostile_bodies import answered, bodies
from tests.support.serving import Reciting, staged

from kapelle.engines.rollout.protocol import Request
from kapelle.rollout.setup import RolloutSetup
from kapelle.services.binding import Binding
from kapelle.services.http import Application
from kapelle.services.policy.recording import read_recorded
from kapelle.services.policy.service import PolicyServer, ServingLimits, serve_policy

TOOLS: list[Any] = [{"name": name, "input_schema": {"type": "object"}} for name in ("add", "look")]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
HI: list[Any] = [{"role": "user", "content": "2+2?"}]
ASKED: dict[str, Any] = {"model": "duo/first", "max_tokens": 64, "messages": HI}


def events_of(answer: httpx.Response) -> list[Any]:
    """Return the events of a stream, whose names are their types."""
    found = []
    for part in answer.text.strip().split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message_in(events: list[Any]) -> dict[str, Any]:
    """Return the message that a client assembles from the events of a stream."""
    message: dict[str, Any] = events[0]["message"]
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
        if event["type"] == "content_block_delta":
            block, (_, (name, new)) = message["content"][event["index"]], event["delta"].items()
            if name == "partial_json":
                block["input"] = json.loads(new)
            else:
                block[name] += new
        if event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"], "kapelle": event["kapelle"]}
    return message


@contextmanager
def reciting(
    setup: RolloutSetup, folder: Path | None, *texts: str
) -> Iterator[tuple[httpx.Client, Reciting]]:
    """Serve a team whose agents return these texts in turn, and the last one repeatedly."""
    left = list(texts)
    engine = Reciting(lambda _: left.pop(0) if len(left) > 1 else left[0])
    with (
        serve_policy(replace(setup, engine=engine), "duo", Binding(), ServingLimits(), folder) as server,
        httpx.Client(base_url=server.url, timeout=60.0) as web,
    ):
        yield web, engine


def test_a_message_equals_the_chat_completion(server: PolicyServer, web: httpx.Client) -> None:
    """The same tokens for the same prompt, seed and settings, whole or streamed."""
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": 5}
    body = {**ASKED, **settings, "max_tokens": 6, "system": [{"type": "text", "text": "Add."}]}
    answer = web.post(f"{server.url}/v1/messages", json=body).json()
    messages = [{"role": "system", "content": "Add."}, *HI]
    chat = web.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "duo/first", **settings, "max_tokens": 6, "messages": messages},
    ).json()
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert answer["usage"] == {
        "input_tokens": chat["usage"]["prompt_tokens"],
        "output_tokens": chat["usage"]["completion_tokens"],
    }
    is_cut = chat["choices"][0]["finish_reason"] == "length"
    assert answer["stop_reason"] == ("max_tokens" if is_cut else "end_turn")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "duo/first")
    assert answer["id"].startswith("msg_")

    streamed = message_in(events_of(web.post(f"{server.url}/v1/messages", json={**body, "stream": True})))
    for both in (answer, streamed):
        both.pop("id")
        both["kapelle"].pop("session")
    assert streamed == answer

    counted = web.post(
        f"{server.url}/v1/messages/count_tokens", json={k: body[k] for k in ("model", "messages", "system")}
    )
    assert counted.json() == {"input_tokens": answer["usage"]["input_tokens"]}


def test_the_events_of_a_stream_come_in_anthropics_order(setup: RolloutSetup) -> None:
    text = f"<think>\nHm, hm.\n</think>\n\nBoth of them.\n{ADD}\n{LOOK}"
    with reciting(setup, None, text) as (web, _):
        body = {**ASKED, "tools": TOOLS, "stream": True}
        events = events_of(web.post("/v1/messages", json=body))
        whole = web.post("/v1/messages", json={**body, "stream": False}).json()
    kinds = [event.get("delta", {}).get("type") or event["type"] for event in events]
    assert kinds.count("thinking_delta") > 1, "it came in pieces"
    assert kinds.count("text_delta") > 1
    assert [kind for k, kind in enumerate(kinds) if kind != kinds[k - 1]] == [
        "message_start",
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    message = message_in(events)
    thought, said, *calls = message["content"]
    assert (thought["thinking"], said["text"]) == ("Hm, hm.", "Both of them.")
    assert [(call["name"], call["input"]) for call in calls] == [("add", {"a": 1}), ("look", {})]
    assert message["stop_reason"] == "tool_use"
    for each in (message, whole):
        each.pop("id")
        for call in each["content"][2:]:
            assert call.pop("id")
    assert message == whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_continues_with_its_exact_tokens(
    setup: RolloutSetup, tmp_path: Path, *, stream: bool
) -> None:
    """If a program returns the content, with or without thoughts, or changes to chat completions."""
    first = f"<think>\nHm.\n</think>\n\n Well,\n{ADD}\n{LOOK}\n"
    with reciting(setup, tmp_path, first, "Done.") as (web, _):
        body = {**ASKED, "system": "Be brief.", "tools": TOOLS}
        sent = web.post("/v1/messages", json={**body, "stream": stream})
        answer = message_in(events_of(sent)) if stream else sent.json()
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "3"},
            {
                "type": "tool_result",
                "tool_use_id": calls[1]["id"],
                "content": [{"type": "text", "text": "4"}],
            },
            {"type": "text", "text": "Go on."},
        ]
        for kept in (answer["content"], answer["content"][1:]):
            repeated = [*HI, {"role": "assistant", "content": kept}, {"role": "user", "content": results}]
            assert web.post("/v1/messages", json={**body, "messages": repeated}).status_code == 200
        functions = [
            {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
            for tool in TOOLS
        ]
        chat = [
            {"role": "system", "content": "Be brief."},
            *HI,
            {
                "role": "assistant",
                "content": answer["content"][1]["text"],
                "tool_calls": [
                    {
                        "id": call["id"],
                        "type": "function",
                        "function": {"name": call["name"], "arguments": json.dumps(call["input"])},
                    }
                    for call in calls
                ],
            },
            *({"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls),
        ]
        in_chat = {"model": "duo/first", "messages": chat, "tools": functions}
        assert web.post("/v1/chat/completions", json=in_chat).status_code == 200
        turn = web.post(f"/v1/turns/{answer['id']}/reward", json={"reward": 0.5}).json()
        session = answer["kapelle"]["session"]
        assert turn == {"session": session, "turn": 0, "reward": 0.5}
        web.post(f"/v1/sessions/{session}/reward", json={"reward": 1.0})
    [episode] = read_recorded(tmp_path)
    one, *others = episode.turns
    assert bytes(one.completion_ids).decode() == first
    assert "restarts" not in episode.info
    assert len(others) == 3
    for turn in others:
        assert (
            turn.prompt_ids[: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids
        )
    assert [message.role for message in others[0].new_messages] == ["tool", "tool", "user"]


def test_a_stop_sequence_is_named(setup: RolloutSetup) -> None:
    """Also if the recipe's sampling has other stop strings; the engine ends the text there."""
    with reciting(setup, None, "One, two") as (web, _):
        body = {**ASKED, "stop_sequences": ["xyz", "two"]}
        for stream in (False, True):
            sent = web.post("/v1/messages", json={**body, "stream": stream})
            answer = message_in(events_of(sent)) if stream else sent.json()
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")
        answer = web.post("/v1/messages", json={**body, "stop_sequences": ["xyz"]}).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


def test_the_whole_team_answers(server: PolicyServer, web: httpx.Client) -> None:
    body = {**ASKED, "model": "duo", "max_tokens": 4}
    answer = web.post(f"{server.url}/v1/messages", json=body).json()
    assert len(answer["kapelle"]["turns"]) > 1
    streamed = message_in(events_of(web.post(f"{server.url}/v1/messages", json={**body, "stream": True})))
    assert streamed["content"][0]["type"] == answer["content"][0]["type"] == "text"


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        ({"messages": [*HI, {"role": "assistant", "content": "The"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"container": "c"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0.type"),
        ({"model": "duo", "stop_sequences": ["x"]}, "stop_sequences"),
        ({"model": "duo", "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "prompt is too long"),
    ],
)  # fmt: skip
def test_an_unsupported_parameter_is_named(
    server: PolicyServer, web: httpx.Client, extra: dict[str, Any], named: str
) -> None:
    answer = web.post(f"{server.url}/v1/messages", json={**ASKED, **extra})
    assert answer.status_code == 400
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert named in error["error"]["message"]
    assert "response_format" not in error["error"]["message"]


def test_errors_have_anthropics_form(server: PolicyServer, web: httpx.Client) -> None:
    url = f"{server.url}/v1/messages"
    expected = [
        (web.post(url, json={**ASKED, "model": "duo/third"}), 404, "not_found_error"),
        (web.post(url, content=b"{"), 415, "invalid_request_error"),
        (
            web.post(url, content=b"{", headers={"content-type": "application/json"}),
            400,
            "invalid_request_error",
        ),
        (web.post(url, json={**ASKED, "system": "x" * (5 << 20)}), 413, "request_too_large"),
        (web.get(url), 405, "invalid_request_error"),
        (web.post(f"{url}/count_tokens", json={**ASKED, "model": "duo"}), 400, "invalid_request_error"),
        (web.post(url, json=ASKED, headers={"origin": "http://x.example"}), 403, "permission_error"),
    ]
    for answer, status, kind in expected:
        assert answer.status_code == status
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert "param" in web.post(f"{server.url}/v1/chat/completions", json={}).json()["error"], (
        "in OpenAI's form"
    )


def test_either_header_may_carry_the_token(setup: RolloutSetup) -> None:
    token = "0123456789abcdef-token"  # noqa: S105 - of this test
    with (
        serve_policy(setup, "duo", Binding(token=token), ServingLimits()) as server,
        httpx.Client(base_url=server.url, timeout=60.0) as web,
    ):
        for headers, status in (
            ({"x-api-key": token}, 200),
            ({"authorization": f"Bearer {token}"}, 200),
            ({"x-api-key": token[:-1]}, 401),
            ({"x-api-key": token, "authorization": "Bearer none"}, 401),
            ({}, 401),
        ):
            headers["anthropic-version"] = "2023-06-01"
            answer = web.post("/v1/messages", json={**ASKED, "max_tokens": 1}, headers=headers)
            assert answer.status_code == status, headers
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"
                assert "x-api-key" in answer.json()["error"]["message"]


def test_parameters_without_effect_are_accepted(server: PolicyServer, web: httpx.Client) -> None:
    body = {**ASKED, "max_tokens": 8, "seed": 1}
    url = f"{server.url}/v1/messages?beta=true"
    expected = web.post(url, json=body).json()["content"]
    hint = {"cache_control": {"type": "ephemeral"}}
    for extra in (
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "high"}},
        {"metadata": {"user_id": "ann"}, "service_tier": "auto", **hint},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"tools": [{**TOOLS[0], "defer_loading": True}], "tool_choice": {"type": "auto"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?", **hint}]}], "system": ""},
    ):
        answer = web.post(url, json={**body, **extra}).json()
        assert answer["content"] == expected, extra


def test_limits_are_those_of_the_other_apis(setup: RolloutSetup, web: httpx.Client) -> None:
    with serve_policy(setup, "duo", Binding(), ServingLimits(calls=0)) as server:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = web.post(f"{server.url}{path}", json=ASKED)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["type"] == "rate_limit_error"
    with serve_policy(setup, "duo", Binding(), ServingLimits(seconds=0.001)) as server:
        answer = web.post(f"{server.url}/v1/messages", json=ASKED)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        streamed = web.post(f"{server.url}/v1/messages", json={**ASKED, "stream": True})
        last = json.loads(streamed.text.rpartition("data: ")[2])
        assert (last["type"], last["error"]["type"]) == ("error", "timeout_error")
        assert server.service.under_way == 0


def test_a_failed_stream_ends_with_an_error_event(setup: RolloutSetup) -> None:
    with reciting(setup, None, "Hm.") as (web, engine):

        async def broken(_: Request) -> None:
            raise ValueError("no words of a question")

        engine._begin = broken
        events = events_of(web.post("/v1/messages", json={**ASKED, "stream": True}))
    assert [event["type"] for event in events] == ["message_start", "error"]
    assert events[-1]["error"]["type"] == "api_error"
    assert "see its log" in events[-1]["error"]["message"]


PROGRAM = """
import json, os, urllib.request
def post(path, body):
    request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + path, json.dumps(body).encode(),
        {"content-type": "application/json", "x-api-key": os.environ["ANTHROPIC_API_KEY"]})
    return json.load(urllib.request.urlopen(request))
asked = {"model": "team/first", "max_tokens": 64, "temperature": 0.5, "tools": [{"name": "add", "input_schema": {"type": "object"}}],
         "messages": [{"role": "user", "content": "1+2?"}]}
counted = post("/v1/messages/count_tokens", asked)["input_tokens"]
answer = post("/v1/messages", asked)
assert answer["usage"]["input_tokens"] == counted
result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": "3"}
asked["messages"] += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
answer = post("/v1/messages", {**asked, "stop_sequences": ["!"]})
assert answer["stop_reason"] == "end_turn", answer
post("/v1/turns/" + answer["id"] + "/reward", {"reward": 0.5})
post("/v1/reward", {"reward": 0.5})
"""


def test_a_program_in_training_continues_with_its_exact_tokens(
    setup: RolloutSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAPELLE_TOKEN", "0123456789abcdef-token")
    texts = iter((f"<think>\nHm.\n</think>\n\n{ADD}", "It is 3."))
    engine = Reciting(lambda _: next(texts))
    with staged(setup, engine, command=[sys.executable, "-IS", "-c", PROGRAM]) as stage:
        pass
    [episode] = stage.episodes
    assert episode.error is None
    one, two = episode.turns
    past = one.prompt_ids + one.completion_ids
    assert two.prompt_ids[: len(past)] == past
    assert ([message.role for message in two.new_messages], two.reward) == (["tool"], 0.5)
    assert dict(episode.rewards) == {"first": 0.5}


GOOD: dict[str, Any] = {
    "model": "duo/first", "max_tokens": 1, "system": [{"type": "text", "text": "x"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "y", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "z"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "z"}], "is_error": False}]},
        {"role": "system", "content": "w"},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "temperature": 1.0, "top_p": 0.5, "top_k": 5,
    "stop_sequences": ["a"], "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}, "seed": 1,
    "output_config": {"effort": "low"},
}  # fmt: skip


async def test_every_malformed_body_is_rejected_in_anthropics_form(server: PolicyServer) -> None:
    application = Application(Binding(), server.service.routes())
    raised = 0
    for body in bodies(GOOD, 250):
        status, answer = await answered(application, "/v1/messages", body)
        if status == 200:
            continue  # what was changed has no effect
        raised += 1
        assert 400 <= status < 500, (status, answer, body[:200])
        assert set(json.loads(answer)["error"]) == {"message", "type", "details"}
        assert len(answer) < 4096
        assert b"Traceback" not in answer
    assert raised > 200
