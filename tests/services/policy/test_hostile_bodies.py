"""Bodies that are none: each gets an error in OpenAI's form, and good calls are answered meanwhile."""

from __future__ import annotations

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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/sessions/none/reward"])
async def test_every_broken_body_is_refused_in_one_form(server: PolicyServer, path: str) -> None:
    application = Application(Binding(), server.service.routes())
    refused = 0
    for body in bodies(GOOD, 700):
        status, said = await answered(application, path, body)
        if status == 200:
            continue  # what was changed says nothing
        refused += 1
        check_refused(status, said, body)
    assert refused > 600


def test_a_good_call_is_answered_meanwhile(server: PolicyServer, web: httpx.Client) -> None:
    """Over the wire, each broken call beside a probe."""
    for body in [*RAW, *bodies(GOOD, 20)]:
        said = web.post(
            f"{server.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert said.status_code == 200 or 400 <= said.status_code < 500
        assert web.get(f"{server.url}/health").json()["status"] == "ok"
    assert web.get(f"{server.url}/health").json()["under_way"] == 0
