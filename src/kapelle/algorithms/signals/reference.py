"""Log-probs by a frozen copy of each policy, for a KL penalty, and the hook that refreshes the copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kapelle.algorithms.signals.samples import policy_sample
from kapelle.rows import Learners, Sample, Sampled, TurnKey
from kapelle.runtime.on_demand import Tensor
from kapelle.team import Team, reference_name


@dataclass(frozen=True, slots=True)
class ReferenceLogProbs:
    """Signal that gives `Signals.reference`: log-probs by the initial policy, or by the last refreshed copy."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return the reference's log-probs `_T` of every trained turn."""
        names = {name: reference_name(name) for name in step.team.trained}
        return {"reference": log_probs(step, engine, names)}


@dataclass(frozen=True, slots=True)
class RefreshReferences:
    """Hook that makes every reference a copy of its policy every `every` steps."""

    every: int
    moves_weights: ClassVar[bool] = False

    def __call__(self, step: int, team: Team, engine: Learners) -> None:
        """Refresh the references if the step number is a multiple of `every`."""
        if step % self.every == 0:
            engine.refresh_references()


def refreshed(every: int) -> tuple[RefreshReferences, ...]:
    """Return the hook that refreshes references; no hook for 0, which keeps the initial references."""
    return (RefreshReferences(every),) if every else ()


def log_probs(step: Sampled, engine: Learners, learner: Mapping[str, str]) -> dict[TurnKey, Tensor]:
    """Return the log-probs `_T` of every trained turn; `learner` maps the turn's policy to the learner that scores it."""
    samples = samples_for(step, learner)
    return dict(zip(samples, engine.score(list(samples.values())), strict=True))


def samples_for(step: Sampled, learner: Mapping[str, str]) -> dict[TurnKey, Sample]:
    """Return the sample of every trained turn; `learner` maps the turn's policy to the learner that scores it."""
    return {key: policy_sample(turn, step.team, learner[turn.policy], {}) for key, turn in step.trained}
