"""A2C (advantage actor-critic): policy gradients with a critic and one update per sampling step (arXiv:1602.01783, synchronous form).

    loss = −ρ·A·log π(token) − c·entropy,    where ρ = π/π_sampler has no gradient

For on-policy samples, ρ is 1. The gradient then equals that of PPO's surrogate without clipping, so PPO with one epoch and
one minibatch is identical to A2C. For samples from older weights (`training.max_staleness`), ρ corrects the expectation and is not
clipped.

The critic, GAE and reward sharing are the same as in PPO. With λ = 1 the advantage is the return minus the critic's value V.
If an episode is truncated, the critic's value replaces the missing future rewards, as in the paper's n-step returns.

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
    """Settings of A2C. A2C makes one update per sampling step, so there are no settings for epochs, minibatches or clip bounds."""

    name: Literal["a2c"] = "a2c"
    group_size: int = Field(default=1, ge=1)
    """The number of episodes per task; 1 is enough for an algorithm with a critic."""
    team_reward: TeamReward = "mean"
    penalties: PenaltyConfig = FREE
    gae: GAEConfig = GAEConfig(lam=1.0, normalise="none")
    entropy_coefficient: float = Field(default=0.01, ge=0.0)
    """The weight of the entropy bonus, per nat of entropy."""
    value_loss: ValueLossConfig = ValueLossConfig()
    order: OrderConfig = Joint()
    """The order in which the policies are updated."""
    reference_every: int = Field(default=0, ge=0)
    """The number of steps between two refreshes of the reference policy, which `gae.kl_in_reward` uses. With 0, the reference
    policy is never refreshed."""

    def build(self) -> Algorithm:
        """Return the algorithm, which is PPO with one pass over the samples and an unclipped loss."""
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
    """Return the sum of the loss over the tokens of a batch, the number of tokens and the metrics.

    The suffix `_K` stands for K target tokens.
    """
    logp_K, mask_K = outputs.logp_K, targets.mask_K
    log_ratio_K = policy_losses.token_log_ratio(logp_K, targets[Column.BEHAVIOUR])
    loss_K = policy_losses.policy_gradient(logp_K, log_ratio_K, targets[Column.ADVANTAGE])
    if entropy_coefficient:
        assert outputs.entropy_K is not None, "an entropy bonus needs `Algorithm.entropy`"
        loss_K = loss_K - entropy_coefficient * outputs.entropy_K
    total, weight = masking.token_mean(loss_K, mask_K, targets.columns.get(Column.WEIGHT))
    drift_K = divergences.kl_k3(targets[Column.BEHAVIOUR], logp_K.detach())
    return Loss(total, weight, {"drift": (masking.masked_sum(drift_K, mask_K), mask_K.sum())})
