"""PPO for teams: clipped policy updates with advantages from a critic that reads what its agent reads.

    loss = −min(ρA, clip(ρ, 1 − ε, 1 + ε)·A),    A_t = δ_t + γλ·A_{t+1},    δ_t = r_t + γV_{t+1} − V_t

The algorithm is PPO (arXiv:1707.06347) with GAE over the completion tokens of an agent, over all of its turns in a row
(`gae.py`). With several agents and one critic per agent, the algorithm is IPPO (arXiv:2011.09533); `ppo` is the same
algorithm for one policy. MAPPO, MARFT and HAPPO differ in the view of the critic, the path of GAE and the order of updates.
Each of these algorithms adds a few lines to this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, CreditFunction, CriticSpec, Data, Update
from kapelle.algorithms.shared.gae import GAEConfig, GAECredit
from kapelle.algorithms.shared.orders import Joint, OrderConfig, order_checks
from kapelle.algorithms.shared.rewards import (
    FREE,
    PenaltyConfig,
    TeamReward,
    agent_returns,
    deferred_rewards,
    step_rewards,
    turn_rewards,
)
from kapelle.algorithms.shared.surrogate import SurrogateConfig, ValueLossConfig
from kapelle.algorithms.shared.umad import UMADConfig
from kapelle.algorithms.signals.critic_values import CriticValues
from kapelle.algorithms.signals.proximal import ProximalLogProbs
from kapelle.algorithms.signals.reference import ReferenceLogProbs, refreshed
from kapelle.errors import ConfigError
from kapelle.rows import Signal, Signals, TurnKey
from kapelle.settings.base import Settings
from kapelle.team import Team
from kapelle.types import Group


class ActorCritic(Settings):
    """Settings that all algorithms with a critic have in common. Each algorithm adds its name and further settings."""

    group_size: int = Field(default=1, ge=1)
    """The number of episodes per task; 1 is enough for an algorithm with a critic."""
    team_reward: TeamReward = "mean"
    penalties: PenaltyConfig = FREE
    gae: GAEConfig = GAEConfig()
    loss: SurrogateConfig = SurrogateConfig()
    value_loss: ValueLossConfig = ValueLossConfig()
    reference_every: int = Field(default=0, ge=0)
    """The number of steps between two refreshes of the reference policy. With 0, the reference policy is never refreshed."""
    order: OrderConfig = Joint()
    """The order in which the policies are updated: together, alternating, in random order, or one after another."""
    epochs: int = Field(default=2, ge=1)
    """The number of passes over the samples of each step."""
    minibatches: int = Field(default=1, ge=1)
    """The number of optimiser steps into which each pass over the samples is divided."""
    umad: UMADConfig = UMADConfig()

    @model_validator(mode="after")
    def _confidence_compares(self) -> ActorCritic:
        return self.umad.needs_a_group(self, self.group_size)

    @model_validator(mode="after")
    def _one_advantage_per_action(self) -> ActorCritic:
        if self.loss.level != "token" and self.gae.unit == "token":
            raise ValueError(
                f"`loss.level: {self.loss.level}` has one ratio per completion, but `gae.unit: token` has one advantage per "
                "token; set `gae.unit: turn`, or `loss.level: token`"
            )
        return self

    def rewards(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, float]:
        """Return the reward of every turn on its agent's trajectory, including reward sharing, penalties and influence rewards."""
        own = step_rewards(groups, turn_rewards, self.team_reward, self.penalties)
        return self.umad.with_influence(own, groups, signals)


class PPO(ActorCritic):
    """Settings of PPO for a team with one policy."""

    name: Literal["ppo"] = "ppo"

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return actor_critic_row(self, self.name, "local", checks=(check_one_policy,))


class IPPO(ActorCritic):
    """Settings of IPPO, which is PPO for several agents with one critic per agent."""

    name: Literal["ippo"] = "ippo"

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return actor_critic_row(self, self.name, "local")


def actor_critic_row(
    settings: ActorCritic,
    name: str,
    view: Literal["local", "central"],
    credit: CreditFunction | None = None,
    checks: tuple[Callable[[Team], None], ...] = (),
) -> Algorithm:
    """Return an actor-critic algorithm with PPO's loss and critics with the given view.

    If `credit` is given, it replaces GAE over each agent's own turns.
    """
    s = settings
    credit = credit or GAECredit(s.gae, s.rewards, partial(deferred_rewards, how=s.team_reward))
    critic = CriticSpec(
        view,
        s.value_loss.build(),
        "own" if view == "local" else "shared",
        s.value_loss.coefficient,
        s.gae.unit,
        bootstraps=s.gae.truncated == "bootstrap" and s.gae.gamma_turn > 0,
    )
    needs: list[Signal] = [CriticValues(critic)]
    has_reference = s.loss.kl_coefficient > 0 or s.gae.kl_in_reward > 0
    if has_reference:
        needs.append(ReferenceLogProbs())
    if s.loss.proximal or s.gae.vtrace:
        needs.append(ProximalLogProbs())
    return Algorithm(
        name=name,
        policy_loss=s.loss.build(),
        annealed=s.loss.annealed,
        credit=partial(s.umad.gained_credit, credit),
        data=Data(group_size=s.group_size, observations=s.loss.world_model),
        needs=tuple(needs),
        update=Update(s.epochs, s.minibatches, s.order.build(s.loss.old), s.loss.entropy),
        returns=partial(agent_returns, how=s.team_reward, penalties=s.penalties),
        after_update=refreshed(s.reference_every) if has_reference else (),
        checks=(s.umad.check, *checks, *order_checks(s.order, name)),
    )


def check_one_policy(team: Team) -> None:
    """Raise ConfigError if a team has several policies."""
    if len({policy for name in team.names for policy in team.policies_of(name)}) > 1:
        raise ConfigError(
            "`ppo` trains one policy, but this team has several. Set `algorithm.name: ippo` (one critic per agent) or "
            "`mappo` (one central critic)."
        )
