"""The form of OpenAI's chat completions: strictly read requests, messages as agents read them, and answers, whole or in chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import from_json

from kapelle.engines.rollout.protocol import Likeliest
from kapelle.environments.grading.text.tool_call import Form, ReadCall, UnreadCall, write_calls
from kapelle.environments.tools.contract import tools_prompt
from kapelle.runtime.constraints import HERMES, CallForm
from kapelle.services.policy.speech import Speech
from kapelle.services.refusals import Biases, Body, Penalty, neutral, read_body, wrong
from kapelle.types import Json, Message, Sampling

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_ALTERNATIVES = 20
"""Of one token."""
LEAST_TEMPERATURE = 1e-10
"""Above 0; by less, logits grow beyond float32."""
LONGEST_STOP = 1024
"""Characters of one stop string."""


class ContentPart(Body):
    """A piece of a message's content: words, or those with which a model has refused."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    cache_control: dict[str, Any] | None = None
    """A hint for caches of some providers; it is ignored."""

    @field_validator("type", mode="before")
    @classmethod
    def _is_words(cls, value: object) -> object:
        return words_alone(value, ("text", "refusal"))

    @model_validator(mode="after")
    def _has_its_words(self) -> ContentPart:
        given = {name for name in ("text", "refusal") if getattr(self, name) is not None}
        if given != {self.type}:
            raise ValueError(
                f"a part of the type `{self.type}` has its words in `{self.type}`, and no others"
            )
        return self

    @property
    def words(self) -> str:
        """What it says."""
        return (self.text if self.type == "text" else self.refusal) or ""


def words_alone(kind: object, kinds: Sequence[str]) -> object:
    """Return the type of a part of a message; ValueError for one that is none of these and so holds no words."""
    if isinstance(kind, str) and kind not in kinds:
        raise ValueError(
            f"Input should be {' or '.join(map(repr, kinds))}; pictures, sounds and files are not read here"
        )
    return kind


class Function(Body):
    """What a tool call calls."""

    name: str
    arguments: str
    """JSON, as text."""

    @property
    def read(self) -> ReadCall | UnreadCall:
        """The call; with its arguments as they are written where these are no object of JSON. None at all are an empty one."""
        try:
            # It is bounded in depth, so that what is read can be written again.
            arguments = from_json(self.arguments) if self.arguments.strip() else {}
        except ValueError:
            return UnreadCall(self.name, self.arguments)
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            return UnreadCall(self.name, self.arguments)
        return ReadCall(self.name, arguments)


class ToolCall(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None
    """Its place. Clients that join streamed answers keep it; the order of the list says the same."""


class ChatMessage(Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = Field(default=None, min_length=1, max_length=64)
    """Who speaks, among several of one role."""
    reasoning_content: str | None = None
    """What an assistant thought before it spoke. A conversation that continues has it in the tokens that were sampled."""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Further fields of answers, which clients that keep whole messages send back.
    refusal: str | None = None
    annotations: list[Any] = Field(default=[], max_length=0)

    @property
    def text(self) -> str:
        """Its content as one text, a refusal behind it."""
        parts = self.content if isinstance(self.content, list) else ()
        said = self.content if isinstance(self.content, str) else "".join(part.words for part in parts)
        return said + (self.refusal or "")


class ToolFunction(Body):
    """A tool's name and its arguments as a JSON schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OfferedTool(Body):
    """A tool that the agent may call."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(Body):
    """What a stream has beside its words."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ChatRequest(Body):
    """One request; other parameters are refused."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    tools: list[OfferedTool] = Field(default=[], max_length=128)
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] = Field(default={"type": "text"})
    # Accepted with their neutral values only, which some clients always send.
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Biases = Field(default={})
    repetition_penalty: Annotated[float, AfterValidator(partial(neutral, only=1))] = 1.0
    min_p: Penalty = 0.0
    top_k: Annotated[int, AfterValidator(lambda given: 0 if given == -1 else neutral(given))] = 0
    modalities: list[Literal["text"]] = Field(default=["text"], max_length=1)
    service_tier: Literal["auto", "default"] = "auto"
    # For a provider's own records; they change nothing.
    store: bool = False
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: dict[str, str] = Field(default={})
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    # They change nothing here: agents think and speak as they have learned to. The log says so once.
    reasoning_effort: str | None = Field(default=None, max_length=32)
    verbosity: str | None = Field(default=None, max_length=32)

    @field_validator("temperature")
    @classmethod
    def _tempers(cls, value: float | None) -> float | None:
        if value is not None and 0.0 < value < LEAST_TEMPERATURE:
            raise ValueError(f"takes 0, which is greedy, or {LEAST_TEMPERATURE} and more")
        return value

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MOST_STOPS or not all(0 < len(stop) <= LONGEST_STOP for stop in stops):
            raise ValueError(f"takes at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with how many tokens were read and written."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def calls_tools(self) -> bool:
        """Whether the agent is told of tools and calls of them are looked for in its answer."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The parameters that ask for what agents cannot do, and that are accepted all the same."""
        asked = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return tuple(name for name, value in asked.items() if value is not None)

    def sampling(self, own: Sampling) -> Sampling:
        """Return how to sample: as asked for, else as the agent does by itself."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return Sampling(
            min(limits, default=own.max_tokens),
            own.temperature if self.temperature is None else self.temperature,
            own.top_p if self.top_p is None else self.top_p,
            own.top_k,
            self.stops or own.stop,
            # Legal moves are those of a game, and here is none.
            None if own.constraint is None or own.constraint.is_legal else own.constraint,
        )


def read_request(body: Mapping[str, Json]) -> ChatRequest:
    """Return a request; raises Refusal (400) that names the first parameter that is wrong or not supported."""
    given: Json = body
    if isinstance(body, dict) and isinstance(body.get("messages"), list):
        # What is null in a message counts as left out too.
        messages = [
            {name: each for name, each in message.items() if each is not None}
            if isinstance(message, dict)
            else message
            for message in body["messages"]
        ]
        given = {**body, "messages": messages}
    return read_body(ChatRequest, given)


# -------- Messages as agents read them, with tools in the form that kapelle's agents know


NAMED = ("system", "user")
"""Roles in which several may speak: an agent reads `NAME: ` before their words. An assistant's name is its own, and a
tool's answer belongs to its call."""


@dataclass(frozen=True, slots=True)
class MessageReader:
    """Reads messages as an agent's chat template takes them."""

    form: Form = "hermes"
    """How calls are written where the template does not write them itself."""
    structured: bool = False
    """Whether the template writes tools, calls and their results itself."""
    calls: CallForm | None = HERMES
    """How a call that is forced is written; None where none can be."""

    def conversation(
        self, messages: Sequence[ChatMessage], tools: Sequence[OfferedTool], system: str | None
    ) -> list[Message]:
        """Return the conversation that an agent reads: the caller's, or its own system message where the caller has none.

        Tools stand where the template has them, else before the first message that is no system message, where agents of the
        environment `tools` read them.
        """
        read = list(self.messages(messages))
        if not any(message.role == "system" for message in read) and system:
            read.insert(0, Message("system", system))
        if tools:
            first = next((place for place, message in enumerate(read) if message.role == "user"), None)
            if first is None:
                raise wrong(
                    "Tools need a message of the role `user`, before which the agent reads of them.", "tools"
                )
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
        """Return messages from a place on as an agent reads them; Refusal (400) for tool calls of others than assistants."""
        called = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
        return tuple(self._message(message, called) for message in messages[start:])

    def _message(self, message: ChatMessage, called: Mapping[str, str]) -> Message:
        role = "system" if message.role == "developer" else message.role
        if role != "assistant" and message.tool_calls:
            raise wrong("Only messages of the role `assistant` call tools.", "messages")
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
        says_more = self.structured and len(row) > 2
        return Message(
            role, "\n".join(lines), structured=json.dumps(row, ensure_ascii=False) if says_more else None
        )


PLAINLY = MessageReader()
"""For models whose chat templates know no tools."""


# -------- Completions as OpenAI's clients read them: whole, and as the chunks of a stream

Spell = Callable[[int], tuple[str, bytes]]
"""A token → its text and its bytes, which may be a part of a character."""
"""Token ids → text."""


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of one answer have in common."""

    model: str
    session: str | None = None
    """The answer's session; None on a server that records nothing."""
    identity: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def extra(self) -> dict[str, Json]:
        """Fields of the answer beyond OpenAI's form."""
        return {} if self.session is None else {"session": self.session}

    def row(self, kind: str) -> dict[str, Json]:
        """Return the fields that stand before the choices."""
        return {"id": self.identity, "object": kind, "created": self.created, "model": self.model}

    def opening(self, choice: int) -> dict[str, Json]:
        """Return the first piece of one choice."""
        return self.chunk(
            choice, {"role": "assistant", "content": "", "refusal": None}, None, None, self.extra
        )

    def chunk(
        self,
        choice: int,
        delta: Mapping[str, Json],
        logprobs: Json = None,
        reason: str | None = None,
        extra: Mapping[str, Json] | None = None,
    ) -> dict[str, Json]:
        """Return one piece of one choice; `extra` is what it says beyond OpenAI's form."""
        row: dict[str, Json] = {
            **self.row("chat.completion.chunk"),
            "choices": [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}],
        }
        return {**row, "kapelle": extra} if extra else row


def message_of(said: Speech) -> dict[str, Json]:
    """Return the message that an answer is."""
    message: dict[str, Json] = {"role": "assistant", "content": said.words, "refusal": None}
    if said.thoughts:
        message["reasoning_content"] = said.thoughts
    if not said.calls:
        return message
    rows = []
    for call in said.calls:
        # Numbers that JSON does not know as they are (such as a Decimal) become floats.
        arguments = json.dumps(call.arguments, ensure_ascii=False, default=lambda number: float(str(number)))
        function = {"name": call.name, "arguments": arguments}
        rows.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return {**message, "content": said.words or None, "tool_calls": rows}


def token_rows(
    ids: Sequence[int],
    logprobs: Sequence[float],
    spell: Spell,
    alternatives: Sequence[Likeliest] = (),
) -> list[Json]:
    """Return each sampled token with its log-prob, and with the likeliest ones in its place where those are given."""
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
    """Return how many tokens were read and written."""
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
