"""MMD: magnetic mirror descent (2206.05825), for play that is to settle.

    π' = argmax_π  E_π[A] − α·KL(π‖μ) − (1/η)·KL(π‖π_t)

α, the `temperature`, draws play towards the magnet μ: uniform play, or a reference that follows the policy at intervals
(`magnet: moving`). η, the `step_size`, says how far one step may go. Where A is exact and every choice has logits of its own, π' is proportional to
(π_t · μ^{αη} · e^{ηA})^{1/(1 + αη)}, and two players of a zero-sum game come to the equilibrium with this pull by a factor of 1/(1 + αη) a
step in KL, for η ≤ α/L² (L bounds how much one player's choice changes what another's are worth). With a moving magnet the pull
goes, and what play comes to is an equilibrium of the game.

Here the maximum is approached by `epochs` passes over the step's samples, each token a choice. Sampled by π_t, with ρ = π/π_t and A = R − mean of
the other attempts' R:

    loss = −ρ·A + α·K(μ) + (1/η)·K(π_t),  K(ν) = ρ·log(π/ν) − ρ + 1

K(ν) has the expectation and the gradient of KL(π‖ν), however far π has moved; for uniform play it is the entropy of all tokens instead, known
without sampling. At π = π_t the last term has no gradient: with one pass and one minibatch this is REINFORCE with an entropy bonus.

Deviations: sampled returns of one's own play for exact values; gradient steps for the maximum; a mean over tokens, whose conditional divergences
are taken where π_t leads (the paper's deep variant is PPO with these two terms in place of its clip).
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
    """Episodes per task; each is compared with the others."""
    team_reward: TeamReward = "individual"
    penalties: PenaltyConfig = FREE
    temperature: float = Field(default=0.05, gt=0.0)
    """α: weight of the pull to the magnet, in units of what is earned, per nat."""
    temperature_end: float | None = Field(default=None, ge=0.0)
    """The temperature that the run comes to in a straight line, with which play comes nearer to an equilibrium of the game; null
    keeps `temperature`."""
    step_size: float = Field(default=1.0, gt=0.0)
    """η: how far a step may go; 1/η is the weight of the divergence from the policy that sampled, in units of what is earned, per nat."""
    magnet: Literal["uniform", "moving"] = "uniform"
    """μ: uniform play, or a copy of the policy that is made anew every `reference_every` steps."""
    reference_every: int = Field(default=0, ge=0)
    """Steps between two copies, with `magnet: moving`; 0 keeps the policy of the start."""
    order: OrderConfig = Joint()
    """Which policies a step updates."""
    epochs: int = Field(default=4, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps into which each pass is divided."""

    @model_validator(mode="after")
    def _only_a_moving_magnet_moves(self) -> MMD:
        if self.reference_every and self.magnet == "uniform":
            raise ValueError(
                "`reference_every` moves the magnet, and `magnet: uniform` stays where it is: set `magnet: moving`, or leave it out"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm's row: RLOO's with this loss."""
        uniform = self.magnet == "uniform"
        # The two coefficients ask for entropies, and for the reference and its refreshing.
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

    The magnet is the reference where the targets have one, else uniform play.
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
    measured = {"drift": step_K, "kl": pull_K} if Column.REFERENCE in targets.columns else {"drift": step_K}
    tokens = mask_K.sum()
    return Loss(
        total,
        weight,
        {name: (masking.masked_sum(each_K.detach(), mask_K), tokens) for name, each_K in measured.items()},
    )
