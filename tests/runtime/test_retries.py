"""Requests to a busy server are repeated after growing or requested pauses, for a bounded time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import httpx
import pytest

from kapelle.runtime.event_loop import run_async
from kapelle.runtime.http import MOST_WAITING, NoAnswer, error_message, exchange, post, post_with_retries

HEADERS = {"Authorization": "Bearer my-secret-key"}


def asked(*answers: httpx.Response, retries: int = 6) -> Awaitable[bytes]:
    left = list(answers)
    transport = httpx.MockTransport(lambda _: left.pop(0) if len(left) > 1 else left[0])
    return post_with_retries("http://x/y", {}, HEADERS, 60.0, retries, transport)


def busy(after: str | None = None, status: int = 429) -> httpx.Response:
    return httpx.Response(status, headers={} if after is None else {"retry-after": after})


async def test_the_sum_of_pauses_is_bounded(pauses: list[float]) -> None:
    with pytest.raises(NoAnswer, match="HTTP 503"):
        await asked(busy("20", 503), retries=1000)
    assert sum(pauses) <= MOST_WAITING
    assert len(pauses) == 2


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[str]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def test_connections_are_reused_without_cookies_and_close_with_their_loop() -> None:
    heads: list[Mapping[str, str]] = []
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        try:
            while head := (await reader.read(4096)).decode():
                heads.append(
                    dict(line.split(": ", 1) for line in head.split("\r\n\r\n")[0].split("\r\n")[1:])
                )
                writer.write(b"HTTP/1.1 200 OK\r\nset-cookie: who=you\r\ncontent-length: 2\r\n\r\nok")
        finally:
            writer.close()

    async def three() -> None:
        async with listening(serve) as url:
            for _ in range(3):
                assert await post(url, {}, {}, 60.0) == (200, b"ok")

    run_async(three)  # an open connection would be a ResourceWarning, which is an error here
    assert (len(heads), len(connections)) == (3, 1)
    assert all("cookie" not in {name.lower() for name in head} for head in heads)


async def counted(method: str, url: str, headers: Mapping[str, str]) -> str:
    try:
        return str((await exchange(method, url, {}, headers, 60.0)).body)
    except httpx.HTTPError as error:
        return type(error).__name__


@pytest.mark.parametrize(
    ("method", "headers", "arrives"),
    [("POST", {}, 1), ("DELETE", {}, 1), ("POST", {"Idempotency-Key": "one"}, 2), ("GET", {}, 2)],
)
def test_only_harmless_requests_are_sent_twice(method: str, headers: Mapping[str, str], arrives: int) -> None:
    seen: list[tuple[str, str | None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the first request of a connection; receive the second one and close without an answer."""
        try:
            for number in range(2):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await reader.readexactly(2)
                key = re.search(r"(?i)idempotency-key: (\S+)", head)
                seen.append((head.split()[1], key and key[1]))
                if number == 0:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                    await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def both() -> None:
        async with listening(serve) as url:
            assert await counted("POST", f"{url}/first", {}) == "b'ok'"
            answer = await counted(method, f"{url}/act", headers)
            assert (answer == "b'ok'") == (arrives == 2)

    run_async(both)
    acted = [key for path, key in seen if path == "/act"]
    assert acted == [headers.get("Idempotency-Key")] * arrives


def test_no_part_of_a_key_is_repeated() -> None:
    body = json.dumps({"error": {"message": f"{'x' * 280} key sk-0123456789"}}).encode()
    assert error_message(body, "sk-0123456789").endswith(" key …")
