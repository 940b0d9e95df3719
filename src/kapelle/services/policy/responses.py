"""Handles calls of OpenAI's Responses API, and stores the responses that later calls continue, read or delete."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.routing import Route

from kapelle.services.http import Call, JsonAnswer, route
from kapelle.services.policy.chat_form import Answering, ChatMessage, ChatRequest
from kapelle.services.policy.responses_form import (
    Item,
    MessageItem,
    ResponseRequest,
    ResponseWriter,
    as_chat,
    read_response_request,
    renamed,
)
from kapelle.services.request_errors import RequestError
from kapelle.types import Json

MOST = 4096
"""The maximum number of responses that are kept."""
MOST_CHARACTERS = 64 << 20
"""The maximum total number of characters in the conversations of the kept responses."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response that later calls may continue."""

    row: Json
    session: str | None
    """The session of the response, or None if sessions are not recorded and the call specified no session."""
    items: Sequence[Json]
    """The input items of this call, without the earlier conversation."""
    messages: Sequence[ChatMessage]
    """The whole conversation including the response, without instructions."""
    size: int
    """The number of characters of the conversation."""


class StoredResponses:
    """The stored responses, of which the oldest are discarded first. The object may be used by only one thread."""

    def __init__(
        self, under_way: Callable[[str], bool], most: int = MOST, characters: int = MOST_CHARACTERS
    ) -> None:
        """Keep at most `most` responses and `characters` characters. Responses of sessions that are not `under_way` are discarded."""
        self._under_way = under_way
        self._most, self._characters = most, characters
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def routes(self) -> Sequence[Route]:
        """Return the routes for stored responses."""
        return (
            route("GET", "/v1/responses/{name:path}", self.show),
            route("DELETE", "/v1/responses/{name:path}", self.delete),
        )

    async def show(self, call: Call) -> JsonAnswer:
        """Return a response or, for `/input_items`, the items of its input."""
        name, _, rest = call.path.partition("/")
        if rest not in ("", "input_items"):
            raise RequestError(404, "There is no such path on this server.", None, "not_found")
        kept = self.get(name, call.session)
        if not rest:
            return JsonAnswer(kept.row)
        ends = {"first_id": kept.items[0]["id"], "last_id": kept.items[-1]["id"]} if kept.items else {}
        return JsonAnswer({"object": "list", "data": list(kept.items), "has_more": False, **ends})

    async def delete(self, call: Call) -> JsonAnswer:
        """Delete a response. Responses that continue the deleted response are kept."""
        self.get(call.path, call.session)
        self._drop(call.path)
        return JsonAnswer({"id": call.path, "object": "response", "deleted": True})

    def get(self, name: str, session: str | None, parameter: str | None = None) -> StoredResponse:
        """Return a response. Raises RequestError (404) if the response is unknown, deleted, or in another session."""
        kept = self._kept.get(name)
        if kept is not None and kept.session is not None and not self._under_way(kept.session):
            self._drop(name)
            kept = None
        if kept is None or (session is not None and session != kept.session):
            raise RequestError(
                404,
                f"There is no response {name[:128]!r}. It was deleted, was not stored (`store`), or belongs "
                "to a different session or one that has ended.",
                parameter,
                "response_not_found",
            )
        return kept

    def keep(self, name: str, kept: StoredResponse) -> None:
        """Store a response. The response replaces an equal response that was stored by a repeated call."""
        if name in self._kept:
            self._drop(name)
        self._kept[name] = kept
        self._size += kept.size
        while len(self._kept) > self._most or (self._size > self._characters and len(self._kept) > 1):
            self._drop(next(iter(self._kept)))

    def _drop(self, name: str) -> None:
        self._size -= self._kept.pop(name).size


class ResponseForm:
    """A call of `POST /v1/responses` and the format of its response."""

    def __init__(self, call: Call, kept: StoredResponses) -> None:
        """Parse a call.

        Raises RequestError with the status 400 for an incorrect call, and 404 for a call that continues an unknown
        response.
        """
        self._request: ResponseRequest = read_response_request(call.body)
        self._kept = kept
        earlier: Sequence[ChatMessage] = ()
        if (name := self._request.previous_response_id) is not None:
            before = kept.get(name, call.session, "previous_response_id")
            earlier, call = before.messages, replace(call, session=before.session)
        self.call = call
        """The call, assigned to the session of the response that it continues."""
        chat, self._messages = as_chat(self._request, earlier)
        self.request: ChatRequest = chat
        """The same request as a chat completion request."""
        self._writer: ResponseWriter | None = None

    async def whole(self, answering: Answering, answers: AsyncIterator[Any]) -> Json:
        """Return the whole response as one JSON object."""
        async with aclosing(self.events(answering, answers)) as events:
            last = [event async for event in events][-1]
        return last["response"]

    async def events(self, answering: Answering, answers: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Yield the response as events."""
        head = answering.head
        writer = self._writer = ResponseWriter(self._request, head.session, head.response_id)
        async with aclosing(writer.events(answering.pieces(answers))) as events:
            async for event in events:
                if self._request.store and writer.message:
                    self._keep(writer, event["response"])
                yield event

    def failed(self, refusal: RequestError) -> Json:
        """Return the last event of a stream that fails."""
        assert self._writer is not None, "a stream begins with its first event"
        return self._writer.failed(renamed(refusal))

    def _keep(self, writer: ResponseWriter, row: Json) -> None:
        given = self._request.input
        items: Sequence[Item] = (
            [MessageItem(type="message", role="user", content=given)] if isinstance(given, str) else given
        )
        rows = [_as_item(item.model_dump(exclude_unset=True)) for item in items]
        messages = [*self._messages, ChatMessage.model_validate(writer.message)]
        size = sum(
            len(message.text) + sum(len(call.function.arguments) for call in message.tool_calls or ())
            for message in messages
        )
        session = writer.session or self.call.session
        self._kept.keep(writer.identity, StoredResponse(row, session, rows, messages, size))


def _as_item(given: Mapping[str, Json]) -> Json:
    """Return an input item with an id, in which texts are lists of parts, as clients expect items to be."""
    item = {"id": f"item_{secrets.token_hex(16)}", **given}
    if item["type"] == "message" and isinstance(item["content"], str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": item["content"]}]
    return item
