"""Implements the format of OpenAI's Responses API.

Requests are converted to chat requests, and completions to output items, either as a whole or as the events of a
stream. Agents support only chat completions (`agents.Chat`), so this module translates between the two formats. A
conversation of the Responses API is a list of items, which are messages, function calls and the outputs of function
calls. An agent's message and the calls after it become one message with the role `assistant`. In this way, a completion
that a client sends back is recognised as the sampled completion.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kapelle.services.policy.chat_form import (
    MOST_ALTERNATIVES,
    ChatMessage,
    ChatRequest,
    Finished,
    JsonFormat,
    JsonSchema,
    Piece,
    RefusalPart,
    SamplingBody,
    TextFormat,
    read_request,
)
from kapelle.services.request_errors import Body, RequestError, read_body, wrong
from kapelle.types import Json

# -------- Requests


class EffortWords(Body):
    """The parameter for how long a model should think, which has no effect."""

    effort: str | None = Field(default=None, max_length=32)
    summary: str | None = Field(default=None, max_length=32)
    generate_summary: str | None = Field(default=None, max_length=32)


class TextSchema(JsonSchema):
    """The text format for JSON that matches a schema."""

    type: Literal["json_schema"]


class TextWords(Body):
    """The format of the text in the response."""

    format: Annotated[TextFormat | JsonFormat | TextSchema, Field(discriminator="type")] = TextFormat(
        type="text"
    )
    verbosity: str | None = Field(default=None, max_length=32)


class FunctionTool(Body):
    """A function that the agent may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] = False


class FunctionChoice(Body):
    """The choice of a function by its name."""

    type: Literal["function"]
    name: str


class ItemText(Body):
    """A text part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field(default=[])
    logprobs: list[Any] = Field(default=[])


Part = Annotated[ItemText | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(fail_fast=True)]


class MessageItem(Body):
    """A message item of a conversation."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Body):
    """A function call in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class OutputItem(Body):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts
    id: str | None = None
    status: str | None = None


class ReasoningItem(Body):
    """The thoughts in an earlier response."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] = Field(default=[])
    content: list[dict[str, Any]] = Field(default=[])
    encrypted_content: str | None = None
    status: str | None = None


def _typed(item: Json) -> Json:
    """Return an item with its type, which may be omitted for messages."""
    return {"type": "message", **item} if isinstance(item, dict) else item


Item = Annotated[
    Annotated[MessageItem | CallItem | OutputItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(_typed),
]


class ResponseStreamOptions(Body):
    """Options of a streamed response."""

    include_obfuscation: bool = False
    """An option of OpenAI's API that is ignored."""


class ResponseRequest(SamplingBody):
    """A request of `POST /v1/responses`. Parameters that are not listed raise a RequestError."""

    model: str
    input: str | Annotated[list[Item], Field(fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    tools: list[FunctionTool] = Field(default=[], max_length=128)
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextWords = TextWords()
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool = True
    include: list[str] = Field(default=[], max_length=32)
    metadata: dict[str, str] = Field(default={}, max_length=64)
    reasoning: EffortWords | None = None
    # With `auto`, OpenAI drops the first items. Here, a prompt that is too long raises a RequestError with either value.
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=64)
    # Only the neutral values of these parameters are accepted.
    background: Literal[False] = False
    # These parameters have no effect.
    max_tool_calls: int | None = None
    service_tier: str | None = Field(default=None, max_length=32)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response contains the log-probs of its tokens."""
        return LOGPROBS in self.include


LOGPROBS = "message.output_text.logprobs"


def read_response_request(body: Json) -> ResponseRequest:
    """Parse a request. Raises RequestError (400), which names the first parameter that is incorrect or not supported."""
    request = read_body(ResponseRequest, body)
    if request.top_logprobs and not request.wants_logprobs:
        raise wrong(f"`top_logprobs` needs `include: [{LOGPROBS}]`.", "top_logprobs")
    if isinstance(request.input, list) and not request.input:
        raise wrong("`input` is empty. Add a message.", "input")
    return request


def as_chat(
    request: ResponseRequest, earlier: Sequence[ChatMessage]
) -> tuple[ChatRequest, list[ChatMessage]]:
    """Convert the request to a chat completion request, and return it with the conversation without instructions.

    The argument `earlier` is the conversation that the request continues. As in OpenAI's API, instructions apply only
    to the current request.
    """
    conversation = [*earlier, *read_items(request.input)]
    opening = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    messages = [*opening, *conversation]
    if not messages:
        raise wrong("`input` has no text for the agent. Add a message.", "input")
    shared = {"model", "parallel_tool_calls", "temperature", "top_p", "stream", "chat_template_kwargs"}
    shared |= {"top_logprobs", *SamplingBody.model_fields}
    choice: Json = request.tool_choice
    if isinstance(request.tool_choice, FunctionChoice):
        choice = {"type": "function", "function": {"name": request.tool_choice.name}}
    form = request.text.format.model_dump(by_alias=True)
    if form["type"] == "json_schema":
        form = {"type": form.pop("type"), "json_schema": form}
    chat: dict[str, Json] = {
        **request.model_dump(include=shared, exclude_unset=True),
        "messages": [
            {"role": "user", "content": "?"}
        ],  # replaced below, so that errors about items name the items
        "tools": [
            {"type": "function", "function": tool.model_dump(exclude={"type", "defer_loading"})}
            for tool in request.tools
        ],
        "tool_choice": choice,
        "response_format": form,
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "verbosity": request.text.verbosity,
        "logprobs": request.wants_logprobs,
    }
    try:
        read = read_request(chat)
    except RequestError as error:
        raise renamed(error) from None
    return read.model_copy(update={"messages": messages}), conversation


_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "include",
}
"""Mapping from parameters of chat completions to their names in the Responses API."""


def renamed(refusal: RequestError, names: Mapping[str, str] = _NAMES) -> RequestError:
    """Return an error about the chat request in which parameters have their names in the Responses API, or in `names`."""
    name = own = refusal.parameter or ""
    for chat, other in names.items():
        if name == chat or name.startswith(f"{chat}."):
            own = f"{other}{name.removeprefix(chat)}"
    if name.startswith("tools."):
        own = name.replace(".function", "", 1)  # in this API, a tool has the fields of its function
    message = refusal.message.replace(f"`{name}`", f"`{own}`")
    return RequestError(refusal.status, message, own or None, refusal.code, refusal.headers)


# -------- The items of a conversation as messages


def read_items(given: str | Sequence[Item]) -> list[ChatMessage]:
    """Convert the items of a conversation to messages."""
    if isinstance(given, str):
        return [ChatMessage(role="user", content=given)]
    messages: list[dict[str, Any]] = []
    is_open = False  # whether calls that follow belong to the last message
    thoughts = ""  # thoughts of the next completion
    for item in given:
        if isinstance(item, ReasoningItem):
            thoughts, is_open = _thoughts(item), False  # the next item begins another completion
        elif isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": _text(item.content)})
            is_open = item.role == "assistant"
            if is_open and thoughts:
                messages[-1]["reasoning_content"] = thoughts
            thoughts = ""
        elif isinstance(item, CallItem):
            if not is_open:
                messages.append({"role": "assistant", "reasoning_content": thoughts or None})
                thoughts, is_open = "", True
            function = {"name": item.name, "arguments": item.arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        else:
            messages.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
            is_open = False
    return [ChatMessage.model_validate(each) for each in messages]


def _thoughts(item: ReasoningItem) -> str:
    texts = (part.get("text") for part in item.content if part.get("type") == "reasoning_text")
    return "".join(text for text in texts if isinstance(text, str))


def _text(content: str | Sequence[Part]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


# -------- Responses: the events of a stream, the last of which contains the whole response


def _name(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


_REPEATED = {"instructions", "max_output_tokens", "max_tool_calls", "metadata", "model", "tools"}
_REPEATED |= {"parallel_tool_calls", "previous_response_id", "store", "temperature", "tool_choice"}
_REPEATED |= {"top_logprobs", "top_p", "truncation", "user"}
"""The request parameters that are repeated in the response."""
_REASONING: Mapping[str, Json] = {"type": "reasoning", "summary": []}
_ANSWER: Mapping[str, Json] = {"type": "message", "role": "assistant"}


@dataclass
class ResponseWriter:
    """Writes one response as events, in the order in which OpenAI's server sends them."""

    request: ResponseRequest
    session: str | None
    identity: str
    created: int = field(default_factory=lambda: int(time.time()))
    output: list[dict[str, Json]] = field(default_factory=list)
    """The items that are complete."""
    message: Mapping[str, Json] = field(default_factory=dict)
    """The complete response as a message of a chat completion."""
    _sent: int = 0

    async def events(self, pieces: AsyncIterator[Piece | Finished]) -> AsyncGenerator[dict[str, Json], None]:
        """Yield the events of a response. The last event contains the complete response."""
        yield self._event("created", response=self.row("in_progress"))
        yield self._event("in_progress", response=self.row("in_progress"))
        thinking = item = thoughts = text = ""  # ids of the open items, and their texts
        tokens, unsent = list[Json](), list[Json]()
        async with aclosing(pieces) as coming:  # type: ignore[type-var]
            async for each in coming:
                calls = each.message.get("tool_calls", ()) if isinstance(each, Finished) else ()
                has_text = bool(each.words) or (isinstance(each, Finished) and not calls)
                if each.thoughts:
                    if not thinking:
                        thinking = _name("rs")
                        for event in self._begun(
                            thinking, _REASONING, {"type": "reasoning_text", "text": ""}
                        ):
                            yield event
                    thoughts += each.thoughts
                    yield self._event("reasoning_text.delta", **self._place(thinking), delta=each.thoughts)
                if thinking and not self.output and (has_text or isinstance(each, Finished)):
                    yield self._event("reasoning_text.done", **self._place(thinking), text=thoughts)
                    part: Json = {"type": "reasoning_text", "text": thoughts}
                    for event in self._over(thinking, _REASONING, part, "completed"):
                        yield event
                if each.words or not each.thoughts:  # the format has no field for tokens of thoughts
                    unsent += each.tokens or ()
                if has_text and not item:
                    item = _name("msg")
                    for event in self._begun(item, _ANSWER, _text_part("", [])):
                        yield event
                if each.words:
                    text += each.words
                    rows = list(unsent)
                    yield self._event(
                        "output_text.delta", **self._place(item), delta=each.words, logprobs=rows
                    )
                    tokens, unsent = [*tokens, *unsent], []
                if not isinstance(each, Finished):
                    continue
                is_cut = each.reason == "length"
                if item:
                    rows = [*tokens, *unsent]
                    yield self._event("output_text.done", **self._place(item), text=text, logprobs=rows)
                    status = "incomplete" if is_cut else "completed"
                    for event in self._over(item, _ANSWER, _text_part(text, rows), status):
                        yield event
                for call in calls:
                    for event in self._called(call):
                        yield event
                self.message = each.message
                # With the status `incomplete`, the Agents SDK would raise an error, which would end the program.
                yield self._event("completed", response=self.row("completed", each))

    def failed(self, refusal: RequestError) -> dict[str, Json]:
        """Return the last event of a response that fails."""
        error = {"code": "server_error", "message": refusal.message}
        return self._event("failed", response={**self.row("failed"), "error": error})

    def _event(self, kind: str, **more: Json) -> dict[str, Json]:
        self._sent += 1
        return {"type": f"response.{kind}", "sequence_number": self._sent - 1, **more}

    def _place(self, item: str) -> dict[str, Json]:
        """Return the position of the current part of an open item."""
        return {"item_id": item, "output_index": len(self.output), "content_index": 0}

    def _begun(self, item: str, about: Mapping[str, Json], part: Json) -> Iterator[dict[str, Json]]:
        """Yield the events that begin an item with one part."""
        row = {"id": item, **about, "status": "in_progress", "content": []}
        yield self._event("output_item.added", output_index=len(self.output), item=row)
        yield self._event("content_part.added", **self._place(item), part=part)

    def _over(
        self, item: str, about: Mapping[str, Json], part: Json, status: str
    ) -> Iterator[dict[str, Json]]:
        """Yield the events that end an item with one part."""
        yield self._event("content_part.done", **self._place(item), part=part)
        whole = {"id": item, **about, "status": status, "content": [part]}
        self.output.append(whole)
        yield self._event("output_item.done", output_index=len(self.output) - 1, item=whole)

    def _called(self, call: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
        item, index = _name("fc"), len(self.output)
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        whole = {
            "id": item,
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": name,
            "arguments": arguments,
        }
        begun = {**whole, "status": "in_progress", "arguments": ""}
        place: dict[str, Json] = {"item_id": item, "output_index": index}
        yield self._event("output_item.added", output_index=index, item=begun)
        yield self._event("function_call_arguments.delta", **place, delta=arguments)
        yield self._event("function_call_arguments.done", **place, name=name, arguments=arguments)
        self.output.append(whole)
        yield self._event("output_item.done", output_index=index, item=whole)

    def row(self, status: str, finished: Finished | None = None) -> dict[str, Json]:
        """Return the current state of the response."""
        request = self.request
        about: dict[str, Json] = {} if finished is None else dict(finished.about)
        is_cut = finished is not None and finished.reason == "length"
        if self.session is not None:
            about["session"] = self.session
        effort = request.reasoning or EffortWords()
        row: dict[str, Json] = {
            "id": self.identity,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(self.output),
            "reasoning": {"effort": effort.effort, "summary": effort.summary},
            "service_tier": "default",
            "text": {
                "format": request.text.format.model_dump(by_alias=True, exclude_unset=True),
                "verbosity": request.text.verbosity or "medium",
            },
            "usage": None if finished is None else _usage(*finished.usage),
            **request.model_dump(include=_REPEATED),
        }
        if finished is not None:
            row["completed_at"] = int(time.time())
        return {**row, "kapelle": about} if about else row


def _text_part(text: str, tokens: list[Json]) -> dict[str, Json]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(tokens or ())}


def _usage(read: int, written: int) -> Json:
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }
