"""The protocol of train engines, which hold the trained weights.

A learner is a set of weights with its own optimiser: a policy or a critic. Losses are pure functions that
return a sum and a weight; the engine divides by the global weight of that learner, so that accumulation,
packing and data parallelism give the same step.

An engine is chosen like a rollout engine: `train_engine: {name: torch}` in a recipe names a class of settings, built in,
`module:Class` or an entry point of `kapelle.train_engines`, with a `build` that takes a `TrainSetup` and returns the engine.
The loop, the warm-up, verifiers and checkpoints use an engine only through `TrainEngine`. An engine declares optional
abilities by inheriting from `KeepsParts`, `Examines` or `CountsTokens`, like environments (ADR 0068).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kapelle.algorithm import CriticLoss, PolicyLoss
from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train import BUILTIN
from kapelle.rows import Sample
from kapelle.runtime.on_demand import Tensor
from kapelle.runtime.plugins import find_class
from kapelle.runtime.ranks import ALONE, Ranks
from kapelle.settings.schema import OptimizerConfig
from kapelle.team import Critic, Policy

if TYPE_CHECKING:
    from kapelle.functional.distributions import Histogram
    from kapelle.models.language_model import LanguageModel

HEAD = "value_head."
"""Prefix of the names of the head's weights among a critic's weights."""


@dataclass(frozen=True, slots=True)
class UpdateLimits:
    """Limits of the engine's work; they do not change results, except by stopping the update."""

    microbatch_tokens: int | None = 4096
    """Maximum tokens in one forward and backward pass; with None, the engine chooses (`pass_size.py`)."""
    parity_tolerance: float | None = None
    """Maximum |trainer − sampler| log-prob (nats), in half precision for all but a few tokens; None uses the compute type's
    default (`parity.PARITY`)."""
    non_finite: str = "stop"
    """If a loss or gradient is not finite, `stop` raises NumericsError and `skip` skips the step."""
    total_steps: int = 1_000_000
    """Optimiser steps of the whole run, for schedules that have an end."""
    gradient_checkpointing: bool = False
    """Whether the backward pass recomputes each decoder block instead of storing activations."""


@dataclass(frozen=True, slots=True)
class TrainSetup:
    """The arguments of a train engine."""

    models: Mapping[str, LanguageModel]
    """The base models in this process's memory, by base name. The rollout engine samples from the same objects, so
    the engine adds every adapter of `policies` to them (`LanguageModel.bank`) when it is built."""
    policies: Sequence[Policy]
    """All policies of the team; endpoints have no weights here, and policies that are not `trained` are only scored."""
    critics: Sequence[Critic]
    optimizer: OptimizerConfig
    limits: UpdateLimits
    seed: int
    references: bool = False
    """Whether every trained policy has a frozen reference (`reference_name`), a copy of its initial weights."""
    embedders: bool = False
    """Whether a frozen copy of every policy's base computes embeddings (`embedder_name`)."""
    ranks: Ranks = ALONE
    """The processes that build the same engine, and call it with the same arguments in the same order."""

    def optimizer_of(self, learner: Policy | Critic) -> OptimizerConfig:
        """Return the optimiser's settings of a policy or critic: those of the run, with the learner's own learning rate and schedule."""
        own, rate = self.optimizer, learner.rate
        usual = (own.critic_lr or own.lr) if isinstance(learner, Critic) else own.lr
        steps = own.rising(self.limits.total_steps) if rate.warmup_steps is None else rate.warmup_steps
        changes = {"lr": rate.lr or usual, "schedule": rate.schedule or own.schedule, "warmup_steps": steps}
        return own.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class Objective:
    """The losses of one update.

    Losses can be pickled, so that an engine can send an objective to other processes.
    """

    policy_loss: PolicyLoss
    critic_loss: CriticLoss | None = None
    critic_coefficient: float = 1.0
    entropy: bool = False
    epochs: int = 1
    minibatches: int = 1
    parity: bool = True
    """Whether the samples have a `behaviour` column that was computed with exactly these weights."""


@dataclass(frozen=True, slots=True)
class Published:
    """New weights of one policy, ready for the rollout engine."""

    weights: Mapping[str, Tensor]
    version: int


class TrainEngine(Protocol):
    """Holds the learners; scores, updates, publishes, saves and loads them.

    Weights are mappings from name to tensor: an adapter's under PEFT's names, a whole model's under those of `transformers`,
    and a critic's adapter with its head (`value_head.weight` `[1, hidden]`, `value_head.bias` `[1]`). A class that inherits
    from it gets a `close` that does nothing.
    """

    @property
    def versions(self) -> Mapping[str, int]:
        """Number of changes of the weights of each trained policy: optimiser steps and exchanges.

        A skipped step (`non_finite: skip`) does not count. The number shows whether an interrupted update changed weights.
        """
        ...

    def renderer(self, learner: str) -> WritingRenderer:
        """Return the renderer of the model of a policy or critic."""
        ...

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return all current weights of a policy, critic or reference; they must not be modified.

        The tensors may be the engine's own memory: copy them to keep them.
        """
        ...

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of a policy, critic or reference, with the names of `weights`; keep the optimiser.

        Raises ModelError if names or shapes do not fit.
        """
        ...

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-probs (policies, references) or values (critics) `_T` of each sample's targets, float32 on the CPU."""
        ...

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state `_D` over the tokens before each sample's targets, by a frozen base.

        The learner of such a sample is `embedder_name(policy)`.
        """
        ...

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Take the optimiser steps of one update, every learner on its own samples; return metrics.

        Samples of one learner with the same `bundle` stay together in a pass and in a step. A learner without samples does
        not change. Raises ParityError before any change if trainer and sampler disagree, NumericsError if a loss or
        gradient is not finite, StopRequested if the run should stop; accumulated gradients are dropped.
        """
        ...

    def check_parity(
        self, samples: Sequence[Sample], weights: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, float]:
        """Compare the samples' `behaviour` with the log-probs of the current weights; return the gaps as metrics.

        `weights`, by policy and name, replace the current ones for this comparison: they are the weights that sampled, if
        the policies have been updated since. Afterwards the current weights are restored exactly. Raises ParityError if the
        samples come from other weights or another distribution.
        """
        ...

    def publish(self) -> Mapping[str, Published]:
        """Return the weights of the policies that changed since the last call, by steps, exchanges or loading.

        The first call may return all; a rollout engine begins with the weights in `TrainSetup.models`.
        """
        ...

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies exactly: weights, optimiser state and references."""
        ...

    def refresh_references(self) -> None:
        """Make every reference policy a copy of its current policy."""
        ...

    def state(self) -> dict[str, object]:
        """Return the state for an exact resume, as a tree of tensors and plain values.

        Checkpoints store it.
        """
        ...

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore the result of `state` exactly; CheckpointError if it comes from another kind of engine."""
        ...

    def close(self) -> None:
        """Release resources other than memory, such as processes; called after the last use."""
        return  # nothing to release by default


class KeepsParts:
    """A train engine that shards some tensors: each rank keeps, saves and loads its own shards.

    Its `load_state` also accepts such shards.
    """

    def parts(self) -> dict[str, object]:
        """Return the state with sharded tensors as `DTensor`, without waiting for other ranks."""
        raise NotImplementedError

    def room(self, place: str, saved: Tensor) -> Tensor | None:
        """Return an empty tensor for the value of `parts` at a dotted path, sharded as in this rank; None if the rank keeps it whole.

        `saved` has the shape and type of the whole saved tensor, without content.
        """
        raise NotImplementedError


class Examines:
    """A train engine that also computes entropies, so that traces contain the entropy of each token."""

    def examine(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-prob and entropy `_T2` (float32 on the CPU, nats) of each policy sample's targets, without dropout."""
        raise NotImplementedError


class CountsTokens:
    """A train engine that also collects histograms of the tokens of its updates."""

    def distributions(self) -> Mapping[str, Histogram]:
        """Return histograms of the policies' tokens, of all passes of all updates since the last call, by `KIND/policy`.

        Kinds are `update_entropy` and, for samples with a `behaviour` column, `update_log_ratio` (`metrics.distributions`).
        """
        raise NotImplementedError


ABILITIES: Sequence[tuple[type, str]] = (
    (KeepsParts, "parts"),
    (KeepsParts, "room"),
    (Examines, "examine"),
    (CountsTokens, "distributions"),
)
"""Abilities that a train engine declares by inheritance, each with a method that the engine must then define."""


class TrainEngineSettings(Protocol):
    """Frozen settings that build a train engine."""

    def build(self, setup: TrainSetup) -> TrainEngine:
        """Return the engine that holds these learners."""
        ...


def train_engine_class(name: str) -> type:
    """Return the settings class of a train engine by name, `module:Class` or entry point."""
    return find_class("train engine", name, BUILTIN)
