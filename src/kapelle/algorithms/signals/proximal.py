"""Compute log-probs with the trainer's weights before the update.

These log-probs are the denominator of ratios if sampler and trainer differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kapelle.algorithms.signals.reference import log_probs
from kapelle.rows import Learners, Sampled, TurnKey
from kapelle.runtime.on_demand import Tensor


@dataclass(frozen=True, slots=True)
class ProximalLogProbs:
    """A signal that computes `Signals.proximal`."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return the log-probs of each trained turn under its own policy, as a tensor of shape (T,)."""
        return {"proximal": log_probs(step, engine, {name: name for name in step.team.trained})}
