"""Bodies that are none, or nearly good ones with something wrong in them; and a call of an application without a network."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from kapelle.services.http import SESSION, Application

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


def bodies(good: dict[str, Any], count: int) -> Iterator[bytes]:
    """Yield broken requests: raw bytes, good ones with junk somewhere, good ones with bytes changed."""
    yield from RAW
    draw = random.Random(5)
    for _ in range(count):
        body = copy.deepcopy(good)
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


async def answered(
    application: Application, path: str, body: bytes, session: str | None = None
) -> tuple[int, bytes]:
    """Call an application as a server does, perhaps in a session."""
    sent: list[Any] = []
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if session is not None:
        headers.append((SESSION.encode(), session.encode()))
    await application({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])


def check_refused(status: int, said: bytes, body: bytes) -> None:
    """Fail unless a body was rejected in OpenAI's form, in few words and without a traceback."""
    assert 400 <= status < 500, (status, said, body[:200])
    assert set(json.loads(said)["error"]) == {"message", "type", "param", "code"}
    assert len(said) < 4096
    assert b"Traceback" not in said
    assert b"/src/" not in said
