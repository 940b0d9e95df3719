"""The train engine's protocol: what the loop asks of whatever holds the learning weights.

A learner is a set of weights with its own optimiser: a policy or a critic. Losses are pure functions that
return a sum and a weight; the engine divides by the global weight of that learner, so that accumulation,
packing and data parallelism give the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kapelle.algorithm import CriticLoss, PolicyLoss
from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train.batch import Sample


@dataclass(frozen=True, slots=True)
class Objective:
    """What one update minimises."""

    policy_loss: PolicyLoss
    critic_loss: CriticLoss | None = None
    critic_coefficient: float = 1.0
    entropy: bool = False
    epochs: int = 1
    minibatches: int = 1
    parity: bool = True
    """True when the samples carry a `behaviour` column of these very weights."""


@dataclass(frozen=True, slots=True)
class Published:
    """New weights of one policy, ready for the rollout engine."""

    weights: Mapping[str, Tensor]
    version: int


class TrainEngine(Protocol):
    """Holds the learners; scores, updates, publishes, saves and loads them."""

    @property
    def versions(self) -> Mapping[str, int]:
        """Number of changes behind the weights of each trained policy: optimiser steps, and exchanges."""
        ...

    def renderer(self, learner: str) -> WritingRenderer:
        """Return how text becomes the tokens of the model that a policy or critic stands on."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-probs (policies, references) or values (critics) `_T` of each sample's targets."""
        ...

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Take the optimiser steps of one update, every learner on its own samples; return metrics."""
        ...

    def check_parity(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Compare the samples' `behaviour` with what the weights of this moment say; return the gaps as metrics.

        Raises ParityError when other weights, or another distribution, have sampled them.
        """
        ...

    def publish(self) -> Mapping[str, Published]:
        """Return the weights of the policies that changed since the last call."""
        ...

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state `_D` over the tokens before each sample's targets, by a frozen base.

        The learner of such a sample is `embedder_name(policy)`.
        """
        ...

    def exchange(self, one: str, other: str) -> None:
        """Let two policies change places: weights, optimiser state and references, bit for bit."""
        ...

    def refresh_references(self) -> None:
        """Make every reference policy a copy of its policy as it is now."""
        ...

    def state(self) -> dict[str, object]:
        """Return everything that an exact resume needs, as a tree of tensors and plain values."""
        ...

    def load_state(self, state: Mapping[str, object]) -> None:
        """Take what `state` returned."""
        ...


def embedder_name(policy: str) -> str:
    """Return the name under which the frozen base of a policy is asked for embeddings."""
    return f"embedder:{policy}"


def reference_name(policy: str) -> str:
    """Return the name under which a policy's frozen reference is kept and scored."""
    return f"reference:{policy}"
