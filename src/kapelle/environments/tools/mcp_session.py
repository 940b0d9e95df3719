"""Connections to MCP servers. The session of the official package is used with custom transports that limit the size of messages.

Only this module imports the package and its HTTP client. A server program receives only the named environment variables, its lines
have a maximum length, and its whole process group is killed at the end. Tools are called from many threads, so all connections of a
process share one thread with an event loop, in which each connection is a task.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import httpx2
from mcp import ClientSession, MCPError, types
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from pydantic import BaseModel, TypeAdapter, ValidationError

from kapelle.environments.tools.contract import Lost, ToolFault, ToolSchema
from kapelle.environments.tools.web import (
    Resolve,
    WebFault,
    addresses_of,
    any_address,
    is_public,
    send_pinned,
    tls_context,
)
from kapelle.runtime.characters import cleaned
from kapelle.runtime.clock import suspend_aware_timeout

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams

    from kapelle.types import Json

# -------- A server program: one message per line

MAX_MESSAGE = 1 << 20
"""The maximum size of a message in bytes."""
KEPT_ERRORS = 2_000
"""The maximum number of bytes of a server's standard error output that are shown."""
ENDED = "The server has ended."
"""The default reason if the connection to a server is lost."""


class McpProgram:
    """A running server program with its pipes. Any thread may start or kill the program. Only one event loop reads and writes."""

    def __init__(self, command: Sequence[str], env: Sequence[str]) -> None:
        """Start the program with PATH, HOME, LANG and the variables named in `env`. Raises Lost if the program cannot be started."""
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
        """Return the next line of output. Raises Lost if the program ends or the line is too long."""
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
        """Write a line, and wait while the pipe is full. Raises Lost if the program has ended."""
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
        """Return the end of the program's standard error output."""
        end = os.fstat(self._errors.fileno()).st_size
        tail = os.pread(self._errors.fileno(), KEPT_ERRORS, max(0, end - KEPT_ERRORS))
        return cleaned(tail.decode("utf-8", "replace").strip())

    def kill(self) -> None:
        """Kill the program's process group, but only once, because the process id may be reused."""
        if self.process.returncode is not None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.poll()
        self.process.wait()

    def close(self) -> None:
        """Close the pipes of the program."""
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


# -------- The HTTP transport to an MCP server on the network: responses are limited, and addresses are checked (see `web`)
#
# The package follows redirects only within the server's origin; each redirect is checked like the first request.

GOODBYE_S = 2.0
"""Maximum time in seconds for a server to confirm the end of a session."""
MAX_STREAMS = 100
"""The maximum number of times that a connection may open the stream of the server's requests. The package reopens a broken stream."""
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "kapelle"}


class BoundedTransport(httpx2.AsyncBaseTransport):
    """An HTTP transport that sends requests only to checked addresses. `fault` stores the first failure."""

    def __init__(self, allowed: Callable[[str], bool], resolve: Resolve = addresses_of) -> None:
        self.fault: str | None = None
        self._allowed, self._resolve = allowed, resolve
        self._streams = 0
        self._inner = httpx2.AsyncHTTPTransport(verify=tls_context(), trust_env=False)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request and return the response.

        Raises httpx2.TransportError if the request fails or the response is not allowed.
        """
        if request.method == "GET":
            return await self._optional_stream(request)
        in_session = "mcp-session-id" in request.headers
        try:
            if request.method == "DELETE":
                async with asyncio.timeout(GOODBYE_S):
                    answer = await self._send(request)
                await answer.aclose()
                return httpx2.Response(answer.status_code)
            answer = await self._send(request)
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise WebFault("it answered in a compressed form")
        except WebFault as fault:
            raise self.failed(str(fault)) from None
        except httpx2.HTTPError as error:
            raise self.failed(f"the request failed ({type(error).__name__})") from None
        # Outside a session, a 404 response may contain the message that there is no such method.
        is_message = answer.headers.get("Content-Type", "").startswith("application/json") and not in_session
        if (
            answer.status_code in (401, 403)
            or answer.status_code >= 500
            or (answer.status_code == 404 and not is_message)
        ):
            self.failed(f"it answered {answer.status_code}")
        return _limited(answer, self.failed)

    async def _optional_stream(self, request: httpx2.Request) -> httpx2.Response:
        """Open the stream of the server's requests, so that the package can decline these requests.

        A connection also works without this stream. If the stream cannot be opened, breaks or is too long, it ends without an
        error.
        """
        self._streams += 1
        if self._streams <= MAX_STREAMS:
            with suppress(WebFault, httpx2.HTTPError):
                answer = await self._send(request)
                plain = answer.headers.get("Content-Encoding", "identity") == "identity"
                if answer.status_code == 200 and plain:
                    return _limited(answer, None)
                await answer.aclose()
        return httpx2.Response(405)

    def failed(self, why: str) -> httpx2.TransportError:
        """Store the reason if it is the first failure, and return the first failure as an error."""
        self.fault = self.fault or f"The request to the server failed: {why}."
        return httpx2.TransportError(self.fault)

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        response: httpx2.Response = await send_pinned(
            request, self._inner, httpx2.ConnectError, self._allowed, self._resolve
        )
        return response

    async def aclose(self) -> None:
        """Close all connections of the transport."""
        await self._inner.aclose()


class _LimitedStream(httpx2.AsyncByteStream):
    """A response body that raises an error if it is too long or the connection breaks. If `failed` is None, the body ends instead."""

    def __init__(
        self, stream: httpx2.AsyncByteStream, failed: Callable[[str], httpx2.TransportError] | None
    ) -> None:
        self._stream, self._failed = stream, failed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        with nullcontext() if self._failed else suppress(httpx2.HTTPError):
            async for part in self._stream:
                size += len(part)
                if size > MAX_MESSAGE:
                    if self._failed is None:
                        return
                    raise self._failed(f"it sent more than {MAX_MESSAGE:,} bytes at once")
                yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def _limited(
    answer: httpx2.Response, failed: Callable[[str], httpx2.TransportError] | None
) -> httpx2.Response:
    assert isinstance(answer.stream, httpx2.AsyncByteStream), "the transport is asynchronous"
    stream = _LimitedStream(answer.stream, failed)
    return httpx2.Response(
        answer.status_code, headers=answer.headers, stream=stream, extensions=answer.extensions
    )


def client(transport: BoundedTransport, headers: Mapping[str, str] | None) -> httpx2.AsyncClient:
    """Return an HTTP client without time limits. Every request contains the given headers."""
    return httpx2.AsyncClient(
        transport=transport, headers={**_HEADERS, **(headers or {})}, timeout=None, trust_env=False
    )


# -------- The connection: the official package's session over the transports above

MAX_PAGES = 16
"""The maximum number of pages in a list of tools."""
MAX_MESSAGES = 10_000
"""The maximum number of messages that a server may send after each request: the response, notifications and the server's own requests."""
CLOSE_S = 10.0
"""Maximum time in seconds for closing a connection."""
_ANSWER = TypeVar("_ANSWER", bound=BaseModel)
_RESULT: TypeAdapter[types.CallToolResult | types.InputRequiredResult] = TypeAdapter(
    types.CallToolResult | types.InputRequiredResult
)
_CLIENT = types.Implementation(name="kapelle", version="0")
for _name in ("mcp", "client"):
    # The package logs text from servers; without a handler, Python would print it.
    logging.getLogger(_name).addHandler(logging.NullHandler())
LOG = logging.getLogger(__name__)
_warned = set[str]()
"""The names of the programs for which an invalid line has already been logged."""


class Pipes:
    """The transport to a server program. Notifications from the program are discarded."""

    def __init__(self, program: McpProgram) -> None:
        self.program = program
        self.fault: str | None = None
        """The reason why the transport has stopped, or None while the transport works."""
        self._received = 0
        """The number of messages received since the last request."""
        self.cut, self.close, self.stderr = program.kill, program.close, program.stderr

    @asynccontextmanager
    async def streams(
        self,
    ) -> AsyncIterator[
        tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]
    ]:
        """Transfer messages while the block runs, or until the program ends."""
        incoming, to_session = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        from_session, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        async with incoming, to_session, from_session, outgoing, anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, incoming)
            tasks.start_soon(self._write, outgoing)
            yield to_session, from_session
            tasks.cancel_scope.cancel()

    async def _read(self, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        async with incoming:
            try:
                while self._received <= MAX_MESSAGES:
                    line = await self.program.read_line()
                    self._received += 1
                    try:
                        message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValidationError:
                        self._log_invalid(line)
                        await asyncio.sleep(0)
                        continue
                    if isinstance(message, types.JSONRPCNotification):
                        await asyncio.sleep(0)  # lets other tasks run between many notifications
                    else:
                        await incoming.send(SessionMessage(message))
                why = f"The server sent more than {MAX_MESSAGES:,} messages for one question."
            except Lost as fault:
                why = str(fault)
            except anyio.BrokenResourceError:
                return  # the session has ended
            self.fault = self.fault or why

    def _log_invalid(self, line: bytes) -> None:
        """Log a line of standard output that is not a message. Only one line per program is logged, because episodes start it often."""
        if self.program.name not in _warned:
            _warned.add(self.program.name)
            shown = cleaned(line.decode("utf-8", "replace")[:200])
            LOG.warning(
                "The MCP server `%s` wrote a line that is not a message: %s", self.program.name, shown
            )

    async def _write(self, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async with outgoing:
            try:
                async for item in outgoing:
                    text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await self.program.write_line(text.encode())
                    if isinstance(item.message, types.JSONRPCRequest):
                        self._received = 0
            except Lost as fault:
                self.fault = self.fault or str(fault)


class Requests:
    """The transport to a server on the network, which uses streamable HTTP."""

    def __init__(self, url: str, headers: Mapping[str, str], *, local: bool) -> None:
        """Send requests only to public addresses or, if `local` is true, to any address."""
        self._url, self._headers = url, headers
        self._transport = BoundedTransport(any_address if local else is_public)
        self._ended: str | None = None

    @property
    def fault(self) -> str | None:
        """The first failure of the transport, or another reason why the connection has ended."""
        return self._transport.fault or self._ended

    @fault.setter
    def fault(self, why: str | None) -> None:
        self._ended = why

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[TransportStreams]:
        """Transfer messages while the block runs."""
        async with (
            client(self._transport, self._headers) as http,
            streamable_http_client(self._url, http_client=http, max_sse_event_size=MAX_MESSAGE) as streams,
        ):
            yield streams

    def stderr(self) -> str:
        """Return an empty string, because the process of the server does not run on this machine."""
        return ""

    def cut(self) -> None:
        """Do nothing, because the process of the server does not run on this machine."""

    def close(self) -> None:
        """Do nothing, because the connections are closed at the end of the block in `streams`."""


class McpConnection:
    """A connection to a server. Calls block, and any thread may make them."""

    def __init__(self, transport: Pipes | Requests, limit_s: float) -> None:
        """Open a session. Raises Lost if the server does not respond.

        `limit_s` is the maximum time in seconds for opening the session and for each call.
        """
        self._limit_s, self._transport = limit_s, transport
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
            async with (
                self._transport.streams() as streams,
                ClientSession(*streams, client_info=_CLIENT) as session,
            ):
                try:
                    await self._within(_initialize(session))
                except ToolFault as fault:
                    self._opened.set_exception(self._lost(str(fault)))
                    return
                except ValidationError:
                    self._opened.set_exception(self._lost("The server's answer to `initialize` is invalid."))
                    return
                self._opened.set_result(session)
                await asyncio.Event().wait()  # until the task is cancelled
        except Exception as error:  # noqa: BLE001 (the transport can end in any way; `fault` has the reason)
            self._transport.fault = (
                self._transport.fault or f"The connection has ended: {type(error).__name__}."
            )
        finally:
            if not self._opened.done():
                self._opened.set_exception(self._lost(self._transport.fault or ENDED))
            self._ended.set()

    def _lost(self, why: str) -> Lost:
        return Lost(why, self._transport.stderr())

    async def _within(self, request: Awaitable[_ANSWER]) -> _ANSWER:
        """Return the response to a request.

        Raises Lost if the response does not arrive in time, and ToolFault if the server rejects the request.
        """
        answer = asyncio.ensure_future(request)
        # Retrieve an error that occurs after the caller has left; otherwise Python would print it.
        answer.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        try:
            async with suspend_aware_timeout(self._limit_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            self._transport.cut()  # the package would wait forever for a server that does not read
            raise self._lost(f"The server did not answer within {self._limit_s:g} s.") from None
        except MCPError as error:
            if self._transport.fault is not None or self._ended.is_set():
                raise self._lost(self._transport.fault or ENDED) from None
            raise ToolFault(cleaned(f"The server refused: {error.message}"[:1000])) from None
        except RuntimeError as fault:  # an unsupported version of the protocol
            raise self._lost(cleaned(str(fault)[:1000])) from None
        finally:
            answer.cancel()

    def _request(self, request: Coroutine[Any, Any, _ANSWER]) -> _ANSWER:
        waiting = asyncio.run_coroutine_threadsafe(self._within(request), self._loop)
        try:
            return waiting.result()
        finally:
            waiting.cancel()  # if the wait was interrupted

    def tools(self) -> tuple[ToolSchema, ...]:
        """Return the schemas of the server's tools. Raises ToolFault if the server sends an invalid list."""
        found: list[ToolSchema] = []
        page: types.PaginatedRequestParams | None = None
        for _ in range(MAX_PAGES):
            try:
                listed = self._request(self._session.list_tools(params=page))
            except (ValidationError, RecursionError):
                raise ToolFault("its list of tools is invalid.") from None
            found += (
                ToolSchema(each.name, each.description or "", each.input_schema) for each in listed.tools
            )
            if not listed.next_cursor:
                break
            page = types.PaginatedRequestParams(cursor=listed.next_cursor)
        self._listed = True
        return tuple(found)

    def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Call a tool and return the text of its result. Raises ToolFault if the call fails, and Lost if there is no response.

        The `outputSchema` of the tool is ignored, because a server could make the validation take arbitrarily long.
        """
        if self._session.discover_result is not None and not self._listed:
            self.tools()  # for servers without `initialize`, a tool's schema defines the headers of its calls
        plain = json.loads(json.dumps(dict(arguments), default=str))
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=name, arguments=plain))
        try:
            result = self._request(self._session.send_request(request, _RESULT))
        except (ValidationError, RecursionError):
            raise ToolFault(
                "The server answered with something that is not a result of this protocol."
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
        """Close the connection. If the server is a program, its process group is killed."""
        self._transport.cut()
        self._life.cancel()
        self._ended.wait(CLOSE_S)
        self._transport.close()


_LOCK = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop for the connections of this process. A forked process has its own event loop."""
    with _LOCK:
        if process not in _loops:
            _loops[process] = asyncio.new_event_loop()
            threading.Thread(target=_loops[process].run_forever, name="kapelle-mcp", daemon=True).start()
        return _loops[process]


_UNKNOWN = frozenset([types.METHOD_NOT_FOUND, types.INVALID_PARAMS, types.UNSUPPORTED_PROTOCOL_VERSION])
"""Error codes of servers that do not support `initialize`."""


async def _initialize(session: ClientSession) -> types.InitializeResult | types.DiscoverResult:
    """Open the session with `initialize`, or with `server/discover` for protocol versions without `initialize`."""
    try:
        return await session.initialize()
    except (MCPError, RuntimeError) as error:
        if isinstance(error, MCPError) and error.code not in _UNKNOWN:
            raise
        try:
            return await session.discover()
        except (MCPError, RuntimeError, ValidationError):
            raise error from None


def text_of(result: types.CallToolResult) -> str:
    """Return a result as a string, which consists of its text parts and of a note about each other part.

    If the result contains no text, its structured content is returned as JSON.
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
