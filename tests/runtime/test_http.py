"""Servers that answer endlessly, slowly or never make an episode fail in bounded time and memory."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.rollout.test_setup import NAMES, stage
from tests.support.episodes import TASK

from kapelle.engines.rollout.endpoint import EndpointEngine
from kapelle.errors import EpisodeError
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.http import MAX_BYTES
from kapelle.team import Endpoint

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
OPEN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
RIGHT = json.dumps({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}).encode()
MB = b"x" * (1 << 20)


async def right(writer: asyncio.StreamWriter) -> None:
    writer.write(OPEN + b"content-length: %d\r\n\r\n" % len(RIGHT) + RIGHT)


def trickling(begins: bytes, byte: bytes) -> Answer:
    async def trickles(writer: asyncio.StreamWriter) -> None:
        writer.write(OPEN + begins)
        while True:
            writer.write(byte)
            await writer.drain()
            await asyncio.sleep(0.02)

    return trickles


trickles = trickling(b"content-length: 100000\r\n\r\n", b" ")
trickles_headers = trickling(b"x-long: ", b"a")


async def never(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def never_ends(writer: asyncio.StreamWriter) -> None:
    writer.write(OPEN + b"transfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"100000\r\n" + MB + b"\r\n")
        await writer.drain()


async def is_packed(writer: asyncio.StreamWriter) -> None:
    writer.write(OPEN + b"content-encoding: gzip\r\ncontent-length: 9\r\n\r\n123456789")


BAD: dict[Answer, str] = {
    trickles: "not complete after 0.5 seconds",
    trickles_headers: "not complete after 0.5 seconds",
    never: "not complete after 0.5 seconds|Timeout",
    never_ends: f"more than {MAX_BYTES:,} bytes",
    is_packed: "is compressed .gzip.",
}


@asynccontextmanager
async def served(*answers: Answer) -> AsyncIterator[tuple[str, list[int]]]:
    """Yield the address of a server with these answers in turn, and its current and largest number of connections."""
    open_now, request = [0, 0], 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal request
        answer = answers[request % len(answers)]
        request += 1
        open_now[0] += 1
        open_now[1] = max(open_now)
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            open_now[0] -= 1
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", open_now
    finally:
        server.close()


def playing(url: str, timeout: float = 0.5) -> RolloutSetup:
    endpoints = {name: Endpoint(url, "theirs") for name in NAMES}
    return replace(stage(), engine=EndpointEngine(endpoints, timeout=timeout, retries=0))


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
async def test_an_episode_with_a_bad_answer_fails_soon_and_the_others_continue(bad: Answer) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Only what never completes runs into the limit: a busy machine may take long to read the others.
    timeout = 0.5 if "0.5 seconds" in BAD[bad] else 40
    async with served(right, right, right, bad) as (url, _):
        (group,) = await asyncio.wait_for(
            rollout(playing(url, timeout), [TASK], samples=4, seed=0, max_concurrent=1), 45
        )
    failed = [episode.error for episode in group.episodes if episode.error]
    assert 0 < len(failed) < 4
    for error in failed:
        assert error.startswith("EpisodeError: The endpoint of policy")
        with pytest.raises(EpisodeError, match=BAD[bad]):
            raise EpisodeError(error)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert grown < 150, f"{grown} MiB more at the peak"
