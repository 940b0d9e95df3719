"""Implements the format of Anthropic's Messages API: requests, whole or streamed messages, counts of tokens, and errors.

Requests are converted to chat requests, so that agents and recordings know only one form. A conversation of the Messages
API has messages of content blocks. The blocks of an `assistant` message become one message of the agent with its thoughts
and tool calls. In this way, a completion that a client sends back is recognised as the sampled completion. Each
`tool_result` block of a `user` message becomes one message with the role `tool`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field

from kapelle.services.policy.chat_form import (
    Answering,
    ChatMessage,
    ChatRequest,
    Finished,
    Head,
    SamplingBody,
    TextPart,
    finished,
    read_request,
    response_key,
)
from kapelle.services.policy.responses_form import TextSchema, renamed
from kapelle.services.request_errors import Body, RequestError, read_body, wrong
from kapelle.types import Json

# -------- Requests

Hint = dict[str, Any]
"""A cache hint, which has no effect."""


class TextBlock(TextPart):
    """A text block."""

    citations: list[Any] = Field(default=[])


class ThinkingBlock(Body):
    """The thoughts in an earlier response."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """The encrypted thoughts of another model, which are ignored."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    """A tool call in an earlier response."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    cache_control: Hint | None = None


class ToolResultBlock(Body):
    """The result of a tool call. The agent reads only its `content`."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] = ""
    is_error: bool = False
    cache_control: Hint | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
BLOCKS = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
"""Mapping from the role of a message to the blocks that the message may contain."""


class MessageParam(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=1024, fail_fast=True)]

    @property
    def blocks(self) -> Sequence[Block]:
        """The content as a list of blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class ClientTool(Body):
    """A tool that the agent may call and the caller runs."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool = False
    """Whether the agent is not offered the tool."""
    # These have no effect.
    cache_control: Hint | None = None
    input_examples: list[Any] = Field(default=[])
    eager_input_streaming: bool = False
    allowed_callers: list[Literal["direct"]] = Field(default=[])


class ToolChoice(Body):
    """The choice of the tools that the agent may call or must call."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingWords(Body):
    """The parameter for whether and how long a model should think, which has no effect."""

    type: str = Field(max_length=32)
    budget_tokens: int | None = None
    display: str | None = Field(default=None, max_length=32)


class OutputWords(Body):
    """The format of the text in the response, and an effort that has no effect."""

    effort: str | None = Field(default=None, max_length=32)
    format: TextSchema | None = None


class KeptThoughts(Body):
    """The neutral edit of the conversation, which keeps all thoughts."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextEdits(Body):
    """Edits of the conversation by the server, of which only the neutral one is supported."""

    edits: list[KeptThoughts] = Field(default=[], max_length=16)


class MessagesRequest(SamplingBody):
    """A request of `POST /v1/messages`. Parameters that are not listed raise a RequestError."""

    model: str
    messages: list[MessageParam] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = None
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] = ""
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ClientTool] = Field(default=[], max_length=128)
    tool_choice: ToolChoice = ToolChoice()
    output_config: OutputWords = OutputWords()
    context_management: ContextEdits | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=64)
    # These parameters have no effect.
    thinking: ThinkingWords | None = None
    metadata: dict[str, Any] | None = None
    cache_control: Hint | None = None
    diagnostics: dict[str, Any] | None = None
    service_tier: str | None = Field(default=None, max_length=32)
    speed: str | None = Field(default=None, max_length=32)
    inference_geo: str | None = Field(default=None, max_length=32)
    user_profile_id: str | None = None
    workspace_id: str | None = None


def read_messages(body: Json, *, counts: bool = False) -> ChatRequest:
    """Parse a request and convert it to a chat completion request. If `counts` is true, only its tokens are counted.

    Raises RequestError (400), which names the first parameter that is incorrect or not supported.
    """
    if isinstance(body, dict) and body.get("thread") is not None:
        # With this code, the tool runner of Anthropic's client repeats the call with the whole conversation.
        why = "`thread`: this server keeps no conversations. Send the whole conversation in `messages`."
        raise RequestError(400, why, "thread", "thread_unsupported_request")
    request = read_body(MessagesRequest, body)
    if request.max_tokens is None and not counts:
        raise wrong("`max_tokens`: Field required.", "max_tokens")
    choice = request.tool_choice
    if choice.type == "tool" and choice.name is None:
        raise wrong("`tool_choice.name`: Field required.", "tool_choice.name")
    messages = [*_system(request.system), *(each for one in _conversation(request.messages) for each in one)]
    shared = {"model", "max_tokens", "stream", "temperature", "top_p", "chat_template_kwargs"}
    tools = [
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        for tool in request.tools
        if not tool.defer_loading
    ]
    chat: dict[str, Json] = {
        **request.model_dump(include={*shared, *SamplingBody.model_fields}, exclude_unset=True),
        "messages": [{"role": "user", "content": "?"}],  # replaced below: the messages are already parsed
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "tool_choice": {
            "any": "required",
            "tool": {"type": "function", "function": {"name": choice.name}},
        }.get(choice.type, choice.type),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "reasoning_effort": request.output_config.effort,
    }
    if request.output_config.format is not None:
        schema = request.output_config.format.model_dump(by_alias=True, exclude={"type"})
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    try:
        read = read_request(chat)
    except RequestError as error:
        raise in_words(error) from None
    return read.model_copy(update={"messages": messages})


_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
}
"""Mapping from parameters of chat completions to their names in the Messages API."""


def in_words(refusal: RequestError) -> RequestError:
    """Return an error about the chat request in which parameters have their names in the Messages API."""
    tool, function, rest = (refusal.parameter or "").partition(".function.parameters")
    return renamed(
        refusal, {**_NAMES, f"{tool}{function}": f"{tool}.input_schema{rest}"} if function else _NAMES
    )


def error_row(refusal: RequestError) -> Json:
    """Return the body of the response for an error, which is also the last event of a stream that fails."""
    kind = _KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    message = refusal.message
    if refusal.code == "context_length_exceeded":
        message = (
            f"prompt is too long: {message}"  # programs search for these words, and then shorten the prompt
        )
    details = {"error_code": refusal.code} if refusal.code else {}
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}}


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


# -------- The conversation as messages of chat completions


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _system(given: str | Sequence[TextBlock]) -> list[ChatMessage]:
    text = _text(given)
    return [ChatMessage(role="system", content=text)] if text else []


def _conversation(given: Sequence[MessageParam]) -> Iterator[Iterator[ChatMessage]]:
    for number, message in enumerate(given):
        for place, block in enumerate(message.blocks):
            if not isinstance(block, BLOCKS[message.role]):
                name = f"messages.{number}.content.{place}"
                raise wrong(f"`{name}`: a message with the role `{message.role}` cannot have it.", name)
        yield _agents(message.blocks) if message.role == "assistant" else _callers(message)
    if given[-1].role == "assistant":
        raise wrong(
            "`messages`: the last message has the role `assistant`, but agents cannot continue a given text. Add a message "
            "with the role `user`.",
            "messages",
        )


def _agents(blocks: Sequence[Block]) -> Iterator[ChatMessage]:
    """Yield the message of an agent."""
    calls = [
        {
            "id": block.id,
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    yield ChatMessage.model_validate(
        {
            "role": "assistant",
            "content": _text([block for block in blocks if isinstance(block, TextBlock)]),
            "reasoning_content": thoughts or None,
            "tool_calls": calls or None,
        }
    )


def _callers(message: MessageParam) -> Iterator[ChatMessage]:
    """Yield the results of tools and the texts of a message, in their order. Adjacent texts are one message."""
    texts: list[TextBlock] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield ChatMessage(role="user", content=_text(texts))
                texts = []
            yield ChatMessage(role="tool", content=_text(block.content), tool_call_id=block.tool_use_id)
    if texts or not message.blocks:
        yield ChatMessage(role="system" if message.role == "system" else "user", content=_text(texts))


# -------- Responses: whole, or as the events of a stream

EMPTY: Mapping[str, Mapping[str, Json]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
"""The blocks with which a stream begins."""
SIGNATURE = "kapelle"
"""The signature of thoughts. Some clients drop thoughts without a signature; kapelle does not check it."""


class MessageForm:
    """A call of `POST /v1/messages` and the format of its response."""

    failed = staticmethod(error_row)

    def __init__(self, body: Json) -> None:
        """Parse a call. Raises RequestError (400) for an incorrect call."""
        self.request: ChatRequest = read_messages(body)
        """The same request as a chat completion request."""

    async def whole(self, answering: Answering, answers: AsyncIterator[Any]) -> Json:
        """Return the whole response as one JSON object."""
        [each] = await finished(answering, answers)
        message, blocks = each.message, list[Json]()
        if thoughts := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thoughts, "signature": SIGNATURE})
        calls = message.get("tool_calls", ())
        if message["content"] or not calls:
            blocks.append({"type": "text", "text": message["content"] or ""})
        blocks += ({**_tool_use(call), "input": json.loads(call["function"]["arguments"])} for call in calls)
        extra = {**each.about, **answering.head.extra}
        return {
            **_row(answering.head),
            "content": blocks,
            **_end(each),
            "usage": _usage(each),
            "kapelle": extra,
        }

    async def events(self, answering: Answering, answers: AsyncIterator[Any]) -> AsyncGenerator[Json, None]:
        """Yield the response as events, in the order in which Anthropic's server sends them."""
        head, index, kind = answering.head, -1, ""
        yield {"type": "message_start", "message": _row(head)}
        async with aclosing(answering.pieces(answers)) as coming:
            async for each in coming:
                is_last = isinstance(each, Finished)
                calls: Sequence[Json] = (
                    each.message.get("tool_calls", ()) if isinstance(each, Finished) else ()
                )
                for name, new in (("thinking", each.thoughts), ("text", each.words)):
                    # A response without tool calls has a text, which may be empty.
                    if new or (name == "text" and is_last and not calls and kind != "text"):
                        if kind != name:
                            for event in _stopped(index, kind):
                                yield event
                            index, kind = index + 1, name
                            yield {
                                "type": "content_block_start",
                                "index": index,
                                "content_block": EMPTY[name],
                            }
                        if new:
                            yield _delta(index, f"{name}_delta", name, new)
                if not isinstance(each, Finished):
                    continue
                for event in _stopped(index, kind):
                    yield event
                for index, call in enumerate(calls, index + 1):  # noqa: B020 - the indices continue
                    yield {"type": "content_block_start", "index": index, "content_block": _tool_use(call)}
                    yield _delta(index, "input_json_delta", "partial_json", call["function"]["arguments"])
                    yield {"type": "content_block_stop", "index": index}
                extra = {**each.about, **head.extra}
                yield {"type": "message_delta", "delta": _end(each), "usage": _usage(each), "kapelle": extra}
                yield {"type": "message_stop"}


def _row(head: Head) -> dict[str, Json]:
    """Return a message without content. The number of its tokens is known only at its end."""
    return {
        "id": f"msg_{response_key(head.identity)}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _tool_use(call: Mapping[str, Json]) -> dict[str, Json]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _delta(index: int, kind: str, name: str, new: str) -> dict[str, Json]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: new}}


def _stopped(index: int, kind: str) -> Iterator[dict[str, Json]]:
    """Yield the events that end the open block, if there is one."""
    if kind == "thinking":
        yield _delta(index, "signature_delta", "signature", SIGNATURE)
    if kind:
        yield {"type": "content_block_stop", "index": index}


def _end(each: Finished) -> dict[str, Json]:
    """Return the reason why a response ended."""
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(each.reason, "end_turn")
    is_stopped = reason == "end_turn" and each.stop is not None
    return {
        "stop_reason": "stop_sequence" if is_stopped else reason,
        "stop_sequence": each.stop if is_stopped else None,
    }


def _usage(each: Finished) -> dict[str, Json]:
    return {"input_tokens": each.usage[0], "output_tokens": each.usage[1]}
