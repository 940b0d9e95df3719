"""A conversation with an MCP server: the official package's session over our own bounded transports.

The one module that knows the package. All conversations of a process live in one event loop of a thread of its own, because
tools are called from many threads; each is a task there, from its greeting to its end.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio
from mcp import ClientSession, MCPError, types
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from pydantic import BaseModel, TypeAdapter, ValidationError

from kapelle.environments.tools.contract import Lost, ToolFault, ToolSchema
from kapelle.environments.tools.mcp_wires import ENDED, MAX_MESSAGE, Program, client, transport
from kapelle.runtime.characters import cleaned
from kapelle.runtime.clock import suspend_aware_timeout

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client import Transport
    from mcp.client._transport import TransportStreams

    from kapelle.environments.tools.mcp import Mcp
    from kapelle.types import Json

MAX_PAGES = 16
"""Pages of a list of tools."""
MAX_ASIDE = 10_000
"""Messages of a server after each that it is asked: its answer, what it tells, and what it asks itself."""
CLOSE_S = 10.0
"""Most seconds in which a conversation may come to its end."""
_ANSWER = TypeVar("_ANSWER", bound=BaseModel)
_RESULT: TypeAdapter[types.CallToolResult | types.InputRequiredResult] = TypeAdapter(
    types.CallToolResult | types.InputRequiredResult
)
_OURS = types.Implementation(name="kapelle", version="0")
for _talkative in ("mcp", "client"):
    # What the package logs holds a server's text; without a handler Python would print it.
    logging.getLogger(_talkative).addHandler(logging.NullHandler())


class Wire(Protocol):
    """What carries messages to a server and back."""

    fault: str | None
    """Why nothing is carried any more; None while it is."""

    def streams(self) -> Transport:
        """Return the package's two streams of messages, for one block."""
        ...

    def cut(self) -> None:
        """End the server if it is ours; from any thread."""
        ...

    def close(self) -> None:
        """Free what is held when the block of the streams has been left."""
        ...


class Pipes:
    """The wire to a program; what it tells unasked is dropped."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.fault: str | None = None
        self._heard = 0
        self.cut, self.close = program.kill, program.close

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
                await self._pass_on(told)
            except Lost as fault:
                self.fault = self.fault or str(fault)
            except anyio.BrokenResourceError:
                return  # the session has ended

    async def _pass_on(self, told: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        while self._heard <= MAX_ASIDE:
            message = _message(await self.program.read_line())
            self._heard += 1
            if isinstance(message, types.JSONRPCNotification):
                await asyncio.sleep(0)  # lets others have their turn, however much is told
            else:
                await told.send(SessionMessage(message))
        raise Lost(f"The server sent more than {MAX_ASIDE:,} messages for one question.")

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

    def __init__(self, settings: Mcp) -> None:
        assert settings.url is not None, "validated"
        self._url, self._headers = settings.url, settings.headers
        self._carrier = transport(local=settings.local)
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

    def cut(self) -> None:
        """Leave the server alone: it is not ours."""

    def close(self) -> None:
        """Hold nothing: the block has closed the connections."""


def _message(line: bytes) -> types.JSONRPCMessage:
    try:
        return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError:
        raise Lost("The server sent something that is no message.") from None


class Connection:
    """A conversation with a server; its calls block, and any thread may make them."""

    def __init__(self, settings: Mcp) -> None:
        """Start or reach the server and greet it; Lost when it does not answer."""
        self._limit_s = settings.call_s
        self._wire = _wire(settings)
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
                    self._opened.set_exception(Lost(str(fault)))
                    return
                except ValidationError:
                    self._opened.set_exception(Lost("The server's greeting is none."))
                    return
                self._opened.set_result(session)
                await asyncio.Event().wait()  # until it is cancelled
        except Exception as error:  # noqa: BLE001 (whatever ends the wire: those who wait are told by its fault)
            self._wire.fault = self._wire.fault or f"The conversation has ended: {type(error).__name__}."
        finally:
            if not self._opened.done():
                self._opened.set_exception(Lost(self._wire.fault or ENDED))
            self._ended.set()

    async def _within(self, asked: Awaitable[_ANSWER]) -> _ANSWER:
        """Return what the server answers in time; Lost when it cannot any more, ToolFault for what it refuses."""
        answer = asyncio.ensure_future(asked)
        answer.add_done_callback(_looked_at)
        try:
            async with suspend_aware_timeout(self._limit_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            self._wire.cut()  # or the package would wait for seconds to tell a server that may read nothing
            raise Lost(f"The server did not answer within {self._limit_s:g} s.") from None
        except MCPError as refusal:
            if self._wire.fault is not None or self._ended.is_set():
                raise Lost(self._wire.fault or ENDED) from None
            raise ToolFault(cleaned(f"The server refused: {refusal.message}"[:1000])) from None
        except RuntimeError as fault:  # a version of the protocol that the package does not speak
            raise Lost(cleaned(str(fault)[:1000])) from None
        finally:
            answer.cancel()

    def _ask(self, asked: Coroutine[Any, Any, _ANSWER]) -> _ANSWER:
        waiting = asyncio.run_coroutine_threadsafe(self._within(asked), self._loop)
        try:
            return waiting.result()
        finally:
            waiting.cancel()  # where the wait was broken off

    def tools(self) -> tuple[ToolSchema, ...]:
        """Return what the server offers; ToolFault for something that is no list of tools."""
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

        A result is not held against the tool's `outputSchema`: a server could make that check as long as it likes.
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


def _wire(settings: Mcp) -> Wire:
    return Requests(settings) if settings.url is not None else Pipes(Program(settings.command, settings.env))


def _looked_at(answer: asyncio.Future[_ANSWER]) -> None:
    """Take note of what came of a request whose asker has left, or Python would print it."""
    if not answer.cancelled():
        answer.exception()


_MAKING = threading.Lock()


def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's conversations; after a fork it is another one."""
    with _MAKING:
        return _started_loop(process)


@functools.lru_cache(maxsize=1)
def _started_loop(_process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="kapelle-mcp", daemon=True).start()
    return loop


_UNKNOWN = frozenset([types.METHOD_NOT_FOUND, types.INVALID_PARAMS, types.UNSUPPORTED_PROTOCOL_VERSION])
"""Codes with which a server may refuse a greeting that it does not know."""


async def _greeted(session: ClientSession) -> types.InitializeResult | types.DiscoverResult:
    """Greet a server by `initialize`, or where it refuses that, by `server/discover` of the versions without it."""
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
    """Return what an agent reads of a result: its texts, and of what is none, which kind was left out.

    Structured content is written as JSON where no text stands for it.
    """
    parts = [_part(each) for each in result.content]
    if result.structured_content is not None and not any(
        isinstance(each, types.TextContent) and each.text for each in result.content
    ):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts) or "(nothing)"


def _part(part: types.ContentBlock) -> str:
    match part:
        case types.TextContent():
            return part.text
        case types.ImageContent() | types.AudioContent():
            return f"({part.type} that is not text: {part.mime_type[:100]})"
        case types.ResourceLink():
            return f"(resource that was not read: {part.name[:200]}, {part.uri[:1000]})"
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return resource.text
        case _:
            return f"(resource that is not text: {part.resource.uri[:1000]})"
