"""Implements the format of OpenAI's chat completions: strictly parsed requests, messages for agents, and whole or streamed responses."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import from_json

from kapelle.engines.rollout.protocol import Likeliest
from kapelle.environments.grading.text.tool_call import Form, ReadCall, UnreadCall, write_calls
from kapelle.environments.tools.contract import tools_prompt
from kapelle.runtime.constraints import HERMES, CallForm
from kapelle.services.policy.speech import ParsedAnswer
from kapelle.services.request_errors import Body, RequestError, neutral, read_body, wrong
from kapelle.types import Adjustments, Json, Message, Sampling

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_ALTERNATIVES = 20
"""The maximum number of alternatives to each token."""
LEAST_TEMPERATURE = 1e-10
"""The minimum temperature above 0. A smaller temperature would make logits too large for float32."""
LONGEST_STOP = 1024
"""The maximum number of characters of a stop string."""


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    """A cache hint that some providers support. The value is ignored."""


class RefusalPart(Body):
    """The text of a refusal in a message."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class Function(Body):
    """The function in a tool call."""

    name: str
    arguments: str
    """The arguments of the function as a JSON string."""

    @property
    def read(self) -> ReadCall | UnreadCall:
        """Return the parsed call, or an `UnreadCall` if the arguments are not a JSON object. An empty string counts as an empty object."""
        try:
            # The parser limits the depth, so that the value can be serialised.
            arguments = from_json(self.arguments) if self.arguments.strip() else {}
        except ValueError:
            return UnreadCall(self.name, self.arguments)
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            return UnreadCall(self.name, self.arguments)
        return ReadCall(self.name, arguments)


class ToolCall(Body):
    """A tool call in an earlier response."""

    id: str
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None
    """The position of the call in the list, which clients copy from streamed responses. The value is ignored."""


class ChatMessage(Body):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = Field(default=None, min_length=1, max_length=64)
    """The name of the author of the message."""
    reasoning_content: str | None = None
    """The thoughts of an assistant. In a continued conversation, the thoughts are part of the sampled tokens."""
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=1024)
    tool_call_id: str | None = None
    # Clients that keep whole messages send these fields of responses back.
    refusal: str | None = None
    annotations: list[Any] = Field(default=[], max_length=0)

    @property
    def text(self) -> str:
        """The content of the message as one string, followed by the refusal if there is one."""
        parts = self.content if isinstance(self.content, list) else ()
        texts = [part.refusal if isinstance(part, RefusalPart) else part.text for part in parts]
        return "".join(texts) + (self.content if isinstance(self.content, str) else "") + (self.refusal or "")


class ToolFunction(Body):
    """The name of a tool, and its arguments as a JSON schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(Body):
    """A tool that the agent may call."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedChoice(Body):
    """The choice of a tool by its name."""

    type: Literal["function"]
    function: FunctionName


class TextFormat(Body):
    """The response format for unconstrained text."""

    type: Literal["text"] = "text"


class JsonFormat(Body):
    """The response format for any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A JSON schema with the name and the description that the client has given to it."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class SchemaFormat(Body):
    """The response format for JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StreamOptions(Body):
    """Options of a streamed response."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """An option of OpenAI's API that is ignored."""
    continuous_usage_stats: Literal[False] = False


class SamplingBody(Body):
    """The sampling parameters of the servers of OpenAI and vLLM, which every kind of request may contain."""

    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=100.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(default={}, max_length=1024)
    """Mapping from a token id (as a string) to the number that is added to the logit of the token."""
    top_k: int | None = Field(default=None, ge=-1)
    """The number of most likely tokens that are kept; the values 0 and -1 keep all tokens."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    min_tokens: int = Field(default=0, ge=0)
    ignore_eos: bool = False
    # Other values of these parameters would change the completion.
    stop_token_ids: list[int] = Field(default=[], max_length=0)
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: bool = True
    """An option of vLLM's API that is ignored."""
    include_stop_str_in_output: Literal[False] = False
    length_penalty: Annotated[float, AfterValidator(partial(neutral, only=1))] = 1.0
    use_beam_search: Literal[False] = False

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MOST_STOPS or not all(0 < len(stop) <= LONGEST_STOP for stop in stops):
            raise ValueError(f"at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters are allowed")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _check_biases(cls, value: dict[str, float]) -> dict[str, float]:
        if not all(token.isascii() and token.isdecimal() and len(token) < 10 for token in value):
            raise ValueError("the keys must be token ids")
        return value

    def adjustments(self, most: int) -> Adjustments | None:
        """Return the changes of the sampling distribution for a completion of at most `most` tokens, or None if there are no changes."""
        changes = Adjustments(
            tuple((int(token), bias) for token, bias in self.logit_bias.items() if bias),
            most if self.ignore_eos else min(self.min_tokens, most),
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.min_p,
        )
        return None if changes == Adjustments() else changes


class ChatRequest(SamplingBody):
    """A chat completion request. Any other parameter that would change the completion raises a RequestError."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    tools: list[OfferedTool] = Field(default=[], max_length=128)
    tool_choice: Literal["auto", "none", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] = (
        TextFormat()
    )
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=64)
    """Arguments of the agent's chat template. Arguments that the template does not use have no effect."""
    # Other values of these parameters would change the completion.
    modalities: list[Literal["text"]] = Field(default=["text"], max_length=1)
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False
    echo: Literal[False] = False
    # These concern speed and price.
    service_tier: str | None = Field(default=None, max_length=32)
    prediction: dict[str, Any] | None = None
    priority: int = 0
    # These are for a provider's records, and have no effect.
    store: bool = False
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: dict[str, str] = Field(default={})
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    # These have no effect, which is logged once: agents respond in the way they were trained.
    reasoning_effort: str | None = Field(default=None, max_length=32)
    verbosity: str | None = Field(default=None, max_length=32)

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float | None) -> float | None:
        if value is not None and 0.0 < value < LEAST_TEMPERATURE:
            raise ValueError(f"it must be 0 (greedy) or at least {LEAST_TEMPERATURE}")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a completion."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a streamed response ends with the token usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def listens(self) -> bool:
        """Whether tokens are sent as they are sampled.

        Tokens cannot be sent immediately if alternatives are requested, because alternatives are known only at the end.
        """
        return self.stream and not self.top_logprobs

    @property
    def calls_tools(self) -> bool:
        """Whether the agent may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The parameters that are accepted but have no effect."""
        given = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return tuple(name for name, value in given.items() if value is not None)

    def sampling(self, own: Sampling) -> Sampling:
        """Return the sampling parameters of the request.

        For parameters that the request does not set, the agent's `own` parameters apply.
        """
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        most = min(limits, default=own.max_tokens)
        return Sampling(
            most,
            own.temperature if self.temperature is None else self.temperature,
            own.top_p if self.top_p is None else self.top_p,
            own.top_k if self.top_k is None else max(0, self.top_k),
            self.stops or own.stop,
            # A constraint to legal moves is only possible in a game.
            None if own.constraint is None or own.constraint.is_legal else own.constraint,
            self.adjustments(most),
        )


def read_request(body: Mapping[str, Json]) -> ChatRequest:
    """Parse a request. Raises RequestError (400), which names the first parameter that is incorrect or not supported."""
    return read_body(ChatRequest, body)


# -------- Messages as agents read them


NAMED = ("system", "user")
"""The roles that several authors may share. In the prompt of an agent, the name of the author and a colon precede the content."""


@dataclass(frozen=True, slots=True)
class MessageReader:
    """Converts messages to the format that the chat template of an agent expects."""

    form: Form = "hermes"
    """The format of tool calls, which is used if the template does not format them itself."""
    structured: bool = False
    """Whether the template itself formats tools, tool calls and their results."""
    calls: CallForm | None = HERMES
    """The format of a forced tool call, or None if tool calls cannot be forced."""
    described: Json = None
    """The model's own description of its completions, if `form` is not the format of its template (see `SpeechForm.described`)."""
    is_endpoint: bool = False
    """Whether the server of an endpoint receives the tools as fields of its request, so that no message needs to describe them."""

    def conversation(
        self, messages: Sequence[ChatMessage], tools: Sequence[OfferedTool], opening: Sequence[Message]
    ) -> list[Message]:
        """Return the conversation for an agent, which consists of the agent's `opening` and the caller's messages.

        A system message from the caller replaces the agent's system message. The chat template may determine the
        position of tools. Otherwise, tools are placed before the caller's first user message, as in the environment
        `tools`.
        """
        given = self.messages(messages)
        if any(message.role == "system" for message in given):
            opening = [message for message in opening if message.role != "system"]
        start = 1 if given and given[0].role == "system" else 0
        read = [*given[:start], *opening, *given[start:]]
        if tools and not self.is_endpoint:
            places = range(start + len(opening), len(read))
            first = next((place for place in places if read[place].role == "user"), None)
            if first is None:
                raise wrong("`tools` require a message with the role `user`. Add such a message.", "tools")
            prompt = tools_prompt([tool.function.model_dump(exclude_none=True) for tool in tools], self.form)
            words = read[first].content
            row = {
                "role": "user",
                "content": words,
                "tools": [each.model_dump(exclude_none=True) for each in tools],
            }
            structured = json.dumps(row, ensure_ascii=False) if self.structured else None
            read[first] = Message("user", f"{prompt}\n\n{words}", structured=structured)
        return read

    def messages(self, messages: Sequence[ChatMessage], start: int = 0) -> tuple[Message, ...]:
        """Convert the messages from index `start` on for an agent. Raises RequestError (400) for tool calls of other roles."""
        called = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
        return tuple(self._message(message, called) for message in messages[start:])

    def _message(self, message: ChatMessage, called: Mapping[str, str]) -> Message:
        role = "system" if message.role == "developer" else message.role
        if role != "assistant" and message.tool_calls:
            raise wrong("Only messages with the role `assistant` may have `tool_calls`.", "messages")
        words = message.text
        if message.name is not None and role in NAMED and words:
            words = f"{message.name}: {words}"  # chat templates have no field for names
        row: dict[str, Json] = {"role": role, "content": words}
        thoughts = message.reasoning_content if role == "assistant" else None
        if thoughts:
            row["reasoning_content"] = thoughts
        calls = [call.function.read for call in message.tool_calls or ()]
        if calls:
            row["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": each.name,
                        "arguments": each.arguments if isinstance(each, UnreadCall) else dict(each.arguments),
                    },
                }
                for call, each in zip(message.tool_calls or (), calls, strict=True)
            ]
        if role == "tool" and message.tool_call_id is not None:
            row |= {"tool_call_id": message.tool_call_id, "name": called.get(message.tool_call_id, "tool")}
        lines = [f"<think>\n{thoughts}\n</think>\n"] if thoughts else []
        lines += [words] if words else []
        lines += [write_calls(calls, self.form)] if calls else []
        has_more = self.structured and len(row) > 2
        return Message(
            role, "\n".join(lines), structured=json.dumps(row, ensure_ascii=False) if has_more else None
        )


PLAINLY = MessageReader()
"""The message reader for models whose chat templates do not support tools."""


# -------- Completions as OpenAI's clients read them: whole, or as the chunks of a stream

Spell = Callable[[int], tuple[str, bytes]]
"""A function that maps a token to its text and its bytes, which may be only a part of a character."""


def response_key(identity: str) -> str:
    """Return the part of a response's `id` that is the same in both APIs."""
    return identity.rpartition("-")[2].rpartition("_")[2]


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all chunks of a response share."""

    model: str
    session: str | None = None
    """The session of the response, or None if sessions are not recorded."""
    identity: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def response_id(self) -> str:
        """The `id` of the response in the Responses API."""
        return f"resp_{response_key(self.identity)}"

    @property
    def extra(self) -> dict[str, Json]:
        """The fields of the response that are not part of OpenAI's format."""
        return {} if self.session is None else {"session": self.session}

    def row(self, kind: str) -> dict[str, Json]:
        """Return the fields of a response that precede the choices."""
        return {"id": self.identity, "object": kind, "created": self.created, "model": self.model}

    def opening(self, choice: int) -> dict[str, Json]:
        """Return the first chunk of a choice."""
        return self.chunk(choice, {"role": "assistant", "content": "", "refusal": None}, extra=self.extra)

    def chunk(
        self,
        choice: int,
        delta: Mapping[str, Json],
        logprobs: Json = None,
        reason: str | None = None,
        extra: Mapping[str, Json] | None = None,
    ) -> dict[str, Json]:
        """Return a chunk of a choice. The argument `extra` contains fields that are not part of OpenAI's format."""
        row: dict[str, Json] = {
            **self.row("chat.completion.chunk"),
            "choices": [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}],
        }
        return {**row, "kapelle": extra} if extra else row


def message_of(answer: ParsedAnswer) -> dict[str, Json]:
    """Convert a completion to a message in OpenAI's format."""
    message: dict[str, Json] = {"role": "assistant", "content": answer.words, "refusal": None}
    if answer.thoughts:
        message["reasoning_content"] = answer.thoughts
    if not answer.calls:
        return message
    rows = []
    for call in answer.calls:
        # Numbers that JSON cannot represent (such as a Decimal) become floats.
        arguments = json.dumps(call.arguments, ensure_ascii=False, default=lambda number: float(str(number)))
        function = {"name": call.name, "arguments": arguments}
        rows.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return {**message, "content": answer.words or None, "tool_calls": rows}


def token_rows(
    ids: Sequence[int],
    logprobs: Sequence[float],
    spell: Spell,
    alternatives: Sequence[Likeliest] = (),
) -> list[Json]:
    """Return each sampled token with its log-prob and, if they are given, the most likely tokens at its position."""
    rows: list[Json] = []
    for place, (number, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        others = alternatives[place] if alternatives else ()
        top = [_token_row(other, likely, spell) for other, likely in others]
        rows.append({**_token_row(number, logprob, spell), "top_logprobs": top})
    return rows


def _token_row(number: int, logprob: float, spell: Spell) -> dict[str, Json]:
    text, known = spell(number)
    return {"token": text, "logprob": logprob, "bytes": list(known)}


def usage_row(read: int, written: int) -> dict[str, Json]:
    """Return the numbers of prompt tokens and completion tokens in OpenAI's format."""
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


@dataclass(frozen=True, slots=True)
class Piece:
    """New content of a choice, which may be empty."""

    choice: int
    thoughts: str
    words: str
    tokens: list[Json] | None = None
    """The new tokens with their log-probs, or None if the caller has not requested them."""
    extra: Mapping[str, Json] = field(default_factory=dict)
    """Fields that are not part of OpenAI's format."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a choice: the content and tokens after its last piece, and the complete message."""

    choice: int
    thoughts: str
    words: str
    tokens: list[Json] | None
    message: Mapping[str, Json]
    """The complete choice as a message in OpenAI's format."""
    reason: str
    """The reason why the choice ended."""
    usage: tuple[int, int]
    """The numbers of prompt tokens and completion tokens. If there are several choices, only the first one counts the prompt tokens."""
    about: Mapping[str, Json]
    """Fields that are not part of OpenAI's format."""
    stop: str | None = None
    """The caller's stop string that ended the choice, or None if there is none or it is unknown."""


class Answering(Protocol):
    """The interface of a request to which an agent or the team is responding."""

    @property
    def head(self) -> Head:
        """The fields that all parts of the response share."""
        ...

    def pieces(self, answers: AsyncIterator[Any]) -> AsyncGenerator[Piece | Finished, None]:
        """Yield the content while it is generated, and each choice when it is complete."""
        ...


async def finished(answering: Answering, answers: AsyncIterator[Any]) -> list[Finished]:
    """Collect the complete choices of a response."""
    return [each async for each in answering.pieces(answers) if isinstance(each, Finished)]


def usage_of(choices: Sequence[Finished]) -> dict[str, Json]:
    """Return the total numbers of tokens of several choices."""
    return usage_row(sum(each.usage[0] for each in choices), sum(each.usage[1] for each in choices))


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Formats responses of the chat completions API, either as a whole or as the chunks of a stream."""

    request: ChatRequest
    failed = staticmethod(RequestError.row)

    async def whole(self, answering: Answering, answers: AsyncIterator[Any]) -> Json:
        """Return the whole response as one JSON object."""
        head, done = answering.head, await finished(answering, answers)
        choices: list[dict[str, Json]] = []
        about: dict[str, Json] = {}
        for k, each in enumerate(done):
            row = {
                "index": k,
                "message": each.message,
                "logprobs": _rows(each.tokens),
                "finish_reason": each.reason,
            }
            if "turns" in each.about:
                row["kapelle"] = each.about
            else:
                about = about or {**each.about}
            choices.append(row)
        whole = {**head.row("chat.completion"), "choices": choices, "usage": usage_of(done)}
        if "weights_hash" in about:
            whole["system_fingerprint"] = about["weights_hash"]
        about |= head.extra
        return {**whole, "kapelle": about} if about else whole

    async def events(
        self, answering: Answering, answers: AsyncIterator[Any]
    ) -> AsyncGenerator[dict[str, Json] | str, None]:
        """Yield the response as chunks."""
        head, done = answering.head, list[Finished]()
        for k in range(self.request.n):
            yield head.opening(k)
        async with aclosing(answering.pieces(answers)) as coming:
            async for each in coming:
                k, rows = each.choice, _rows(each.tokens)
                calls = each.message.get("tool_calls", ()) if isinstance(each, Finished) else ()
                deltas: list[dict[str, Json]] = []
                if each.thoughts:
                    deltas.append({"reasoning_content": each.thoughts})
                if each.words or (isinstance(each, Finished) and not calls):
                    deltas.append({"content": each.words})
                if not deltas and isinstance(each, Piece) and (each.extra or rows is not None):
                    deltas.append({"content": ""})
                # Each call has its own chunk, because some clients read only the first call of a chunk.
                deltas += ({"tool_calls": [{"index": n, **call}]} for n, call in enumerate(calls))
                for delta in deltas:
                    yield head.chunk(k, delta, rows, extra=each.extra if isinstance(each, Piece) else None)
                    rows = None if rows is None else _rows([])
                if isinstance(each, Finished):
                    done.append(each)
                    none = None if rows is None else _rows([])
                    yield head.chunk(k, {}, none, each.reason, each.about)
        if self.request.wants_usage:
            yield {**head.row("chat.completion.chunk"), "choices": [], "usage": usage_of(done)}
        yield "[DONE]"


def _rows(tokens: list[Json] | None) -> Json:
    return None if tokens is None else {"content": tokens}
