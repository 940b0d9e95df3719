"""A conversation with an MCP server: the official package's session over our own bounded transports.

Only this module uses the package and its HTTP client. A server program gets only the named environment variables, a line of
it is bounded, and its whole process group is ended. All conversations of a process live in one event loop of a thread of its
own, because tools are called from many threads; each is a task there, from its greeting to its end.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import shlex
import signal
import ssl
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import httpx2
from mcp import ClientSession, MCPError, types
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from pydantic import BaseModel, TypeAdapter, ValidationError

from kapelle.environments.tools.contract import Lost, ToolFault, ToolSchema
from kapelle.environments.tools.web import Resolve, WebFault, addresses_of, any_address, is_public
from kapelle.runtime.characters import cleaned
from kapelle.runtime.clock import suspend_aware_timeout

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams

    from kapelle.types import Json

# -------- A server program, spoken to line by line; a server over HTTP

MAX_MESSAGE = 1 << 20
"""Bytes of one message."""
KEPT_ERRORS = 2_000
"""Bytes that are shown of a server's standard error."""
ENDED = "The server has ended."
"""The default explanation for a lost server."""


class McpProgram:
    """A running program and its two pipes; made and ended in any thread, read and written in one event loop."""

    def __init__(self, command: Sequence[str], env: Sequence[str]) -> None:
        """Start it with PATH, HOME, LANG and the variables named; Lost if it fails to start."""
        passed = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", *env) if name in os.environ}
        self.name = shlex.join(command)
        self._unread = bytearray()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the program
        try:
            self.process = subprocess.Popen(  # noqa: S603 (the program that the settings name)
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=passed,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
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
        """Write a line, waiting until the program reads; Lost if it has ended."""
        left = memoryview(data + b"\n")
        while left:
            try:
                left = left[os.write(self._in, left) :]
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await _until(loop.add_writer, loop.remove_writer, self._in)
            except OSError:
                raise Lost(ENDED) from None

    def stderr(self) -> str:
        """Return the end of what it has written to standard error."""
        end = os.fstat(self._errors.fileno()).st_size
        tail = os.pread(self._errors.fileno(), KEPT_ERRORS, max(0, end - KEPT_ERRORS))
        return cleaned(tail.decode("utf-8", "replace").strip())

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
        """Close its pipes, which are no longer in use."""
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
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


_trusted = functools.cache(ssl.create_default_context)


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
        in_session = "mcp-session-id" in request.headers
        try:
            if request.method == "DELETE":
                async with asyncio.timeout(GOODBYE_S):
                    answer = await self._asked(request)
                await answer.aclose()  # whatever it says, and however slowly
                return httpx2.Response(answer.status_code)
            answer = await self._asked(request)
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise WebFault("it answered in a compressed form")
        except (WebFault, httpx2.HTTPError) as fault:
            why = (
                str(fault) if isinstance(fault, WebFault) else f"the request failed ({type(fault).__name__})"
            )
            raise self.failed(why) from None
        # Outside a session 404 may carry a message: that there is no such method.
        told = answer.headers.get("Content-Type", "").startswith("application/json") and not in_session
        if answer.status_code in ({401, 403} if told else {401, 403, 404}) or answer.status_code >= 500:
            self.failed(f"it answered {answer.status_code}")
        return _streamed(answer, _Counted, self.failed)

    async def _listened(self, request: httpx2.Request) -> httpx2.Response:
        """Open the stream on which a server sends its own requests, and decline them.

        It is optional for every conversation: if it is unavailable, breaks or sends too much, it is dropped.
        """
        self._streams += 1
        if self._streams <= MAX_STREAMS:
            with suppress(WebFault, httpx2.HTTPError):
                answer = await self._asked(request)
                plain = answer.headers.get("Content-Encoding", "identity") == "identity"
                if answer.status_code == 200 and plain:
                    return _streamed(answer, _Unasked, httpx2.TransportError)
                await answer.aclose()
        return httpx2.Response(405)

    def failed(self, why: str) -> httpx2.TransportError:
        """Store the reason why the transport has stopped, and return it as an error."""
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

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


class _Counted(httpx2.AsyncByteStream):
    """A body that ends with `failed` where it is too long."""

    def __init__(
        self, stream: httpx2.AsyncByteStream, failed: Callable[[str], httpx2.TransportError]
    ) -> None:
        self._stream, self._failed = stream, failed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        counted = 0
        async for part in self._stream:
            counted += len(part)
            if counted > MAX_MESSAGE:
                raise self._failed(f"it sent more than {MAX_MESSAGE:,} bytes at once")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Unasked(_Counted):
    """A body that merely ends where it breaks or is too long."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with suppress(httpx2.HTTPError):
            async for part in super().__aiter__():
                yield part


def _streamed(
    answer: httpx2.Response, kind: type[_Counted], failed: Callable[[str], httpx2.TransportError]
) -> httpx2.Response:
    assert isinstance(answer.stream, httpx2.AsyncByteStream), "of an asynchronous transport"
    stream = kind(answer.stream, failed)
    return httpx2.Response(
        answer.status_code, headers=answer.headers, stream=stream, extensions=answer.extensions
    )


def client(transport: BoundedTransport, headers: Mapping[str, str] | None) -> httpx2.AsyncClient:
    """Return a client whose time limits its user sets; the headers go with every request to its server."""
    sent = {**_UNCOMPRESSED, **(headers or {})}
    return httpx2.AsyncClient(transport=transport, headers=sent, timeout=None, trust_env=False)


# -------- The conversation: the official package's session over the transports above

MAX_PAGES = 16
"""Pages of a list of tools."""
MAX_ASIDE = 10_000
"""Messages of a server after each that it is asked: its answer, what it tells, and what it asks itself."""
CLOSE_S = 10.0
"""Most seconds that a conversation may take to end."""
_ANSWER = TypeVar("_ANSWER", bound=BaseModel)
_RESULT: TypeAdapter[types.CallToolResult | types.InputRequiredResult] = TypeAdapter(
    types.CallToolResult | types.InputRequiredResult
)
_OURS = types.Implementation(name="kapelle", version="0")
for _talkative in ("mcp", "client"):
    # What the package logs holds a server's text; without a handler Python would print it.
    logging.getLogger(_talkative).addHandler(logging.NullHandler())


LOG = logging.getLogger(__name__)
_stray = set[str]()
"""Programs of which a stray line was logged."""


class Pipes:
    """The wire to a program; what it tells unasked is dropped."""

    def __init__(self, program: McpProgram) -> None:
        self.program = program
        self.fault: str | None = None
        """Why the transport has stopped; None while it works."""
        self._heard = 0
        self.cut, self.close, self.stderr = program.kill, program.close, program.stderr

    @asynccontextmanager
    async def streams(
        self,
    ) -> AsyncIterator[
        tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]
    ]:
        """Carry messages while the block lasts, or until the program is lost."""
        told, heard = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        said, to_say = anyio.create_memory_object_stream[SessionMessage](0)
        async with told, heard, said, to_say, anyio.create_task_group() as both_ways:
            both_ways.start_soon(self._hear, told)
            both_ways.start_soon(self._say, to_say)
            yield heard, said
            both_ways.cancel_scope.cancel()

    async def _hear(self, told: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        async with told:
            try:
                while self._heard <= MAX_ASIDE:
                    line = await self.program.read_line()
                    self._heard += 1
                    try:
                        message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValidationError:
                        self._log_stray(line)
                        await asyncio.sleep(0)
                        continue
                    if isinstance(message, types.JSONRPCNotification):
                        await asyncio.sleep(0)  # lets others have their turn, however much is told
                    else:
                        await told.send(SessionMessage(message))
                why = f"The server sent more than {MAX_ASIDE:,} messages for one question."
            except Lost as fault:
                why = str(fault)
            except anyio.BrokenResourceError:
                return  # the session has ended
            self.fault = self.fault or why

    def _log_stray(self, line: bytes) -> None:
        """Log a line of standard output that is no message; once for each program, as episodes start it many times."""
        if self.program.name not in _stray:
            _stray.add(self.program.name)
            shown = cleaned(line.decode("utf-8", "replace")[:200])
            LOG.warning("The MCP server `%s` wrote a line that is no message: %s", self.program.name, shown)

    async def _say(self, to_say: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async with to_say:
            try:
                async for item in to_say:
                    text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await self.program.write_line(text.encode())
                    if isinstance(item.message, types.JSONRPCRequest):
                        self._heard = 0
            except Lost as fault:
                self.fault = self.fault or str(fault)


class Requests:
    """The wire to a server on the network: streamable HTTP."""

    def __init__(self, url: str, headers: Mapping[str, str], *, local: bool) -> None:
        """Send requests to public addresses, or to any if the server is `local`."""
        self._url, self._headers = url, headers
        self._carrier = BoundedTransport(any_address if local else is_public)
        self._ended: str | None = None

    @property
    def fault(self) -> str | None:
        """What the transport met first, or what else ended the conversation."""
        return self._carrier.fault or self._ended

    @fault.setter
    def fault(self, why: str | None) -> None:
        self._ended = why

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[TransportStreams]:
        """Carry messages while the block lasts."""
        async with (
            client(self._carrier, self._headers) as asking,
            streamable_http_client(self._url, http_client=asking, max_sse_event_size=MAX_MESSAGE) as streams,
        ):
            yield streams

    def stderr(self) -> str:
        """Return nothing: the server is somebody else's process."""
        return ""

    def cut(self) -> None:
        """Do nothing: the server is somebody else's process."""

    def close(self) -> None:
        """Do nothing: the block has closed the connections."""


class McpConnection:
    """A conversation with a server; its calls block, and any thread may make them."""

    def __init__(self, wire: Pipes | Requests, limit_s: float) -> None:
        """Open a session within `limit_s` seconds, which bound each call too; Lost if the server does not answer."""
        self._limit_s, self._wire = limit_s, wire
        self._loop = _loop_of(os.getpid())
        self._listed = False
        self._opened: Future[ClientSession] = Future()
        self._ended = threading.Event()
        self._life = asyncio.run_coroutine_threadsafe(self._live(), self._loop)
        try:
            self._session = self._opened.result()
        except BaseException:
            self.close()
            raise

    async def _live(self) -> None:
        try:
            async with self._wire.streams() as streams, ClientSession(*streams, client_info=_OURS) as session:
                try:
                    await self._within(_greeted(session))
                except ToolFault as fault:
                    self._opened.set_exception(self._lost(str(fault)))
                    return
                except ValidationError:
                    self._opened.set_exception(self._lost("The server's greeting is none."))
                    return
                self._opened.set_result(session)
                await asyncio.Event().wait()  # until it is cancelled
        except Exception as error:  # noqa: BLE001 (whatever ends the wire: those who wait are told by its fault)
            self._wire.fault = self._wire.fault or f"The conversation has ended: {type(error).__name__}."
        finally:
            if not self._opened.done():
                self._opened.set_exception(self._lost(self._wire.fault or ENDED))
            self._ended.set()

    def _lost(self, why: str) -> Lost:
        return Lost(why, self._wire.stderr())

    async def _within(self, asked: Awaitable[_ANSWER]) -> _ANSWER:
        """Return what the server answers in time; Lost if the connection is gone, ToolFault for what it refuses."""
        answer = asyncio.ensure_future(asked)
        # What came of a request whose asker has left is looked at, or Python would print it.
        answer.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        try:
            async with suspend_aware_timeout(self._limit_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            self._wire.cut()  # or the package would wait for seconds to tell a server that may read nothing
            raise self._lost(f"The server did not answer within {self._limit_s:g} s.") from None
        except MCPError as refusal:
            if self._wire.fault is not None or self._ended.is_set():
                raise self._lost(self._wire.fault or ENDED) from None
            raise ToolFault(cleaned(f"The server refused: {refusal.message}"[:1000])) from None
        except RuntimeError as fault:  # a version of the protocol that the package does not speak
            raise self._lost(cleaned(str(fault)[:1000])) from None
        finally:
            answer.cancel()

    def _ask(self, asked: Coroutine[Any, Any, _ANSWER]) -> _ANSWER:
        waiting = asyncio.run_coroutine_threadsafe(self._within(asked), self._loop)
        try:
            return waiting.result()
        finally:
            waiting.cancel()  # where the wait was broken off

    def tools(self) -> tuple[ToolSchema, ...]:
        """Return the server's tools; ToolFault for an invalid list."""
        found: list[ToolSchema] = []
        page: types.PaginatedRequestParams | None = None
        for _ in range(MAX_PAGES):
            try:
                listed = self._ask(self._session.list_tools(params=page))
            except (ValidationError, RecursionError):
                raise ToolFault("its list of tools is none.") from None
            found += (
                ToolSchema(each.name, each.description or "", each.input_schema) for each in listed.tools
            )
            if not listed.next_cursor:
                break
            page = types.PaginatedRequestParams(cursor=listed.next_cursor)
        self._listed = True
        return tuple(found)

    def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Return the text of a tool's result; ToolFault when the result reports a failure, Lost when there is no answer.

        The tool's `outputSchema` is ignored: a server could make that check arbitrarily long.
        """
        if self._session.discover_result is not None and not self._listed:
            self.tools()  # in versions without `initialize` a tool's schema says what of a call is sent as headers
        given = json.loads(json.dumps(dict(arguments), default=str))
        asked = types.CallToolRequest(params=types.CallToolRequestParams(name=name, arguments=given))
        try:
            result = self._ask(self._session.send_request(asked, _RESULT))
        except (ValidationError, RecursionError):
            raise ToolFault(
                "The server answered with something that is no result of this protocol."
            ) from None
        if isinstance(result, types.InputRequiredResult):
            wanted = sorted({each.method for each in (result.input_requests or {}).values()})
            raise ToolFault(
                f"The tool asks back before it answers ({', '.join(wanted) or 'to be called again'}), which is not offered."
            )
        text = text_of(result)
        if result.is_error:
            raise ToolFault(text)
        return text

    def close(self) -> None:
        """End the conversation, and a program with everything that it started in its group."""
        self._wire.cut()
        self._life.cancel()
        self._ended.wait(CLOSE_S)
        self._wire.close()


_MAKING = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's conversations; after a fork it is another one."""
    with _MAKING:
        if process not in _loops:
            _loops[process] = asyncio.new_event_loop()
            threading.Thread(target=_loops[process].run_forever, name="kapelle-mcp", daemon=True).start()
        return _loops[process]


_UNKNOWN = frozenset([types.METHOD_NOT_FOUND, types.INVALID_PARAMS, types.UNSUPPORTED_PROTOCOL_VERSION])
"""Codes with which a server may refuse an unknown opening request."""


async def _greeted(session: ClientSession) -> types.InitializeResult | types.DiscoverResult:
    """Open the session with `initialize`, or if the server refuses that, with `server/discover` of the versions without it."""
    try:
        return await session.initialize()
    except (MCPError, RuntimeError) as refusal:
        if isinstance(refusal, MCPError) and refusal.code not in _UNKNOWN:
            raise
        try:
            return await session.discover()
        except (MCPError, RuntimeError, ValidationError):
            raise refusal from None


def text_of(result: types.CallToolResult) -> str:
    """Return what an agent reads of a result: its texts, and for other content the kind that was left out.

    Structured content is written as JSON if no text represents it.
    """
    parts = []
    for part in result.content:
        match part:
            case types.TextContent():
                parts.append(part.text)
            case types.ImageContent() | types.AudioContent():
                parts.append(f"({part.type} that is not text: {part.mime_type[:100]})")
            case types.ResourceLink():
                parts.append(f"(resource that was not read: {part.name[:200]}, {part.uri[:1000]})")
            case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
                parts.append(resource.text)
            case _:
                parts.append(f"(resource that is not text: {part.resource.uri[:1000]})")
    if result.structured_content is not None and not any(
        isinstance(each, types.TextContent) and each.text for each in result.content
    ):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts) or "(nothing)"
