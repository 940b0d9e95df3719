"""Bodies that are none: each gets an error in OpenAI's form, and good calls are answered meanwhile."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kapelle.services.binding import Binding
from kapelle.services.http.application import Application
from kapelle.services.policy.serving import PolicyServer

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
JUNK: list[Any] = [
    True, -1, 0, 10**30, 1e308, -1e308, "", "\u0000", "\ufeff", "x" * 10_000, [], [[]], {}, {"": {}}, [None], {"a": [1]},
    "NaN", "Infinity", -(10**400), [0] * 500, {str(k): k for k in range(300)}, "e\u0301" * 99, {"__class__": "x"},
]  # fmt: skip
RAW = [
    b"", b" ", b"null", b"[]", b"1", b'"x"', b"{", b"}", b'{"model"', b"[" * 100_000, b'{"a":' * 50_000, b'{"a":[' * 9_999,
    b'{"model": NaN}', b'{"n": Infinity}', b'{"n": -Infinity}', b'{"n": 1e999}', b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"temperature": ' + b"1" * 100_000 + b"}", b'{"model": "\xff\xfe"}', b'{"model": "\xed\xa0\x80"}', b'{"model": "\\ud800"}',
    b'{"model": "\\udc00\\ud800"}', b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b"{}{}", b"{} x", b"{'model': 1}", b"{model: 1}",
    b'{"a": 01}', b'{"a": +1}', b'{"a": .5}', b'{"a": 1,}', b'{"a": "\t"}', b"\x00" * 1000, b'{"messages": "' + b"x" * 999_999 + b'"}',
    b"--boundary\r\n", b"model=x&messages=y", b"<xml/>", b"\x1f\x8b\x08\x00", b'{"model": "duo/first", "model": 1}',
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of everything inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


def bodies(count: int) -> Iterator[bytes]:
    """Yield broken requests: raw bytes, good ones with junk somewhere, good ones with bytes changed."""
    yield from RAW
    draw = random.Random(5)
    for _ in range(count):
        body = copy.deepcopy(GOOD)
        for _ in range(draw.randint(1, 3)):
            container, key = draw.choice(list(places(body)))
            if isinstance(container, dict) and draw.random() < 0.2:
                container[draw.choice(["functions", "a.b", "\n", "model ", "x" * 500])] = copy.deepcopy(
                    draw.choice(JUNK)
                )
            else:
                container[key] = copy.deepcopy(draw.choice(JUNK))
        raw = bytearray(json.dumps(body).encode())
        if draw.random() < 0.3:
            for _ in range(draw.randint(1, 5)):
                raw[draw.randrange(len(raw))] = draw.randrange(256)
        yield bytes(raw)


async def answered(application: Application, path: str, body: bytes) -> tuple[int, bytes]:
    """Call an application as a server does."""
    sent: list[Any] = []
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    await application({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/sessions/none/reward"])
async def test_every_broken_body_is_refused_in_one_form(server: PolicyServer, path: str) -> None:
    application = Application(Binding(), server.service.routes())
    refused = 0
    for body in bodies(700):
        status, said = await answered(application, path, body)
        if status == 200:
            continue  # what was changed says nothing
        refused += 1
        assert 400 <= status < 500, (status, said, body[:200])
        error = json.loads(said)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(said) < 4096
        assert b"Traceback" not in said
        assert b"/src/" not in said
    assert refused > 600


def test_a_good_call_is_answered_meanwhile(server: PolicyServer, web: httpx.Client) -> None:
    """Over the wire, each broken call beside a probe."""
    for body in [*RAW, *bodies(20)]:
        said = web.post(
            f"{server.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert said.status_code == 200 or 400 <= said.status_code < 500
        assert web.get(f"{server.url}/health").json()["status"] == "ok"
    assert web.get(f"{server.url}/health").json()["under_way"] == 0
