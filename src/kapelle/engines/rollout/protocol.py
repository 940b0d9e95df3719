"""The rollout engine's protocol: many requests in flight, from all agents of all episodes.

For each request an engine returns the tokens that one policy sampled, their log-probs, and the version
and content hash of its weights. It may batch requests in any way; a request's completion depends on its seed and is
independent of the other requests in its batch.

An engine and its settings declare optional abilities by inheriting from a class below, like environments (ADR
0068): `Interruptible`, `HasNotes`, `HasQueue`, `ServesCallers` and `KnowsAlternatives`; for settings, `AllowsInterrupts`
and `ChecksItself`. An attribute named `notes` does not declare an ability by itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

from kapelle.errors import ConfigError, EngineError, noting
from kapelle.runtime.plugins import catalogue, find_class
from kapelle.settings.checks import Check, RunToCheck
from kapelle.settings.environments import text_alone
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
    """The task of the episode; only scripts use it."""
    sample: int = 0
    """Index of the episode in its group, from 0; only recordings use it."""
    begun: tuple[int, ...] = ()
    """Ids of this completion that were sampled before an interrupt (`Interruptible`). They count towards `sampling.max_tokens`;
    the completion contains only the ids after them, but the text of all ids."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of a policy."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each id under the sampling distribution (nats)."""
    finish_reason: FinishReason
    text: str
    version: int
    weights_hash: str
    routing: Routing | None = None
    """The experts of prompt and completion, from engines that record them (`RecordsRouting`)."""
    usage: tuple[int, int] | None = None
    """The server's count of prompt and completion tokens, if `ids` are not the server's tokens."""
    constraint: Constraint | None = None
    """The constraint that was applied, so that log-probs are those of the constrained distribution; None from samplers that
    ignore constraints: scripts, people and endpoints."""


class Renderer(Protocol):
    """Turns one agent's conversation into token ids; sampled ids are never retokenised."""

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
        new_messages: Sequence[Message],
        before: Sequence[Message] = (),
    ) -> tuple[int, ...]:
        """Return the next prompt: the last one, the sampled ids, and the messages `new_messages` since.

        `before` is the conversation up to that completion, for chat templates that drop earlier thoughts.
        """
        ...

    def thoughts(self, prompt: Sequence[int], completion: Sequence[int], text: str) -> tuple[int, int]:
        """Return how many tokens of a completion and characters of its text are thoughts; thoughts come first."""
        ...


@runtime_checkable
class ReadsPrompts(Protocol):
    """A renderer that reads plain prompts."""

    def plain(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return a prompt's token ids; ContextError if it is too long or has ids without an embedding."""
        ...


@runtime_checkable
class TakesArguments(Protocol):
    """A renderer with a chat template that takes arguments."""

    def with_arguments(self, arguments: Mapping[str, Json]) -> Any:
        """Return a renderer that gives the chat template these arguments."""
        ...


def agent_renderer(agent: Agent, renderer: AnyRenderer) -> AnyRenderer:
    """Return an agent's renderer: that of its policy with the agent's template arguments."""
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
        """Return the ids of a completion, including the end of turn."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return tokens as text, including special tokens."""
        ...


class RolloutEngine(Protocol):
    """Samples completions for its policies.

    A class that inherits from it gets a `release_caches` and a `close` that do nothing.
    """

    @property
    def policies(self) -> Sequence[str]:
        """Names of the policies that it holds."""
        ...

    def renderer(self, policy: str) -> Renderer:
        """Return the renderer that turns a policy's conversations into tokens."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Return one completion; concurrent calls are batched together."""
        ...

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Load new weights for a policy; later completions have this version and the weights' hash."""
        ...

    def release_caches(self) -> None:
        """Free memory that the engine can recompute, before an update that needs it; no request is in flight."""
        return  # nothing to release by default

    def close(self) -> None:
        """Release all resources."""
        return  # likewise


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An interrupted request, with its tokens so far."""

    request: Request
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    weights_hash: str


class Interruptible:
    """An engine that can interrupt requests and continue them with new weights (`training.partial_rollouts`)."""

    async def interrupt(self) -> Sequence[Interrupted]:
        """Interrupt all requests once every coroutine waits for a completion, and return them; they never complete.

        Requests that are complete by then return their completions first. A request continues as a new one with
        `Request.begun`, which recomputes prompt and ids: the new log-probs are those of the engine's new weights.
        """
        raise NotImplementedError

    def pause_every(self, tokens: int, pause: Callable[[], Awaitable[bool]] | None) -> None:
        """From now on, await `pause` after about this many tokens of each row, once every coroutine waits for a completion.

        If it returns True, sampling stops until `interrupt`; None ends the pauses. The times of pauses may depend only on
        the requests. Runs of several processes need this method. Raises EngineError in an engine that does not define it.
        """
        if pause is not None:
            raise EngineError(
                f"The engine {type(self).__name__} does not support pauses, which partial rollouts of several processes "
                "need. Implement its `pause_every`, train in one process, or set `training.partial_rollouts: 0`."
            )


class EngineSettings(Protocol):
    """Frozen settings that build a rollout engine."""

    def build(self, models: Mapping[str, LanguageModel], policies: Sequence[Policy]) -> RolloutEngine:
        """Return the engine for these policies; `models` are the trainer's models, by base name."""
        ...


class AllowsInterrupts:
    """Settings of an engine that is `Interruptible`."""


class RecordsRouting:
    """Settings of an engine that records the experts of each token (`Completion.routing`) if the model requests it."""

    def check_recording(self, model: LanguageModel) -> None:
        """Raise ModelError if a model's experts cannot be recorded; by default, all models are supported."""


class ReadsImages:
    """Settings of an engine that samples from prompts with images (`Message.images`)."""


class HoldsToConstraints:
    """Settings of an engine that applies `Sampling.constraint`."""


class ChecksItself:
    """Settings of an engine with further requirements."""

    def check(self) -> None:
        """Raise ConfigError if this machine cannot run the engine; called before anything is loaded."""
        raise NotImplementedError

    def check_policies(self, policies: Iterable[Policy]) -> None:
        """Raise ConfigError for a policy that the engine cannot sample with; called before anything is loaded."""
        return  # all policies are supported by default


class HasNotes:
    """An engine with notes for the user before it samples."""

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user, such as why sampling will be slow; often empty."""
        raise NotImplementedError


class HasQueue:
    """An engine with a queue of requests."""

    @property
    def waiting(self) -> int:
        """Number of waiting requests; may be called from any thread."""
        raise NotImplementedError


OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Function that is called with the next token ids of a completion and their log-probs."""


class ServesCallers:
    """An engine that can also serve callers at any time, and stream completions."""

    def serve(self) -> None:
        """Return completions independently of each other from now on; results may then differ in the last bits between runs.

        By default this does nothing, because completions of such engines are independent.
        """

    async def stream(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        """Return one completion as `generate` does; `on_tokens` gets its tokens as they are sampled, except the last ones."""
        raise NotImplementedError


Likeliest = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position, in descending order, with their log-probs (nats)."""


class AppliesConstraints:
    """An engine that applies `Sampling.constraint`."""

    def fits(self, policy: str, constraint: Constraint, most: int) -> bool | None:
        """Return whether some completion of at most `most` tokens satisfies a constraint; None if unknown.

        May be called from any thread.
        """
        return None


class Recites(AppliesConstraints):
    """An engine with scripted answers, such as the teacher of a warm-up; its text is assumed to satisfy any constraint."""


class KnowsAlternatives:
    """An engine that can return the likeliest alternatives to each sampled token."""

    def alternatives(self, request: Request, ids: Sequence[int], count: int) -> Sequence[Likeliest]:
        """Return the `count` likeliest tokens at the position of each id of a completion of this request.

        Called on the engine's thread, between its steps; the log-probs are those of the sampling distribution.
        """
        raise NotImplementedError


async def stream_or_generate(
    engine: RolloutEngine, request: Request, on_tokens: OnTokens | None
) -> Completion:
    """Return one completion; engines that stream call `on_tokens` with its tokens as they are sampled."""
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
"""Abilities that a rollout engine declares by inheritance, each with a method that the engine must then define."""


def check_abilities(engine: object, abilities: Sequence[tuple[type, str]]) -> None:
    """Raise ConfigError if an engine inherits from an ability but does not define its method."""
    kind = type(engine)
    for ability, part in abilities:
        if isinstance(engine, ability) and getattr(kind, part) is vars(ability)[part]:
            raise ConfigError(
                f"The engine {kind.__name__} inherits from `{ability.__name__}` but does not define `{part}`. Define it in {kind.__module__}, or "
                "remove the base class."
            )


def notes_of(engine: RolloutEngine) -> Sequence[str]:
    """Return an engine's notes for the user."""
    return engine.notes if isinstance(engine, HasNotes) else ()


def engine_class(name: str) -> type:
    """Return the settings class of a rollout engine by name, `module:Class` or entry point."""
    return find_class("engine", name, catalogue("kapelle.engines.rollout"))


# -------- Checks of a run's rollout engine


def check_images(run: RunToCheck) -> Iterator[str]:
    """Yield a message for an engine that does not support the images of an environment."""
    if not isinstance(run.config.engine, ReadsImages):
        yield from text_alone(run, f"`engine.name: {run.config.engine.name}`")


def check_constraints(run: RunToCheck) -> None:
    """Raise ConfigError for a constraint on completions that an agent's engine does not support, or that no text satisfies."""
    config, team = run.config, run.team
    for agent in team.agents:
        constraint, name = agent.sampling.constraint, agent.name
        if constraint is None:
            continue
        policies = [team.policies[policy] for policy in team.policies_of(name)]
        served = [policy for policy in policies if policy.endpoint is not None]
        here = len(served) < len(policies)
        if served and constraint.kind not in ("json_schema", "json_object"):
            raise ConfigError(
                f"Agent '{name}' is an endpoint, and endpoints do not support {constraint.kind}. Set `json_schema` in "
                "its `sampling` instead."
            )
        if here and not isinstance(config.engine, HoldsToConstraints):
            raise ConfigError(
                f"`engine.name: {config.engine.name}` does not support the constraint of agent '{name}' (`sampling`). Remove one of them."
            )
        if here and not run.elsewhere:
            from kapelle.models.token_masks import check_constraint, check_installed

            with noting(run.absent):
                check_installed()
                try:
                    if not constraint.is_legal:
                        check_constraint(constraint)
                except ConfigError as error:
                    raise ConfigError(f"Agent '{name}': {error}") from None


def check_engine(run: RunToCheck) -> Iterator[str]:
    """Yield a message if the engine cannot record routing; raise ConfigError for a policy or machine that it does not support."""
    engine = run.config.engine
    if run.config.model.routing == "replayed" and not isinstance(engine, RecordsRouting):
        yield f"`model.routing: replayed` is not supported by `engine.name: {engine.name}`. Set `model.routing: free`."
    elif isinstance(engine, ChecksItself):
        engine.check_policies(run.team.every.values())
        if not run.elsewhere:
            with noting(run.absent):
                engine.check()


CHECKS: tuple[Check, ...] = (check_images, check_constraints, check_engine)
