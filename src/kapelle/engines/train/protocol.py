"""The interface of train engines, which hold the trained weights.

A learner is a set of weights with its own optimiser: a policy or a critic. Losses are pure functions that return a sum
and a weight. The engine divides the summed loss of a learner by the learner's global weight, so that gradient
accumulation, packing and data parallelism give the same optimiser step.

A train engine is selected like a rollout engine. In a recipe, `train_engine: {name: torch}` names a class of settings,
which may be built in, a `module:Class` path or an entry point of `kapelle.train_engines`. The method `build` of the
settings takes a `TrainSetup` and returns the engine. The training loop, the warm-up, verifiers and checkpoints use an
engine only through `TrainEngine`. An engine declares optional abilities by inheriting from `KeepsParts`, `Examines` or
`CountsTokens`, as environments do (ADR 0068).
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
"""The prefix of the names of the value head's weights among the weights of a critic."""


@dataclass(frozen=True, slots=True)
class UpdateLimits:
    """Limits of the engine's work. These limits do not change results, except by stopping the update."""

    microbatch_tokens: int | None = 4096
    """The maximum number of tokens in one forward and backward pass. With None, the engine chooses the number (see
    `pass_size.py`)."""
    parity_tolerance: float | None = None
    """The maximum absolute difference between the log-probs of trainer and sampler, in nats. In half precision, a few
    tokens may exceed this bound. With None, the default of the compute type is used (`parity.PARITY`)."""
    non_finite: str = "stop"
    """What happens if a loss or gradient is not finite. The value `stop` raises NumericsError, and `skip` skips the
    optimiser step."""
    total_steps: int = 1_000_000
    """The number of optimiser steps of the whole run, for learning rate schedules that have an end."""
    gradient_checkpointing: bool = False
    """Whether the backward pass recomputes each decoder block instead of storing its activations."""


@dataclass(frozen=True, slots=True)
class TrainSetup:
    """The arguments from which a train engine is built."""

    models: Mapping[str, LanguageModel]
    """Mapping from base names to the base models in this process's memory. The rollout engine samples from the same
    objects, so the train engine adds every adapter of `policies` to these models (`LanguageModel.bank`) when it is
    built."""
    policies: Sequence[Policy]
    """All policies of the team. Policies that are endpoints have no weights in this process. Policies that are not
    `trained` are only scored."""
    critics: Sequence[Critic]
    optimizer: OptimizerConfig
    limits: UpdateLimits
    seed: int
    references: bool = False
    """Whether every trained policy has a frozen reference policy (`reference_name`), which is a copy of its initial
    weights."""
    embedders: bool = False
    """Whether a frozen copy of every policy's base model computes embeddings (`embedder_name`)."""
    ranks: Ranks = ALONE
    """The processes that build the same engine. All of these processes call the engine with the same arguments in the
    same order."""

    def optimizer_of(self, learner: Policy | Critic) -> OptimizerConfig:
        """Return the optimiser settings of a policy or critic: the run's settings with the learner's own learning rate and schedule."""
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
    """Whether the samples have a `behaviour` column that was computed with exactly the weights that are updated."""


@dataclass(frozen=True, slots=True)
class Published:
    """New weights of one policy, ready for the rollout engine."""

    weights: Mapping[str, Tensor]
    version: int


class TrainEngine(Protocol):
    """An engine that holds the learners and can score samples and update, publish, save and load the learners' weights.

    Weights are mappings from name to tensor. The weights of an adapter have PEFT's names, and the weights of a whole
    model have the names of `transformers`. The weights of a critic include its value head (`value_head.weight` of shape
    [1, hidden] and `value_head.bias` of shape [1]). Subclasses inherit a `close` method that does nothing.
    """

    @property
    def versions(self) -> Mapping[str, int]:
        """Mapping from each trained policy to the number of changes of its weights: optimiser steps and exchanges.

        A skipped optimiser step (`non_finite: skip`) does not count. The number shows whether an interrupted update
        changed the weights.
        """
        ...

    def renderer(self, learner: str) -> WritingRenderer:
        """Return the renderer of the model of a policy or critic."""
        ...

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return all current weights of a policy, critic or reference policy. The caller must not modify the tensors.

        The tensors may share the engine's own memory, so copy them to keep their current values.
        """
        ...

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of a policy, critic or reference policy without changing the state of the optimiser.

        The mapping `weights` has the same names as the result of the method `weights`. Raises ModelError if names or
        shapes do not match.
        """
        ...

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the log-probs (policies, references) or values (critics) of each sample's targets.

        The result contains one float32 tensor of shape (T,) on the CPU for each sample.
        """
        ...

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state over the tokens before each sample's targets, computed by a frozen base model.

        The result contains one tensor of shape (D,) for each sample. The learner of such a sample is
        `embedder_name(policy)`.
        """
        ...

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Take the optimiser steps of one update, in which every learner is trained on its own samples, and return metrics.

        Samples of one learner with the same `bundle` stay together in one forward pass and in one optimiser step. A
        learner without samples does not change. Raises ParityError, before any weights change, if the log-probs of
        trainer and sampler disagree. Raises NumericsError if a loss or gradient is not finite, and StopRequested if the
        run should stop. If an error is raised, accumulated gradients are dropped.
        """
        ...

    def check_parity(
        self, samples: Sequence[Sample], weights: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, float]:
        """Compare the `behaviour` column of samples with the log-probs of the current weights, and return the differences as metrics.

        The mapping `weights`, by policy and name, replaces the current weights during this comparison. Pass the weights
        with which the samples were generated if the policies have been updated since. Afterwards, the current weights
        are restored exactly. Raises ParityError if the samples come from other weights or from another distribution.
        """
        ...

    def publish(self) -> Mapping[str, Published]:
        """Return the weights of the policies that changed since the last call, by optimiser steps, exchanges or loading.

        The first call may return the weights of all policies. A rollout engine begins with the weights in
        `TrainSetup.models`.
        """
        ...

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies exactly, including weights, optimiser state and reference policies."""
        ...

    def refresh_references(self) -> None:
        """Make every reference policy a copy of its current policy."""
        ...

    def state(self) -> dict[str, object]:
        """Return the state for an exact resume, as a tree of tensors and plain Python values.

        Checkpoints store this state.
        """
        ...

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore the result of `state` exactly. Raises CheckpointError if the state comes from another kind of engine."""
        ...

    def close(self) -> None:
        """Release resources other than memory, such as processes. This method is called after the last use of the engine."""
        return  # nothing to release by default


class KeepsParts:
    """A train engine that shards some tensors: each rank keeps, saves and loads its own shards.

    The method `load_state` of such an engine also accepts shards.
    """

    def parts(self) -> dict[str, object]:
        """Return the state with sharded tensors as `DTensor`, without waiting for other ranks."""
        raise NotImplementedError

    def room(self, place: str, saved: Tensor) -> Tensor | None:
        """Return an empty tensor for the value of `parts` at a dotted path, sharded as in this rank.

        Returns None if this rank keeps the whole value. The tensor `saved` has the shape and type of the whole saved
        tensor, but no content.
        """
        raise NotImplementedError


class Examines:
    """A train engine that can also compute entropies, so that traces contain the entropy of each token."""

    def examine(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-prob and entropy (in nats) of each target token of policy samples, computed without dropout.

        The result contains one float32 tensor of shape (T, 2) on the CPU for each sample.
        """
        raise NotImplementedError


class CountsTokens:
    """A train engine that also collects histograms of the tokens of its updates."""

    def distributions(self) -> Mapping[str, Histogram]:
        """Return histograms of the tokens in all passes of all updates since the last call, by `KIND/policy`.

        The kinds are `update_entropy` and, for samples with a `behaviour` column, `update_log_ratio` (see
        `metrics.distributions`).
        """
        raise NotImplementedError


ABILITIES: Sequence[tuple[type, str]] = (
    (KeepsParts, "parts"),
    (KeepsParts, "room"),
    (Examines, "examine"),
    (CountsTokens, "distributions"),
)
"""The abilities that a train engine declares by inheritance. Each entry is a class and the name of a method that an
engine with this ability must define."""


class TrainEngineSettings(Protocol):
    """Immutable settings from which a train engine is built."""

    def build(self, setup: TrainSetup) -> TrainEngine:
        """Return the engine that holds the learners of this setup."""
        ...


def train_engine_class(name: str) -> type:
    """Return the settings class of a train engine, given a built-in name, a `module:Class` path or the name of an entry point."""
    return find_class("train engine", name, BUILTIN)
