"""The interface of rollout engines, which serve many concurrent requests from all agents of all episodes.

For each request, a rollout engine returns the tokens that the policy sampled, their log-probs, and the version and
content hash of the policy's weights. An engine may batch requests in any way. The completion of a request depends on
the seed of the request and is independent of the other requests in its batch.

Rollout engines and their settings declare optional abilities by inheriting from classes of this module, as environments
do (ADR 0068). The optional abilities of an engine are `Interruptible`, `HasNotes`, `HasQueue`, `ServesCallers` and
`KnowsAlternatives`. The optional abilities of an engine's settings include `AllowsInterrupts` and `ChecksItself`. An
engine that merely has an attribute named `notes` does not have the ability `HasNotes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kapelle.errors import ConfigError, noting
from kapelle.runtime.plugins import catalogue, find_class
from kapelle.settings.checks import Check, RunToCheck
from kapelle.settings.environments import text_alone
from kapelle.types import Constraint, FinishReason, Message, Routing, Sampling, Task

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel
    from kapelle.team import Policy


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one completion of a policy."""

    policy: str
    agent: str
    messages: tuple[Message, ...]
    """The agent's whole conversation, for engines that take messages."""
    prompt_ids: tuple[int, ...]
    """The agent's whole conversation as token ids, for engines that take token ids."""
    sampling: Sampling
    seed: int
    task: Task
    """The task of the episode. Only scripted policies use the task."""
    sample: int = 0
    """The index of the episode in its group, starting at 0. Only recordings use this index."""
    begun: tuple[int, ...] = ()
    """The token ids of this completion that an earlier process sampled. These tokens count towards `sampling.max_tokens`. The
    `ids` of the completion contain only the further tokens, but the `text` of the completion covers all tokens."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion of a policy."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-prob of each token id under the sampling distribution, in nats."""
    finish_reason: FinishReason
    text: str
    version: int
    weights_hash: str
    routing: Routing | None = None
    """The experts selected for the tokens of the prompt and the completion, if the engine records them (see
    `RecordsRouting`)."""
    usage: tuple[int, int] | None = None
    """The numbers of prompt tokens and completion tokens that a server reported, if `ids` are not the server's tokens."""
    constraint: Constraint | None = None
    """The constraint that was applied during decoding; the log-probs are those of the constrained distribution. The
    value is None for samplers that ignore constraints (scripts, human players and endpoints)."""
    runs: tuple[tuple[int, int], ...] = ()
    """The versions of the weights that sampled `ids`, each with its number of tokens, in order. The value is empty if `version`
    sampled all of them (see `Interruptible`)."""


class Renderer(Protocol):
    """Converts the conversation of one agent into token ids. Sampled token ids are never retokenised."""

    @property
    def context(self) -> int:
        """The maximum number of tokens of a prompt and its completion together."""
        ...

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt token ids of a new conversation, ready for the agent's completion."""
        ...

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new_messages: Sequence[Message],
        before: Sequence[Message] = (),
    ) -> tuple[int, ...]:
        """Return the prompt of the next turn: the previous prompt, the sampled token ids and `new_messages`.

        The argument `before` is the conversation up to the sampled completion, for chat templates that remove earlier
        thoughts.
        """
        ...

    def thoughts(self, prompt: Sequence[int], completion: Sequence[int], text: str) -> tuple[int, int]:
        """Return the number of tokens and the number of characters at the start of a completion that are thoughts."""
        ...


@runtime_checkable
class ReadsPrompts(Protocol):
    """A renderer that tokenises plain prompts, without a chat template."""

    def plain(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises ContextError if the prompt is too long or contains ids without an embedding."""
        ...


class WritingRenderer(Renderer, Protocol):
    """A renderer that can also convert hand-written completions into tokens and tokens into a string."""

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a completion, including the end-of-turn token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the string that the token ids stand for, including special tokens."""
        ...


class RolloutEngine(Protocol):
    """An engine that samples completions for a set of policies.

    Subclasses inherit a `release_caches` method and a `close` method that do nothing.
    """

    @property
    def policies(self) -> Sequence[str]:
        """The names of the policies that the engine can sample from."""
        ...

    def renderer(self, policy: str) -> Renderer:
        """Return the renderer that converts the conversations of a policy into tokens."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Return one completion. Concurrent calls are batched."""
        ...

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Load new weights for a policy. Later completions carry this version number and the hash of these weights."""
        ...

    def release_caches(self) -> None:
        """Free memory that the engine can recompute, before an update needs the memory. No request is in flight during this call."""
        return  # nothing to release by default

    def close(self) -> None:
        """Release all resources of the engine."""
        return  # likewise


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request that is on hold, together with the tokens that were sampled so far."""

    request: Request
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    runs: tuple[tuple[int, int], ...]
    """The versions of the weights that sampled the tokens, each with its number of tokens, in order."""
    weights_hash: str

    @property
    def version(self) -> int:
        """The version of the weights that sampled the last token, or 0 if there are no tokens."""
        return self.runs[-1][0] if self.runs else 0


def joined_runs(*parts: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the parts in one sequence, in which neighbours with the same version are one run."""
    runs: list[tuple[int, int]] = []
    for part in parts:
        for version, count in part:
            before = runs.pop()[1] if runs and runs[-1][0] == version else 0
            runs.append((version, before + count))
    return tuple(runs)


class Interruptible:
    """An engine that can load new weights while it is sampling (see `training.asynchronous`)."""

    def run_freely(self) -> None:
        """Sample from now on without waiting for episodes whose environments are busy. Results then depend on timing."""
        raise NotImplementedError

    async def hold(self) -> Sequence[HeldRequest]:
        """Put all unfinished requests on hold, and return them. New requests wait as well.

        While requests are on hold, `load` replaces weights. The caller calls `resume` afterwards.
        """
        raise NotImplementedError

    def resume(self) -> None:
        """Continue the requests on hold with the current weights.

        The engine reads the prompt and the sampled tokens again, so the log-probs of new tokens are those of the current weights.
        """
        raise NotImplementedError


class EngineSettings(Protocol):
    """Immutable settings from which a rollout engine is built."""

    def build(self, models: Mapping[str, LanguageModel], policies: Sequence[Policy]) -> RolloutEngine:
        """Return the engine for these policies. The argument `models` maps the names of base models to the trainer's models."""
        ...


class AllowsInterrupts:
    """Settings of an engine that is `Interruptible`."""

    def check_interrupts(self, *, constrained: bool) -> None:
        """Raise ConfigError if requests cannot be put on hold with these settings. By default, all settings allow it.

        The argument `constrained` states whether completions are constrained (`Sampling.constraint`).
        """
        return


class RecordsRouting:
    """Settings of an engine that records the experts selected for each token (`Completion.routing`) if the model requires it."""

    def check_recording(self, model: LanguageModel) -> None:
        """Raise ModelError if the experts of a model cannot be recorded. By default, all models are supported."""


class ReadsImages:
    """Settings of an engine that can sample from prompts that contain images (`Message.images`)."""


class HoldsToConstraints:
    """Settings of an engine that applies `Sampling.constraint` during decoding."""


class ChecksItself:
    """Settings of an engine with additional requirements for the machine or the policies."""

    def check(self) -> None:
        """Raise ConfigError if the engine cannot run on this machine. This method is called before any model is loaded."""
        raise NotImplementedError

    def check_policies(self, policies: Iterable[Policy]) -> None:
        """Raise ConfigError if the engine cannot sample from one of the policies. This method is called before any model is loaded."""
        return  # all policies are supported by default


class HasNotes:
    """An engine that has notes for the user before sampling starts."""

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user, such as the reason why sampling will be slow. The sequence is often empty."""
        raise NotImplementedError


class HasQueue:
    """An engine that has a queue of requests."""

    @property
    def waiting(self) -> int:
        """The number of waiting requests. This property can be read from any thread."""
        raise NotImplementedError


OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""A callback that receives the next token ids of a completion and their log-probs."""


class ServesCallers:
    """An engine that can also serve external callers at any time and stream completions."""

    def serve(self) -> None:
        """Return completions independently of each other from now on. Afterwards, results may differ in the last bits between runs.

        By default, this method does nothing, for engines whose completions are always independent.
        """

    async def stream(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        """Return one completion, like `generate`, and pass its tokens to `on_tokens` as they are sampled, except for the last tokens."""
        raise NotImplementedError


Likeliest = tuple[tuple[int, float], ...]
"""The most likely tokens at one position in descending order, each with its log-prob in nats."""


class AppliesConstraints:
    """An engine that applies `Sampling.constraint` during decoding."""

    def fits(self, policy: str, constraint: Constraint, most: int) -> bool | None:
        """Return whether a completion of at most `most` tokens can satisfy a constraint, or None if this is unknown.

        This method can be called from any thread.
        """
        return None


class Recites(AppliesConstraints):
    """An engine that returns scripted answers, which are assumed to satisfy any constraint, such as the teacher of a warm-up."""


class KnowsAlternatives:
    """An engine that can return the most likely alternatives to each sampled token."""

    def alternatives(self, request: Request, ids: Sequence[int], count: int) -> Sequence[Likeliest]:
        """Return the `count` most likely tokens at each position of a completion of this request.

        The method runs on the engine's thread, between decoding steps. The log-probs are those of the sampling
        distribution.
        """
        raise NotImplementedError


async def stream_or_generate(
    engine: RolloutEngine, request: Request, on_tokens: OnTokens | None
) -> Completion:
    """Return one completion. Engines that support streaming pass the tokens to `on_tokens` as they are sampled."""
    if on_tokens is not None and isinstance(engine, ServesCallers):
        return await engine.stream(request, on_tokens)
    return await engine.generate(request)


ABILITIES: Sequence[tuple[type, str]] = (
    (Interruptible, "hold"),
    (HasNotes, "notes"),
    (HasQueue, "waiting"),
    (ServesCallers, "stream"),
    (KnowsAlternatives, "alternatives"),
)
"""The abilities that a rollout engine declares by inheritance. Each entry is a class and the name of the method that an
engine with this ability must define."""


def check_abilities(engine: object, abilities: Sequence[tuple[type, str]]) -> None:
    """Raise ConfigError if an engine inherits from an ability class but does not define the method that the ability requires."""
    kind = type(engine)
    for ability, part in abilities:
        if isinstance(engine, ability) and getattr(kind, part) is vars(ability)[part]:
            raise ConfigError(
                f"The engine {kind.__name__} inherits from `{ability.__name__}` but does not define `{part}`. Define it in {kind.__module__}, or "
                "remove the base class."
            )


def notes_of(engine: RolloutEngine) -> Sequence[str]:
    """Return the notes of an engine for the user."""
    return engine.notes if isinstance(engine, HasNotes) else ()


def engine_class(name: str) -> type:
    """Return the settings class of a rollout engine, given a built-in name, a `module:Class` path or the name of an entry point."""
    return find_class("engine", name, catalogue("kapelle.engines.rollout"))


# -------- Checks of a run's rollout engine


def check_images(run: RunToCheck) -> Iterator[str]:
    """Yield an error message if an environment uses images and the rollout engine does not support images."""
    if not isinstance(run.config.engine, ReadsImages):
        yield from text_alone(run, f"`engine.name: {run.config.engine.name}`")


def check_constraints(run: RunToCheck) -> None:
    """Raise ConfigError if an agent's engine does not support the agent's constraint or no string satisfies the constraint."""
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
    """Yield an error message if the engine cannot record routing. Raises ConfigError if a policy or the machine is not supported."""
    engine = run.config.engine
    if run.config.model.routing == "replayed" and not isinstance(engine, RecordsRouting):
        yield f"`model.routing: replayed` is not supported by `engine.name: {engine.name}`. Set `model.routing: free`."
    elif run.config.model.head_dtype is not None and engine.name == "vllm":
        yield "`model.head_dtype` is not supported by `engine.name: vllm`, whose output head computes in `model.dtype`. Remove the setting, or set `engine.name: local`."
    elif isinstance(engine, ChecksItself):
        engine.check_policies(run.team.every.values())
        if not run.elsewhere:
            with noting(run.absent):
                engine.check()


CHECKS: tuple[Check, ...] = (check_images, check_constraints, check_engine)
