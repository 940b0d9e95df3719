"""The rollout engine's protocol: many requests in flight, from all agents of all episodes.

An engine answers a request with the tokens that one policy sampled, their log-probs, and the version
and content hash of the weights that did it. It batches as it likes; a request's answer depends on its
seed, never on the other requests in its batch.

What an engine or its settings can do beyond the protocols is a class below that they inherit from, as with environments (ADR
0068): `Interruptible`, `HasNotes`, `HasQueue`, `ServesCallers` and `KnowsAlternatives`, of settings `AllowsInterrupts` and `ChecksItself`. An
attribute that happens to be called `notes` means nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

from kapelle.errors import ConfigError, EngineError
from kapelle.runtime.plugins import catalogue, find_class
from kapelle.types import Constraint, FinishReason, Json, Message, Routing, Sampling, Task

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel
    from kapelle.team import Agent, Policy


@dataclass(frozen=True, slots=True)
class Request:
    """One policy call."""

    policy: str
    agent: str
    messages: tuple[Message, ...]
    """The agent's whole conversation, for engines that read text."""
    prompt_ids: tuple[int, ...]
    """The same conversation as token ids, for engines that read tokens."""
    sampling: Sampling
    seed: int
    task: Task
    """The task being played; only scripts use it."""
    sample: int = 0
    """Index of the episode in its group, from 0; only recordings use it."""
    begun: tuple[int, ...] = ()
    """Ids of this completion that were sampled before (`Interruptible`). They count towards `sampling.max_tokens`, and
    the answer has only the ids that follow them, with the text of all."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer of a policy."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each id under the distribution that was sampled from (nats)."""
    finish_reason: FinishReason
    text: str
    version: int
    weights_hash: str
    routing: Routing | None = None
    """The experts that prompt and completion took, from engines that record them (`RecordsRouting`)."""
    usage: tuple[int, int] | None = None
    """Tokens read and written as a server counted them, where `ids` are not its tokens."""
    constraint: Constraint | None = None
    """What it was held to, with log-probs of the distribution over what was allowed; None from what takes no notice of
    constraints: scripts, people, endpoints, whose answers may have another form."""


class Renderer(Protocol):
    """Turns one agent's conversation into token ids; sampled ids are never tokenised again."""

    @property
    def context(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        ...

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt ids of a new conversation, ready for the agent's completion."""
        ...

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        heard: Sequence[Message],
        before: Sequence[Message] = (),
    ) -> tuple[int, ...]:
        """Return the next prompt: the last one, the ids that were sampled, and the messages `heard` since.

        `before` is the conversation up to that answer, for chat templates that leave earlier thoughts out.
        """
        ...

    def thoughts(self, prompt: Sequence[int], completion: Sequence[int], text: str) -> tuple[int, int]:
        """Return how many tokens of a completion, and how many characters of its text, are thoughts; they stand first."""
        ...


@runtime_checkable
class ReadsPrompts(Protocol):
    """A renderer that reads prompts which are no conversations."""

    def plain(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return a prompt's token ids; ContextError where it is too long or has ids that the model does not know."""
        ...


@runtime_checkable
class TakesArguments(Protocol):
    """A renderer whose chat template takes arguments."""

    def with_arguments(self, arguments: Mapping[str, Json]) -> Any:
        """Return a renderer that gives the chat template these arguments."""
        ...


def agent_renderer(agent: Agent, renderer: AnyRenderer) -> AnyRenderer:
    """Return how an agent's conversations become tokens: by its policy's renderer, with its own arguments of the template."""
    if not agent.chat_template_kwargs:
        return renderer
    found: Any = renderer
    if isinstance(found, TakesArguments):
        found = found.with_arguments(agent.chat_template_kwargs)
    return cast("AnyRenderer", found)


AnyRenderer = TypeVar("AnyRenderer", bound=Renderer)


class WritingRenderer(Renderer, Protocol):
    """A renderer that also turns completions written by hand into tokens, and tokens into text."""

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the ids of a completion, end of turn included."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return tokens as text, special ones as they are written."""
        ...


class RolloutEngine(Protocol):
    """Samples completions for the policies that it holds.

    A class may inherit from it: then it need not write `release_caches` and `close` where it holds nothing to release.
    """

    @property
    def policies(self) -> Sequence[str]:
        """Names of the policies that it holds."""
        ...

    def renderer(self, policy: str) -> Renderer:
        """Return how a policy's conversations become tokens."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Return one completion; concurrent calls are batched together."""
        ...

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Take new weights for a policy; later completions carry this version and the weights' hash."""
        ...

    def release_caches(self) -> None:
        """Free memory that the engine can fill again, where an update needs it; no request is in flight."""
        return  # nothing: what a class that inherits from this does

    def close(self) -> None:
        """Release everything that the engine holds."""
        return  # likewise


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A request that was broken off, and what was sampled for it since it was sent."""

    request: Request
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    weights_hash: str


class Interruptible:
    """An engine that can break requests off and continue them with other weights (`training.partial_rollouts`)."""

    async def interrupt(self) -> Sequence[Interrupted]:
        """Break off all requests once every coroutine waits for an answer, and return them; they are never answered.

        Those that are complete by then are answered first. A request continues as another one with `Request.begun`, which
        reads prompt and ids again: its log-probs are those of the weights that the engine holds then.
        """
        raise NotImplementedError

    def pause_every(self, tokens: int, pause: Callable[[], Awaitable[bool]] | None) -> None:
        """Await `pause` from now on after about so many tokens of each row, once every coroutine waits for an answer.

        Where it returns True nothing more is sampled until `interrupt`; None ends the pauses. When they come may depend on the
        requests alone, never on time. Runs of several processes need it. Raises EngineError in an engine that has none.
        """
        if pause is not None:
            raise EngineError(
                f"The engine {type(self).__name__} does not pause, by which several processes agree on the end of a step. Write "
                "its `pause_every`, train in one process, or set `training.partial_rollouts: 0`."
            )


class EngineSettings(Protocol):
    """Frozen settings that build a rollout engine."""

    def build(self, models: Mapping[str, LanguageModel], policies: Sequence[Policy]) -> RolloutEngine:
        """Return the engine for these policies; `models` are the trainer's, by base name."""
        ...


class AllowsInterrupts:
    """Settings of an engine that is `Interruptible`; they have nothing else to say."""


class RecordsRouting:
    """Settings of an engine that says which experts of a mixture each token took (`Completion.routing`), where the model asks for it."""

    def check_recording(self, model: LanguageModel) -> None:
        """Raise ModelError for a model of which it cannot say this; as it stands here, none is refused."""


class SeesImages:
    """Settings of an engine that samples from prompts with images (`Message.images`); they have nothing else to say."""


class HoldsToConstraints:
    """Settings of an engine that holds completions to `Sampling.constraint`; they have nothing else to say."""


class ChecksItself:
    """Settings of an engine that needs more than kapelle itself."""

    def check(self) -> None:
        """Raise ConfigError if this machine cannot run the engine; before anything is loaded."""
        raise NotImplementedError

    def check_policies(self, policies: Iterable[Policy]) -> None:
        """Raise ConfigError for a policy that the engine cannot sample with; before anything is loaded."""
        return  # every policy will do


class HasNotes:
    """An engine that has notes for the user before it samples."""

    @property
    def notes(self) -> Sequence[str]:
        """Sentences for the user, such as why it will be slow; often empty."""
        raise NotImplementedError


class HasQueue:
    """An engine whose requests may wait before it begins with them."""

    @property
    def waiting(self) -> int:
        """How many wait now; asked from any thread."""
        raise NotImplementedError


OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Takes the next token ids of an answer and their log-probs."""


class ServesCallers:
    """An engine that can also answer callers who come at any time and want to read while it writes."""

    def serve(self) -> None:
        """Let no answer wait for others, from now on; what is sampled then need not repeat to the bit.

        Does nothing, which is right for an engine whose answers never wait for one another.
        """

    async def stream(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        """Return one completion as `generate` does; `on_tokens` gets its tokens as they come, all but the last ones."""
        raise NotImplementedError


Likeliest = tuple[tuple[int, float], ...]
"""Tokens that might stand in one place, the likeliest first, with their log-probs (nats)."""


class Recites:
    """An engine whose answers are written by a script, such as the teacher of a warm-up: it is asked for any form, and taken at its word."""


class KnowsAlternatives:
    """An engine that can also return the likeliest alternatives to each sampled token."""

    def alternatives(self, request: Request, ids: Sequence[int], count: int) -> Sequence[Likeliest]:
        """Return the `count` likeliest tokens in the place of each id of a completion of this request.

        Called on the engine's thread, between its steps; the log-probs are those of the distribution that was sampled from.
        """
        raise NotImplementedError


async def stream_or_generate(
    engine: RolloutEngine, request: Request, on_tokens: OnTokens | None
) -> Completion:
    """Return one completion; `on_tokens` gets its tokens as they come, from engines that can stream."""
    if on_tokens is not None and isinstance(engine, ServesCallers):
        return await engine.stream(request, on_tokens)
    return await engine.generate(request)


ABILITIES: Sequence[tuple[type, str]] = (
    (Interruptible, "interrupt"),
    (HasNotes, "notes"),
    (HasQueue, "waiting"),
    (ServesCallers, "stream"),
    (KnowsAlternatives, "alternatives"),
)
"""What a rollout engine may declare by inheriting from it, and the part that it then has to write."""


def check_abilities(engine: object, abilities: Sequence[tuple[type, str]]) -> None:
    """Raise ConfigError where an engine declares an ability, by inheriting from it, and does not write its part."""
    kind = type(engine)
    for ability, part in abilities:
        if isinstance(engine, ability) and getattr(kind, part) is vars(ability)[part]:
            raise ConfigError(
                f"The engine {kind.__name__} inherits from `{ability.__name__}` but has no `{part}`. Write it in {kind.__module__}, or "
                "inherit no longer."
            )


def notes_of(engine: RolloutEngine) -> Sequence[str]:
    """Return an engine's notes for the user."""
    return engine.notes if isinstance(engine, HasNotes) else ()


def engine_class(name: str) -> type:
    """Return the settings class of a rollout engine by name, `module:Class` or entry point."""
    return find_class("engine", name, catalogue("kapelle.engines.rollout"))
