"""MMD: magnetic mirror descent, which converges to regularised equilibria in two-player zero-sum games (2206.05825).

    π' = argmax_π  E_π[A] − α·KL(π‖μ) − (1/η)·KL(π‖π_t)

α, the `temperature`, pulls the policy towards the magnet μ: the uniform policy, or a reference that follows the policy at
intervals (`magnet: moving`). η, the `step_size`, limits the change per step. If A is exact and every choice has its own logits,
π' is proportional to (π_t · μ^{αη} · e^{ηA})^{1/(1 + αη)}. Two players of a zero-sum game then approach the equilibrium with this
pull: the KL divergence decreases by a factor of 1/(1 + αη) per step. This holds for η ≤ α/L², where L bounds how much one player's
choice changes the values of another's choices. With a moving magnet the pull vanishes, and the limit is an equilibrium of the game.

Here the maximum is approximated by `epochs` passes over the step's samples, with each token a choice. For samples of π_t, with
ρ = π/π_t and A = R − mean R of the other episodes:

    loss = −ρ·A + α·K(μ) + (1/η)·K(π_t),    K(ν) = ρ·log(π/ν) − ρ + 1

K(ν) has the expectation and the gradient of KL(π‖ν), however far π has moved. For the uniform magnet, it is replaced by the
negative entropy over the vocabulary, which is known without sampling. At π = π_t the last term has no gradient: with one
pass and one minibatch, MMD is REINFORCE with an entropy bonus.

Deviations from the paper:

- Sampled returns of self-play replace exact values.
- Gradient steps replace the exact maximum.
- The loss is a mean over tokens, with conditional divergences at the positions that π_t reaches. The paper's deep variant is PPO
  with these two terms in place of its clip.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Loss, Outputs, PolicyLoss, Targets
from kapelle.algorithms.rloo import RLOO
from kapelle.algorithms.shared.orders import Joint, OrderConfig
from kapelle.algorithms.shared.rewards import FREE, PenaltyConfig, TeamReward
from kapelle.algorithms.shared.surrogate import SurrogateConfig, annealed
from kapelle.functional import divergences, masking, policy_losses
from kapelle.rows import Column
from kapelle.settings.base import Settings


class MMD(Settings):
    """Settings of magnetic mirror descent."""

    name: Literal["mmd"] = "mmd"
    group_size: int = Field(default=8, ge=2)
    """Episodes per task; each is compared with the mean of the others."""
    team_reward: TeamReward = "individual"
    penalties: PenaltyConfig = FREE
    temperature: float = Field(default=0.05, gt=0.0)
    """α, the weight of the pull to the magnet, in units of reward per nat."""
    temperature_end: float | None = Field(default=None, ge=0.0)
    """Temperature at the end of the run, reached linearly; null keeps `temperature`. A lower final value brings the policies
    closer to an equilibrium of the game."""
    step_size: float = Field(default=1.0, gt=0.0)
    """η, the step size; 1/η is the weight of the divergence from the policy that sampled, in units of reward per nat."""
    magnet: Literal["uniform", "moving"] = "uniform"
    """μ, the magnet: the uniform policy, or a copy of the policy that is renewed every `reference_every` steps."""
    reference_every: int = Field(default=0, ge=0)
    """Steps between two copies, with `magnet: moving`; 0 keeps the initial policy as the magnet."""
    order: OrderConfig = Joint()
    """Order of the policies' updates."""
    epochs: int = Field(default=4, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps into which each pass is divided."""

    @model_validator(mode="after")
    def _only_a_moving_magnet_moves(self) -> MMD:
        if self.reference_every and self.magnet == "uniform":
            raise ValueError(
                "`reference_every` needs `magnet: moving`, because `magnet: uniform` is fixed; set both or neither"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm: RLOO with this loss."""
        uniform = self.magnet == "uniform"
        # These coefficients only make the algorithm request entropies, or a reference and its refreshes.
        surrogate = SurrogateConfig(
            entropy_coefficient=self.temperature if uniform else 0.0,
            kl_coefficient=0.0 if uniform else self.temperature,
        )
        row = RLOO(
            group_size=self.group_size,
            team_reward=self.team_reward,
            penalties=self.penalties,
            loss=surrogate,
            reference_every=self.reference_every,
            order=self.order,
            epochs=self.epochs,
            minibatches=self.minibatches,
        ).build()
        fixed = self.temperature_end is None
        return replace(row, name=self.name, policy_loss=self._at(0.0), annealed=None if fixed else self._at)

    def _at(self, done: float) -> PolicyLoss:
        temperature = annealed(self.temperature, self.temperature_end, done)
        return partial(mmd_loss, temperature=temperature, step_size=self.step_size)


def mmd_loss(outputs: Outputs, targets: Targets, *, temperature: float, step_size: float) -> Loss:
    """Return the sum over tokens, their number and the metrics of one batch; [K] target tokens.

    The magnet is the reference if the targets have one, else the uniform policy.
    """
    logp_K, behaviour_K, mask_K = outputs.logp_K, targets[Column.BEHAVIOUR], targets.mask_K
    log_ratio_K = policy_losses.token_log_ratio(logp_K, behaviour_K)
    step_K = divergences.kl_reweighted(logp_K, behaviour_K, log_ratio_K)
    if Column.REFERENCE in targets.columns:
        pull_K = divergences.kl_reweighted(logp_K, targets[Column.REFERENCE], log_ratio_K)
    else:
        assert outputs.entropy_K is not None, "a uniform magnet needs `Algorithm.entropy`"
        pull_K = -outputs.entropy_K
    loss_K = temperature * pull_K + step_K / step_size - log_ratio_K.exp() * targets[Column.ADVANTAGE]
    total, weight = masking.token_mean(loss_K, mask_K, targets.columns.get(Column.WEIGHT))
    tokens = mask_K.sum()
    metrics = {"drift": (masking.masked_sum(step_K.detach(), mask_K), tokens)}
    if Column.REFERENCE in targets.columns:
        metrics["kl"] = (masking.masked_sum(pull_K.detach(), mask_K), tokens)
    return Loss(total, weight, metrics)
