"""Add the entropy bonus of each agent to the loss of the policies.

Shapes: K is the number of target tokens of one policy, and T is the number of completion tokens of one turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kapelle.algorithm import Loss, Outputs, PolicyLoss, Targets
from kapelle.engines.train.protocol import Objective
from kapelle.features.entropy.settings import EntropyConfig
from kapelle.rows import Sample, Sampled, TurnKey
from kapelle.training.feature import Feature, StartedRun, StepInProgress

BONUS = "entropy_bonus"
"""Name of the column of samples that contains the weight of the bonus for each token, per nat."""


@dataclass(frozen=True, slots=True)
class WithBonus:
    """A policy loss from which the weighted entropy of each token is subtracted."""

    loss: PolicyLoss

    def __call__(self, outputs: Outputs, targets: Targets) -> Loss:
        """Return the loss. The argument `outputs` must contain entropies."""
        assert outputs.entropy_K is not None, "the objective needs entropies"
        found = self.loss(outputs, targets)
        bonus_K = targets[BONUS] * outputs.entropy_K * targets.mask_K
        return found._replace(total=found.total - bonus_K.sum())


class EntropyBonus(Feature):
    """Sets the weight of the bonus for each token of an agent to the current value of the agent's schedule."""

    def __init__(self, settings: EntropyConfig, run: StartedRun) -> None:
        self._settings, self._steps = settings, run.config.training.steps

    def weights(self, number: int) -> dict[str, float]:
        """Return the weight of each agent's bonus in a step (starting from 1)."""
        done = min(1.0, (number - 1) / max(1, self._steps))
        return {
            agent: bonus.start + (bonus.end - bonus.start) * done
            for agent, bonus in self._settings.agents.items()
        }

    def samples(
        self, step: StepInProgress, sampled: Sampled, samples: Mapping[TurnKey, Sample]
    ) -> dict[TurnKey, Sample]:
        """Return the samples with the weights of the bonus in the column `entropy_bonus`, of shape (T,)."""
        weights, agents = self.weights(step.number), {key: turn.agent for key, turn in sampled.turns}
        step.metrics |= {f"entropy_bonus/{agent}": weight for agent, weight in weights.items()}
        return {
            key: replace(
                sample,
                columns={
                    **sample.columns,
                    BONUS: torch.full((len(sample.targets),), weights.get(agents[key], 0.0)),
                },
            )
            for key, sample in samples.items()
        }

    def objective(self, objective: Objective) -> Objective:
        """Return the objective with the entropy bonus added."""
        return replace(objective, entropy=True, policy_loss=WithBonus(objective.policy_loss))
