"""Compute log-probs under a frozen copy of each policy (the reference) for a KL penalty, and refresh these copies."""

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
    """A signal that computes `Signals.reference`: log-probs under the initial policy, or under the last copy of the policy."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[TurnKey, Tensor]]:
        """Return the log-probs of each trained turn under the reference, as a tensor of shape (T,)."""
        names = {name: reference_name(name) for name in step.team.trained}
        return {"reference": log_probs(step, engine, names)}


@dataclass(frozen=True, slots=True)
class RefreshReferences:
    """A hook that replaces every reference with a copy of its policy every `every` steps."""

    every: int
    moves_weights: ClassVar[bool] = False

    def __call__(self, step: int, team: Team, engine: Learners) -> None:
        """Refresh the references if the step number is a multiple of `every`."""
        if step % self.every == 0:
            engine.refresh_references()


def refreshed(every: int) -> tuple[RefreshReferences, ...]:
    """Return the hook that refreshes references every `every` steps, or no hook if `every` is 0."""
    return (RefreshReferences(every),) if every else ()


def log_probs(step: Sampled, engine: Learners, learner: Mapping[str, str]) -> dict[TurnKey, Tensor]:
    """Return the log-probs of each trained turn (shape (T,)).

    The argument `learner` maps policies to the learners that score their turns.
    """
    samples = samples_for(step, learner)
    return dict(zip(samples, engine.score(list(samples.values())), strict=True))


def samples_for(step: Sampled, learner: Mapping[str, str]) -> dict[TurnKey, Sample]:
    """Return the sample of each trained turn. The argument `learner` maps policies to the learners that score their turns."""
    return {key: policy_sample(turn, step.team, learner[turn.policy], {}) for key, turn in step.trained}
