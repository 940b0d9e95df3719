"""MMD: magnetic mirror descent, which converges to regularised equilibria in two-player zero-sum games (arXiv:2206.05825).

    π' = argmax_π  E_π[A] − α·KL(π‖μ) − (1/η)·KL(π‖π_t)

The `temperature` α pulls the policy towards the magnet μ, which is the uniform policy or a copy of the policy that is renewed
at intervals (`magnet: moving`). The `step_size` η limits the change per step. If A is exact and every choice has its own
logits, π' is proportional to (π_t · μ^{αη} · e^{ηA})^{1/(1 + αη)}. The two players of a zero-sum game then approach the
equilibrium of the regularised game: the KL divergence to the equilibrium decreases by a factor of 1/(1 + αη) per step. This
convergence holds for η ≤ α/L², where L bounds how much one player's choice changes the values of the other player's choices.
With a moving magnet, the pull vanishes, and the policies converge to an equilibrium of the original game.

The maximum is approximated by `epochs` passes over the samples of the step, and each token is one choice. For samples of π_t,
with ρ = π/π_t and A = R − mean R of the other episodes, the loss is

    loss = −ρ·A + α·K(μ) + (1/η)·K(π_t),    K(ν) = ρ·log(π/ν) − ρ + 1

K(ν) has the same expectation and gradient as KL(π‖ν), however far π has moved. For the uniform magnet, K(μ) is replaced by
the negative entropy over the vocabulary, which is computed without sampling. At π = π_t the last term has no gradient. With
one pass and one minibatch, MMD is therefore REINFORCE with an entropy bonus.

Deviations from the paper:

- Sampled returns of self-play replace exact values.
- Gradient steps replace the exact maximum.
- The loss is a mean over tokens, with conditional divergences at the positions that π_t reaches. The paper's deep variant is
  PPO with these two divergences in place of the clipping.
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
    """Settings of MMD (magnetic mirror descent)."""

    name: Literal["mmd"] = "mmd"
    group_size: int = Field(default=8, ge=2)
    """The number of episodes per task. The return of each episode is compared with the mean return of the other episodes."""
    team_reward: TeamReward = "individual"
    penalties: PenaltyConfig = FREE
    temperature: float = Field(default=0.05, gt=0.0)
    """α, the weight of the divergence from the magnet, in units of reward per nat."""
    temperature_end: float | None = Field(default=None, ge=0.0)
    """The temperature at the end of the run. The temperature changes linearly from `temperature` to this value; with null, it
    is constant. A lower final value brings the policies closer to an equilibrium of the game."""
    step_size: float = Field(default=1.0, gt=0.0)
    """η, the step size. The weight of the divergence from the policy that sampled is 1/η, in units of reward per nat."""
    magnet: Literal["uniform", "moving"] = "uniform"
    """μ, the magnet: the uniform policy, or a copy of the policy that is renewed every `reference_every` steps."""
    reference_every: int = Field(default=0, ge=0)
    """The number of steps after which the magnet is renewed, with `magnet: moving`. With 0, the initial policy remains the
    magnet."""
    order: OrderConfig = Joint()
    """The order in which the policies are updated."""
    epochs: int = Field(default=4, ge=1)
    """The number of passes over the samples of each step."""
    minibatches: int = Field(default=1, ge=1)
    """The number of optimiser steps into which each pass over the samples is divided."""

    @model_validator(mode="after")
    def _only_a_moving_magnet_moves(self) -> MMD:
        if self.reference_every and self.magnet == "uniform":
            raise ValueError(
                "`reference_every` needs `magnet: moving`, because `magnet: uniform` is fixed; set both or neither"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm, which is RLOO with the loss of MMD."""
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
    """Return the sum of the loss over the tokens of a batch, the number of tokens and the metrics.

    The suffix `_K` stands for K target tokens. The magnet is the reference policy if the targets contain its log-probs, and
    the uniform policy otherwise.
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
