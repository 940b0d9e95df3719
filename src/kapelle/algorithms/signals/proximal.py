"""Log-probs under the trainer's weights before the update: the denominator of ratios if sampler and trainer differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kapelle.algorithms.signals.reference import log_probs
from kapelle.rows import Learners, Sampled, TurnKey
from kapelle.runtime.on_demand import Tensor


@dataclass(frozen=True, slots=True)
class ProximalLogProbs:
    """Signal that gives `Signals.proximal`."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return each policy's own log-probs `_T` of every trained turn."""
        return {"proximal": log_probs(step, engine, {name: name for name in step.team.trained})}
