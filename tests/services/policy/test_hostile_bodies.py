"""Malformed bodies get errors in OpenAI's form, and other calls are answered meanwhile.

Some are good all the same, as what was changed in them says nothing; those are answered, by a model that samples.
"""

from __future__ import annotations

import json
import os
from typing import Any

import httpx
import pytest
from tests.support.hostile_bodies import RAW, answered, bodies, check_refused

from kapelle.services.binding import Binding
from kapelle.services.http import Application
from kapelle.services.policy.service import PolicyServer

GOOD: dict[str, Any] = {
    "model": "duo/first",
    "messages": [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "y"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "z"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "max_tokens": 1, "temperature": 1.0, "top_p": 0.5, "n": 1, "seed": 1, "stop": ["a"], "logprobs": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


GOOD_RESPONSE: dict[str, Any] = {
    "model": "duo/first", "instructions": "x",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "y"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "z", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "z"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": "auto", "max_output_tokens": 1, "temperature": 1.0, "top_p": 0.5, "seed": 1, "stop": ["a"],
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"}, "store": True, "truncation": "auto", "stream": False,
}  # fmt: skip
GOOD_COMPLETION: dict[str, Any] = {
    "model": "duo/first", "prompt": ["x", "y"], "max_tokens": 1, "temperature": 1.0, "top_p": 0.5, "n": 1, "seed": 1,
    "stop": ["a"], "logprobs": 1, "stream_options": {"include_usage": True}, "best_of": 1,
}  # fmt: skip
ROUTES = {
    "/v1/chat/completions": GOOD,
    "/v1/responses": GOOD_RESPONSE,
    "/v1/completions": GOOD_COMPLETION,
    "/v1/embeddings": {"model": "duo/first", "input": ["x"]},
}
"""Path → a valid body, of a server that records."""

GOOD_REWARD: Any = {
    "reward": 1.0, "rewards": {"first": 0.5, "second": 1.0}, "success": 0.5, "info": {"a": 1.0, "b": ["x", None]},
}  # fmt: skip
COUNT = int(os.environ.get("KAPELLE_HOSTILE_BODIES", "250"))
"""Of each route; before a release 20,000."""


@pytest.mark.parametrize("path", ROUTES)
async def test_every_malformed_body_is_rejected_in_one_form(server: PolicyServer, path: str) -> None:
    application = Application(Binding(), server.service.routes())
    raised = 0
    for body in bodies(ROUTES[path], COUNT):
        status, answer = await answered(application, path, body)
        if status == 200:
            continue  # what was changed says nothing
        raised += 1
        check_refused(status, answer, body)
    assert raised > COUNT * 6 // 7


async def test_every_malformed_reward_is_rejected_and_its_session_kept(server: PolicyServer) -> None:
    application = Application(Binding(), server.service.routes())
    request = json.dumps(
        {"model": "duo/first", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    ).encode()
    paid, raised, begun = 0, 0, False
    for body in bodies(GOOD_REWARD, COUNT):
        name = f"fuzzed-{paid}"
        if not begun:
            status, answer = await answered(application, "/v1/chat/completions", request, name)
            assert status == 200, answer
            begun = True
        status, answer = await answered(application, f"/v1/sessions/{name}/reward", body)
        if status == 200:
            assert json.loads(answer)["turns"] == 1
            paid, begun = paid + 1, False
            continue
        raised += 1
        assert status == 400, (status, answer, body[:200])
        check_refused(status, answer, body)
    assert raised > COUNT // 2
    assert paid > COUNT // 100


def test_other_calls_are_answered_meanwhile(server: PolicyServer, web: httpx.Client) -> None:
    """Send each malformed call together with a valid one."""
    for body in [*RAW, *bodies(GOOD, 20)]:
        answer = web.post(
            f"{server.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200 or 400 <= answer.status_code < 500
        assert web.get(f"{server.url}/health").json()["status"] == "ok"
    assert web.get(f"{server.url}/health").json()["under_way"] == 0
