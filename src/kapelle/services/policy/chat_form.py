"""A request of OpenAI's chat completions, read strictly: whatever cannot be done is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from kapelle.services.http.bodies import Body, read_body
from kapelle.types import Json, Sampling

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_ALTERNATIVES = 20
"""Of one token."""
LEAST_TEMPERATURE = 1e-10
"""Above 0; by less, logits grow beyond float32."""
LONGEST_STOP = 1024
"""Characters of one stop string."""


class Part(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    """What some providers keep of a prompt, which changes nothing."""


class Function(Body):
    """What a tool call calls."""

    name: str
    arguments: str
    """JSON, as text."""


class ToolCall(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None
    """Its place, which clients keep that put streamed answers together; the order of the list says as much."""


class ChatMessage(Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = Field(default=None, min_length=1, max_length=64)
    """Who speaks, among several of one role."""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What answers have beside their words, sent back by clients that keep whole messages.
    refusal: Literal[""] | None = None
    annotations: list[Any] = Field(default=[], max_length=0)

    @property
    def text(self) -> str:
        """Its content as one text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class ToolFunction(Body):
    """A tool's name and its arguments as a JSON schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the agent may call."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(Body):
    """What a stream tells beside its words."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class PlainText(Body):
    """The one form of answers there is."""

    type: Literal["text"]


class ChatRequest(Body):
    """One request; a parameter that is not here is refused."""

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
    tools: list[Tool] = Field(default=[], max_length=128)
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    # What clients send to say nothing of their own; any other value is refused.
    response_format: PlainText = PlainText(type="text")
    presence_penalty: float = Field(default=0.0, ge=0.0, le=0.0)
    frequency_penalty: float = Field(default=0.0, ge=0.0, le=0.0)
    logit_bias: dict[str, float] = Field(default={}, max_length=0)
    repetition_penalty: float = Field(default=1.0, ge=1.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=0.0)
    modalities: list[Literal["text"]] = Field(default=["text"], max_length=1)
    service_tier: Literal["auto", "default"] = "auto"
    # What a provider does for its own records, and labels for them, which change nothing.
    store: bool = False
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: dict[str, str] = Field(default={})
    safety_identifier: str | None = None

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
    def calls_tools(self) -> bool:
        """Whether the agent is told of tools and calls of them are looked for in its answer."""
        return bool(self.tools) and self.tool_choice == "auto"

    def sampling(self, own: Sampling) -> Sampling:
        """Return how to sample: as asked for, else as the agent does by itself."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return Sampling(
            min(limits, default=own.max_tokens),
            own.temperature if self.temperature is None else self.temperature,
            own.top_p if self.top_p is None else self.top_p,
            own.top_k,
            self.stops or own.stop,
        )


def read_request(body: Mapping[str, Json]) -> ChatRequest:
    """Return a request; raises Refusal (400) that names the first parameter that is wrong or not supported."""
    return read_body(ChatRequest, _without_nulls(body))


def _without_nulls(value: Json) -> Json:
    """Return a request without parameters that are null, which say as much as none; so down to its messages."""
    if not isinstance(value, dict):
        return value
    messages = value.get("messages")
    kept = {name: each for name, each in value.items() if each is not None}
    if isinstance(messages, list):
        kept["messages"] = [
            {name: each for name, each in message.items() if each is not None}
            if isinstance(message, dict)
            else message
            for message in messages
        ]
    return kept
