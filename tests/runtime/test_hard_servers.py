"""Faulty servers and proxies over real connections: retries, messages and limits."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from kapelle.runtime.http import NoAnswer, post_with_retries

GOOD = b'{"ok": 1}'
RESET = b""
"""Reset the connection instead of answering."""


def said(body: bytes, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Script:
    """Answers each request with the next answer, or the last one, and closes the connection."""

    def __init__(self, answers: Sequence[bytes], drip: float = 0.0) -> None:
        self.answers, self.drip = list(answers), drip
        self.asked = 0
        self.began = asyncio.Event()
        self.gone = asyncio.Event()
        """Set when a client has disconnected before its answer."""
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        self.began.set()
        if answer == RESET:
            own: socket.socket = writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            if self.drip:
                await self._drip(answer, reader, writer)
            else:
                writer.write(answer)
                await writer.drain()
        except ConnectionError:
            self.gone.set()
        finally:
            writer.close()

    async def _drip(self, answer: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(len(answer)):
            writer.write(answer[at : at + 1])
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), self.drip)  # nothing comes but the end
                self.gone.set()
                return


@asynccontextmanager
async def playing(*answers: bytes, drip: float = 0.0) -> AsyncIterator[Script]:
    script = Script(answers, drip)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield script
    finally:
        server.close()


async def ask(script: Script, seconds: float = 30.0, retries: int = 4) -> bytes:
    return await post_with_retries(script.url, {}, {"Authorization": "Bearer my-secret"}, seconds, retries)


BUSY = said(b"", "503 Busy")


@pytest.mark.parametrize(
    "before",
    [
        [BUSY, RESET],
        [said(GOOD[:5])],
        [said(b"<html>The gateway starts again.</html>", "200 OK", "content-type: text/html")],
        [said(b'{"error": {"code": 502, "message": "the model is loading"}}')],
        [b"this is no HTTP\r\n\r\n"],
        [b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"ok"'],
    ],
)
async def test_temporary_failures_are_retried(before: list[bytes], pauses: list[float]) -> None:
    async with playing(*before, said(GOOD)) as script:
        assert await ask(script) == GOOD
        assert script.asked == len(before) + 1
    lost = sum(each == RESET for each in before)  # over a connection used before, at once over a new one
    assert len(before) - lost <= len(pauses) <= len(before)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            said(b"", "307 Elsewhere", "location: https://user:pw@other.example/v1?sig=secret"),
            r"^HTTP 307, .* https://other.example/v1$",
        ),
        (
            said(b'{"error": {"code": "bad_model", "message": "no such model my-secret"}}'),
            "^HTTP 200 with an error inside: no such model …$",
        ),
        (said(b"x" * 10, "200 OK", "content-encoding: gzip"), "compressed"),
        (said(b"x", "403 No"), "^HTTP 403$"),
    ],
)
async def test_permanent_failures_are_reported_at_once(answer: bytes, why: str, pauses: list[float]) -> None:
    async with playing(answer, said(GOOD)) as script:
        with pytest.raises(NoAnswer, match=why):
            await ask(script)
        assert script.asked == 1
    assert pauses == []


async def test_the_limit_applies_to_a_whole_answer(pauses: list[float]) -> None:
    """The server sends a byte every 20 ms, and the whole answer would take four seconds."""
    async with playing(said(b" " * 100 + GOOD), drip=0.02) as script:
        started = time.monotonic()
        with pytest.raises(NoAnswer, match=r"not complete after 0.3 seconds"):
            await ask(script, seconds=0.3, retries=2)
        assert 0.9 <= time.monotonic() - started < 3.0
        assert script.asked == 3
        await asyncio.wait_for(script.gone.wait(), 30)


async def test_a_cancelled_request_ends() -> None:
    """During an answer, and in a pause before the next retry."""
    async with playing(said(GOOD), drip=0.05) as script:
        asking = asyncio.create_task(ask(script))
        await asyncio.wait_for(script.began.wait(), 30)
        asking.cancel()
        await asyncio.wait_for(script.gone.wait(), 30)
        assert script.asked == 1
    async with playing(said(b"", "503 Busy", "retry-after: 1")) as script:
        asking = asyncio.create_task(ask(script))
        await asyncio.wait_for(script.began.wait(), 30)
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.sleep(1.2)
        assert script.asked == 1
