"""A server program that is spoken to line by line, from an event loop.

It gets no environment but what is named, a line of it is bounded, and its whole process group is ended.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress

import httpx2

from kapelle.environments.tools.contract import Lost
from kapelle.environments.tools.web import Resolve, WebFault, addresses_of, any_address, is_public

MAX_MESSAGE = 1 << 20
"""Bytes of one message."""
ENDED = "The server has ended."
"""What is said of a server where nothing more is known."""


class Program:
    """A running program and its two pipes; made and ended in any thread, read and written in one event loop."""

    def __init__(self, command: Sequence[str], env: Sequence[str]) -> None:
        """Start it with PATH, HOME, LANG and the variables named; Lost when it cannot be started."""
        passed = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", *env) if name in os.environ}
        self._unread = bytearray()
        try:
            self.process = subprocess.Popen(  # noqa: S603 (the program that the settings name)
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=passed,
                start_new_session=True,
            )
        except OSError as error:
            raise Lost(f"it cannot be started ({error.strerror}).") from None
        assert self.process.stdin is not None, "opened as a pipe"
        assert self.process.stdout is not None, "opened as a pipe"
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    async def read_line(self) -> bytes:
        """Return what it writes up to the end of a line; Lost when it ends, or writes too much at once."""
        while b"\n" not in self._unread:
            try:
                part = os.read(self._out, 65536)
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await _until(loop.add_reader, loop.remove_reader, self._out)
                continue
            if not part:
                raise Lost(ENDED)
            self._unread += part
            if len(self._unread) > MAX_MESSAGE:
                raise Lost(f"The server sent more than {MAX_MESSAGE:,} bytes at once.")
        line, _, rest = bytes(self._unread).partition(b"\n")
        self._unread = bytearray(rest)
        return line

    async def write_line(self, data: bytes) -> None:
        """Write a line, waiting while it reads nothing; Lost when it has ended."""
        left = memoryview(data + b"\n")
        while left:
            try:
                left = left[os.write(self._in, left) :]
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await _until(loop.add_writer, loop.remove_writer, self._in)
            except OSError:
                raise Lost(ENDED) from None

    def kill(self) -> None:
        """End it and everything that it started in its group; once, because its number may become another one's."""
        if self.process.returncode is not None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.poll()
        self.process.wait()

    def close(self) -> None:
        """Close its pipes, which nobody reads or writes any more."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


async def _until(
    add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], bool], pipe: int
) -> None:
    ready = asyncio.Event()
    add(pipe, ready.set)
    try:
        await ready.wait()
    finally:
        remove(pipe)


# -------- The HTTP client that an MCP server on the network is spoken to with: bounded answers, and public addresses only
#
# As in `web`, a name is resolved once, every address that it stands for is checked, and the connection goes to an address
# that was checked. The package follows redirections within the server's own origin alone; each is checked anew.

GOODBYE_S = 2.0
"""Seconds in which a server may take note that a session is over."""
MAX_STREAMS = 100
"""Times that a conversation listens to what its server says unasked; one that breaks is opened again."""
_UNCOMPRESSED = {"Accept-Encoding": "identity", "User-Agent": "kapelle"}


@functools.cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Carries requests to checked addresses; the first thing that goes wrong stays in `fault`."""

    def __init__(self, allowed: Callable[[str], bool], resolve: Resolve = addresses_of) -> None:
        self.fault: str | None = None
        self._allowed, self._resolve = allowed, resolve
        self._streams = 0
        self._inner = httpx2.AsyncHTTPTransport(verify=_trusted(), trust_env=False)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer; httpx2.TransportError when there is none that is allowed."""
        if request.method == "GET":
            return await self._listened(request)
        try:
            if request.method == "DELETE":
                async with asyncio.timeout(GOODBYE_S):
                    answer = await self._asked(request)
                await answer.aclose()  # whatever it says, and however slowly
                return httpx2.Response(answer.status_code)
            return self._counted(await self._asked(request), "mcp-session-id" in request.headers)
        except (WebFault, httpx2.HTTPError) as fault:
            why = (
                str(fault) if isinstance(fault, WebFault) else f"the request failed ({type(fault).__name__})"
            )
            raise self.failed(why) from None

    async def _listened(self, request: httpx2.Request) -> httpx2.Response:
        """Open the stream on which a server asks us something unasked, to be told that it is not offered.

        No conversation needs it: where it cannot be had, breaks or says too much, it is left alone.
        """
        self._streams += 1
        if self._streams <= MAX_STREAMS:
            with suppress(WebFault, httpx2.HTTPError):
                answer = await self._asked(request)
                plain = answer.headers.get("Content-Encoding", "identity") == "identity"
                if answer.status_code == 200 and plain:
                    assert isinstance(answer.stream, httpx2.AsyncByteStream), "of an asynchronous transport"
                    stream = _Unasked(answer.stream)
                    return httpx2.Response(
                        200, headers=answer.headers, stream=stream, extensions=answer.extensions
                    )
                await answer.aclose()
        return httpx2.Response(405)

    def failed(self, why: str) -> httpx2.TransportError:
        """Keep why nothing is carried any more, and return it as an error."""
        self.fault = self.fault or f"The server cannot be asked: {why}."
        return httpx2.TransportError(self.fault)

    async def _asked(self, request: httpx2.Request) -> httpx2.Response:
        host, scheme = request.url.host, request.url.scheme
        port = request.url.port or (443 if scheme == "https" else 80)
        addresses = await asyncio.to_thread(self._resolve, host, port)
        if not addresses or not all(map(self._allowed, addresses)):
            raise WebFault(
                f"the host '{host[:80]}' stands for an address that is not public; `local: true` allows it"
            )
        return await self._first_reached(request, addresses)

    async def _first_reached(self, request: httpx2.Request, addresses: Sequence[str]) -> httpx2.Response:
        named = {**request.extensions, "sni_hostname": request.url.host}
        for address in addresses:
            url = request.url.copy_with(host=address)
            try:
                return await self._inner.handle_async_request(
                    httpx2.Request(
                        request.method, url, headers=request.headers, stream=request.stream, extensions=named
                    )
                )
            except httpx2.ConnectError:
                if address == addresses[-1]:
                    raise
        raise AssertionError("there is an address")

    def _counted(self, answer: httpx2.Response, in_session: bool) -> httpx2.Response:
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise WebFault("it answered in a compressed form")
        # Outside a session 404 may carry a message: that there is no such method.
        told = answer.headers.get("Content-Type", "").startswith("application/json") and not in_session
        lost = {401, 403} if told else {401, 403, 404}
        if answer.status_code in lost or answer.status_code >= 500:
            self.failed(f"it answered {answer.status_code}")
        assert isinstance(answer.stream, httpx2.AsyncByteStream), "of an asynchronous transport"
        return httpx2.Response(
            answer.status_code,
            headers=answer.headers,
            stream=_Counted(answer.stream, self),
            extensions=answer.extensions,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


class _Counted(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, transport: BoundedTransport) -> None:
        self._stream, self._transport = stream, transport

    async def __aiter__(self) -> AsyncIterator[bytes]:
        counted = 0
        async for part in self._stream:
            counted += len(part)
            if counted > MAX_MESSAGE:
                raise self._transport.failed(f"it sent more than {MAX_MESSAGE:,} bytes at once")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Unasked(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MAX_MESSAGE
        with suppress(httpx2.HTTPError):
            async for part in self._stream:
                left -= len(part)
                if left < 0:
                    return
                yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def client(transport: BoundedTransport, headers: Mapping[str, str] | None) -> httpx2.AsyncClient:
    """Return a client without limits of time, which its user sets; the headers go with every request to its server."""
    sent = {**_UNCOMPRESSED, **(headers or {})}
    return httpx2.AsyncClient(transport=transport, headers=sent, timeout=None, trust_env=False)


def transport(*, local: bool) -> BoundedTransport:
    """Return a transport to public addresses, or to any where a server of one's own is meant."""
    return BoundedTransport(any_address if local else is_public)
