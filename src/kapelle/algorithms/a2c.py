"""A2C: policy gradients with a critic, one update per step of sampling (1602.01783, synchronous).

    loss = −ρ·A·log π(token) − c·entropy,    ρ = π/π_sampler, without a gradient

On-policy, ρ is 1. The gradient is then that of PPO's surrogate where nothing is clipped, so PPO with one epoch and one
minibatch equals A2C. For samples from older weights (`training.overlap`), ρ corrects the expectation and is not clipped.

The critic, GAE and reward sharing are those of PPO. With λ = 1 the advantage is the return minus V. After a truncation,
the critic's value replaces the missing future rewards, as in the paper's n-step returns.

Deviations from the paper:

- The episodes of one step replace the asynchronous threads of A3C.
- The loss is a mean over tokens, not a sum.
- Adam replaces shared RMSProp.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Loss, Outputs, Targets
from kapelle.algorithms.ppo import IPPO, actor_critic_row
from kapelle.algorithms.shared.gae import GAEConfig
from kapelle.algorithms.shared.orders import Joint, OrderConfig
from kapelle.algorithms.shared.rewards import FREE, PenaltyConfig, TeamReward
from kapelle.algorithms.shared.surrogate import SurrogateConfig, ValueLossConfig
from kapelle.functional import divergences, masking, policy_losses
from kapelle.rows import Column
from kapelle.settings.base import Settings


class A2C(Settings):
    """Settings of A2C: one update per step of sampling, so there are no epochs, minibatches or clip bounds."""

    name: Literal["a2c"] = "a2c"
    group_size: int = Field(default=1, ge=1)
    """Episodes per task; 1 is enough with a critic."""
    team_reward: TeamReward = "mean"
    penalties: PenaltyConfig = FREE
    gae: GAEConfig = GAEConfig(lam=1.0, normalise="none")
    entropy_coefficient: float = Field(default=0.01, ge=0.0)
    """Weight of the entropy bonus, per nat."""
    value_loss: ValueLossConfig = ValueLossConfig()
    order: OrderConfig = Joint()
    """Order of the policies' updates."""
    reference_every: int = Field(default=0, ge=0)
    """Steps between refreshes of the reference policy of `gae.kl_in_reward`; 0 never refreshes it."""

    def build(self) -> Algorithm:
        """Return the algorithm: PPO with one pass over the samples and an unclipped loss."""
        row = actor_critic_row(
            IPPO(
                group_size=self.group_size,
                team_reward=self.team_reward,
                penalties=self.penalties,
                gae=self.gae,
                loss=SurrogateConfig(entropy_coefficient=self.entropy_coefficient),
                value_loss=self.value_loss,
                reference_every=self.reference_every,
                order=self.order,
                epochs=1,
                minibatches=1,
            ),
            self.name,
            "local",
        )
        return replace(row, policy_loss=partial(a2c_loss, entropy_coefficient=self.entropy_coefficient))


def a2c_loss(outputs: Outputs, targets: Targets, *, entropy_coefficient: float) -> Loss:
    """Return the sum over tokens, their number and the metrics of one batch; [K] target tokens."""
    logp_K, mask_K = outputs.logp_K, targets.mask_K
    log_ratio_K = policy_losses.token_log_ratio(logp_K, targets[Column.BEHAVIOUR])
    loss_K = policy_losses.policy_gradient(logp_K, log_ratio_K, targets[Column.ADVANTAGE])
    if entropy_coefficient:
        assert outputs.entropy_K is not None, "an entropy bonus needs `Algorithm.entropy`"
        loss_K = loss_K - entropy_coefficient * outputs.entropy_K
    total, weight = masking.token_mean(loss_K, mask_K, targets.columns.get(Column.WEIGHT))
    drift_K = divergences.kl_k3(targets[Column.BEHAVIOUR], logp_K.detach())
    return Loss(total, weight, {"drift": (masking.masked_sum(drift_K, mask_K), mask_K.sum())})
