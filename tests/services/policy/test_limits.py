"""Limits of a server: number and time of requests."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from kapelle.rollout.setup import RolloutSetup
from kapelle.services.binding import Binding
from kapelle.services.policy.service import PolicyServer, ServingLimits, serve_policy

ASKED: dict[str, Any] = {
    "model": "duo/first",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 200,
}


def test_requests_beyond_the_limit_are_told_to_retry(setup: RolloutSetup, web: httpx.Client) -> None:
    with serve_policy(setup, "duo", Binding(), ServingLimits(calls=2)) as server:
        url = f"{server.url}/v1/chat/completions"
        answer = web.post(url, json={**ASKED, "n": 3})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] == "1"
        assert web.post(url, json={**ASKED, "n": 2, "max_tokens": 1}).status_code == 200
        assert server.service.under_way == 0


@pytest.mark.parametrize("model", ["duo/first", "duo"])
def test_a_late_call_ends(setup: RolloutSetup, web: httpx.Client, model: str) -> None:
    with serve_policy(setup, "duo", Binding(), ServingLimits(seconds=0.001)) as server:
        answer = web.post(f"{server.url}/v1/chat/completions", json={**ASKED, "model": model})
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        streamed = web.post(
            f"{server.url}/v1/chat/completions", json={**ASKED, "model": model, "stream": True}
        )
        last = streamed.text.removeprefix("data: ").strip().split("\n\ndata: ")[-1]
        assert json.loads(last)["error"]["code"] == "timeout"
        assert server.service.under_way == 0


@pytest.mark.parametrize("stream", [False, True])
def test_vanished_clients_leave_nothing_behind(
    server: PolicyServer, web: httpx.Client, *, stream: bool
) -> None:
    body = json.dumps({**ASKED, "n": 4, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", server.http.port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
    deadline = time.monotonic() + 60.0
    while server.service.under_way and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.service.under_way == 0
    assert web.post(f"{server.url}/v1/chat/completions", json={**ASKED, "max_tokens": 1}).status_code == 200
