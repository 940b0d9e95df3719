"""The train engine's protocol: what a run needs of whatever holds the trained weights.

A learner is a set of weights with its own optimiser: a policy or a critic. Losses are pure functions that
return a sum and a weight; the engine divides by the global weight of that learner, so that accumulation,
packing and data parallelism give the same step.

An engine is chosen like a rollout engine: `train_engine: {name: torch}` in a recipe names a class of settings, built in,
`module:Class` or an entry point of `kapelle.train_engines`, whose `build` gets a `TrainSetup` and returns the engine.
Everything that uses an engine uses it through `TrainEngine`: the loop, the warm-up, verifiers, checkpoints. What it can do beyond
that it declares by inheriting from `KeepsParts`, `Examines` or `CountsTokens`, as environments do (ADR 0068).
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
"""Prefix of the names of a critic's head among its weights."""


@dataclass(frozen=True, slots=True)
class UpdateLimits:
    """Limits on how the engine works; none changes a result, except by stopping the update."""

    microbatch_tokens: int | None = 4096
    """Most tokens in one forward and backward pass; None leaves them to the engine: see `pass_size.py`."""
    parity_tolerance: float | None = None
    """Greatest |trainer − sampler| log-prob (nats), in half precision of all but a few tokens; None takes the compute type's
    (`parity.PARITY`)."""
    non_finite: str = "stop"
    """What happens at a loss or gradient that is not finite: `stop` raises NumericsError, `skip` leaves the step out."""
    total_steps: int = 1_000_000
    """Optimiser steps of the whole run, for schedules that end."""
    gradient_checkpointing: bool = False
    """Whether the backward pass computes each decoder block again instead of keeping what it read."""


@dataclass(frozen=True, slots=True)
class TrainSetup:
    """What a train engine is built for."""

    models: Mapping[str, LanguageModel]
    """The base models in this process's memory, by base name. The rollout engine samples from the same objects, so
    the engine adds every adapter of `policies` to them (`LanguageModel.bank`) when it is built."""
    policies: Sequence[Policy]
    """All policies of the team; those behind endpoints have no weights here, and those that are not `trained` are only scored."""
    critics: Sequence[Critic]
    optimizer: OptimizerConfig
    limits: UpdateLimits
    seed: int
    references: bool = False
    """Whether every trained policy has a frozen reference (`reference_name`), a copy of it at the start."""
    embedders: bool = False
    """Whether a frozen copy of every policy's base gives embeddings (`embedder_name`)."""
    ranks: Ranks = ALONE
    """The processes that build the same engine, and call it with the same arguments in the same order."""

    def optimizer_of(self, learner: Policy | Critic) -> OptimizerConfig:
        """Return the optimiser's settings of a policy or critic: the run's, with its own rate as `lr` and its own schedule."""
        own, rate = self.optimizer, learner.rate
        usual = (own.critic_lr or own.lr) if isinstance(learner, Critic) else own.lr
        steps = own.rising(self.limits.total_steps) if rate.warmup_steps is None else rate.warmup_steps
        changes = {"lr": rate.lr or usual, "schedule": rate.schedule or own.schedule, "warmup_steps": steps}
        return own.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class Objective:
    """What one update minimises.

    Losses can be pickled, so that an engine may hand an objective to processes of its own.
    """

    policy_loss: PolicyLoss
    critic_loss: CriticLoss | None = None
    critic_coefficient: float = 1.0
    entropy: bool = False
    epochs: int = 1
    minibatches: int = 1
    parity: bool = True
    """True if the samples carry a `behaviour` column of exactly these weights."""


@dataclass(frozen=True, slots=True)
class Published:
    """New weights of one policy, ready for the rollout engine."""

    weights: Mapping[str, Tensor]
    version: int


class TrainEngine(Protocol):
    """Holds the learners; scores, updates, publishes, saves and loads them.

    Weights are mappings from name to tensor: an adapter's under PEFT's names, a whole model's under those of `transformers`,
    and a critic's adapter with its head beside it (`value_head.weight` `[1, hidden]`, `value_head.bias` `[1]`). A class may inherit
    from it: then it need not write `close` where it holds nothing but memory.
    """

    @property
    def versions(self) -> Mapping[str, int]:
        """Number of changes behind the weights of each trained policy: optimiser steps, and exchanges.

        A step that is left out (`non_finite: skip`) does not count. It shows whether an interrupted update changed weights.
        """
        ...

    def renderer(self, learner: str) -> WritingRenderer:
        """Return how text becomes the tokens of the model of a policy or critic."""
        ...

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return all weights of a policy, critic or reference as they are now; read them, do not write to them.

        The tensors may be the engine's own memory: copy what you keep.
        """
        ...

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of a policy, critic or reference, with the names of `weights`; the optimiser does not change.

        Raises ModelError when names or shapes do not fit.
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

        Samples of one learner and one `bundle` stay together, in a pass and in a step. A learner without samples does not
        change. Raises ParityError before anything changes when trainer and sampler disagree, NumericsError when a loss or
        gradient is not finite, StopRequested when the run should stop; no gradient is left behind.
        """
        ...

    def check_parity(
        self, samples: Sequence[Sample], weights: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, float]:
        """Compare the samples' `behaviour` with the log-probs of the current weights; return the gaps as metrics.

        `weights`, by policy and name, take the place of the current ones for this comparison: those that sampled, where
        the policies have learned since. They are the current ones again afterwards, to the bit. Raises ParityError when the samples come from other weights or another distribution.
        """
        ...

    def publish(self) -> Mapping[str, Published]:
        """Return the weights of the policies that changed since the last call: by steps, exchanges or loading.

        The first call may return all: a rollout engine begins with the weights in `TrainSetup.models`.
        """
        ...

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies: weights, optimiser state and references, bit for bit."""
        ...

    def refresh_references(self) -> None:
        """Make every reference policy a copy of its policy as it is now."""
        ...

    def state(self) -> dict[str, object]:
        """Return everything that an exact resume needs, as a tree of tensors and plain values.

        Checkpoints hold it, and a copy of it undoes an interrupted step.
        """
        ...

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore what `state` returned, bit for bit; CheckpointError when an engine of another kind returned it."""
        ...

    def close(self) -> None:
        """Release what the engine holds besides memory, such as its own processes; it is not used again."""
        return  # nothing: what a class that inherits from this does


class KeepsParts:
    """A train engine of several ranks of which each keeps a part of some tensors, saves it and loads it alone.

    Its `load_state` also takes such parts.
    """

    def parts(self) -> dict[str, object]:
        """Return what `state` returns, with the tensors that ranks have shared out as `DTensor`; waits for no other rank."""
        raise NotImplementedError

    def room(self, place: str, saved: Tensor) -> Tensor | None:
        """Return an empty tensor for what `parts` has at a dotted place, laid out as this rank keeps it; None if it keeps it whole.

        `saved` has the shape and the type of what was saved there, whole, and no content.
        """
        raise NotImplementedError


class Examines:
    """A train engine that also says how certain a policy was; traces then hold the entropy of each token."""

    def examine(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-prob and entropy `_T2` (float32 on the CPU, nats) of each policy sample's targets, without dropout."""
        raise NotImplementedError


class CountsTokens:
    """A train engine that also says how the tokens of its updates are distributed."""

    def distributions(self) -> Mapping[str, Histogram]:
        """Return histograms of the policies' tokens, of all passes of all updates since the last call, by `KIND/policy`.

        Kinds are `update_entropy` and, of samples with a `behaviour` column, `update_log_ratio` (`metrics.distributions`).
        """
        raise NotImplementedError


ABILITIES: Sequence[tuple[type, str]] = (
    (KeepsParts, "parts"),
    (KeepsParts, "room"),
    (Examines, "examine"),
    (CountsTokens, "distributions"),
)
"""What a train engine may declare by inheriting from it, and a part that it then has to write."""


class TrainEngineSettings(Protocol):
    """Frozen settings that build a train engine."""

    def build(self, setup: TrainSetup) -> TrainEngine:
        """Return the engine that holds these learners."""
        ...


def train_engine_class(name: str) -> type:
    """Return the settings class of a train engine by name, `module:Class` or entry point."""
    return find_class("train engine", name, BUILTIN)
