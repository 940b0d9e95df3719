"""The common settings of all algorithms without a critic, and the common part of their `Algorithm`.

Each algorithm compares returns in its own way. Reward sharing, penalties, truncated turns, the loss and the order of updates
are the same for all of them and are defined in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Credit, CreditFunction, CreditMemory, Data, Update
from kapelle.algorithms.shared.groups import Earlier
from kapelle.algorithms.shared.orders import Joint, OrderConfig, order_checks
from kapelle.algorithms.shared.rewards import (
    FREE,
    PenaltyConfig,
    TeamReward,
    Truncated,
    agent_returns,
    round_rewards,
    step_rewards,
    turn_rewards,
)
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.algorithms.shared.umad import UMADConfig
from kapelle.algorithms.signals.proximal import ProximalLogProbs
from kapelle.algorithms.signals.reference import ReferenceLogProbs, refreshed
from kapelle.rows import Signal, Signals, TurnKey, turns_of
from kapelle.runtime.foreign_code import check_parameters
from kapelle.runtime.on_demand import torch
from kapelle.settings.base import Settings
from kapelle.team import Team
from kapelle.types import Episode, Group


class Judge(Protocol):
    """A function that computes credit by comparing returns: within a set, or with returns of earlier steps if the set has one member."""

    def __call__(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return credit for every trained turn, and add the returns of the step to the earlier returns."""
        ...


class MonteCarlo(Settings):
    """Settings of an algorithm that computes advantages from returns, without a critic."""

    group_size: int = Field(default=8, ge=2)
    """The number of episodes per task. At least two episodes are needed, because episodes of one task are compared with one
    another."""
    team_reward: TeamReward = "mean"
    penalties: PenaltyConfig = FREE
    truncated: Truncated = "keep"
    truncation_penalty: float = Field(default=0.0, ge=0.0)
    """The penalty of a turn that reached its token limit. This setting is used only with `truncated: penalise`."""
    loss: SurrogateConfig = SurrogateConfig()
    reference_every: int = Field(default=0, ge=0)
    """The number of steps between two refreshes of the reference policy. With 0, the reference policy is never refreshed. The
    reference policy is used if a KL coefficient is above 0."""
    order: OrderConfig = Joint()
    """The order in which the policies are updated: together, alternating, in random order, or one after another."""
    epochs: int = Field(default=1, ge=1)
    """The number of passes over the samples of each step."""
    minibatches: int = Field(default=1, ge=1)
    """The number of optimiser steps into which each pass over the samples is divided."""
    umad: UMADConfig = UMADConfig()

    @model_validator(mode="after")
    def _confidence_compares(self) -> MonteCarlo:
        return self.umad.needs_a_group(self, self.group_size)

    @model_validator(mode="after")
    def _penalty_with_its_mode(self) -> MonteCarlo:
        if (self.truncation_penalty > 0) != (self.truncated == "penalise"):
            raise ValueError(
                "`truncation_penalty` and `truncated: penalise` need each other; set both or neither"
            )
        return self

    @property
    def forms(self) -> PenaltyConfig:
        """The penalties, including the truncation penalty."""
        if not self.truncation_penalty:
            return self.penalties
        return self.penalties.model_copy(update={"no_stop": self.penalties.no_stop + self.truncation_penalty})

    def returns(self, episode: Episode) -> Mapping[str, float]:
        """Return the return of each agent, including reward sharing and penalties."""
        return agent_returns(episode, self.team_reward, self.forms)

    def rewards(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, float]:
        """Return the reward of every turn on its agent's trajectory, including reward sharing, penalties and influence rewards."""
        own = step_rewards(groups, turn_rewards, self.team_reward, self.forms)
        return self.umad.with_influence(own, groups, signals)

    def joint_rewards(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, float]:
        """Return the reward of every turn as `rewards` does, but with the team's reward placed once per round for all agents."""
        joint = step_rewards(groups, round_rewards, self.team_reward, self.forms)
        return self.umad.with_influence(joint, groups, signals)

    def row(
        self,
        name: str,
        credit: CreditFunction | None = None,
        checks: tuple[Callable[[Team], None], ...] = (),
        *,
        judge: Judge | None = None,
        reference: bool = False,
        needs: tuple[Signal, ...] = (),
        memory: Callable[[Team, int], CreditMemory] | None = None,
        redraw: int = 0,
    ) -> Algorithm:
        """Return the algorithm that these settings describe.

        The credit is defined by one of three arguments, which are `credit` (a pure function), `memory` (an object with state
        between steps), or `judge` (a function that also reads the returns of earlier steps). The argument `reference` adds a
        reference policy, and `needs` adds signals.
        """
        if judge is not None:
            check_parameters(f"Algorithm '{name}': `credit`", judge, "groups", "signals", "earlier")
            credit = partial(judge, earlier=None)
            memory = partial(_remember_returns, judge, self.umad)
        if credit is not None:
            credit = partial(self.umad.gained_credit, credit)
        has_reference = reference or self.loss.kl_coefficient > 0
        signals: list[Signal] = []
        if has_reference:
            signals.append(ReferenceLogProbs())
        if self.loss.proximal:
            signals.append(ProximalLogProbs())
        return Algorithm(
            name=name,
            policy_loss=self.loss.build(),
            annealed=self.loss.annealed,
            credit=credit,
            data=Data(group_size=self.group_size, redraw=redraw, observations=self.loss.world_model),
            needs=(*signals, *needs),
            update=Update(self.epochs, self.minibatches, self.order.build(self.loss.old), self.loss.entropy),
            memory=memory,
            returns=self.returns,
            after_update=refreshed(self.reference_every) if has_reference else (),
            checks=(*checks, *order_checks(self.order, name), self.umad.check),
        )


def spread(
    settings: MonteCarlo, groups: Sequence[Group], advantage: Mapping[TurnKey, float]
) -> dict[TurnKey, Credit]:
    """Return credit in which every token of a turn has the advantage of the turn.

    A turn has weight 0 if it has no advantage, or if it reached its token limit and `truncated: mask` is set.
    """
    credit: dict[TurnKey, Credit] = {}
    for key, turn in turns_of(groups):
        masked = settings.truncated == "mask" and turn.finish_reason == "length"
        advantage_T = torch.full((len(turn.completion_ids),), advantage.get(key, 0.0), dtype=torch.float64)
        # A number beyond the range of float32 becomes infinite here; the update then raises NumericsError.
        credit[key] = Credit(advantage_T.float(), weight=float(key in advantage and not masked))
    return credit


class ComparedWithEarlier(CreditMemory):
    """A `CreditMemory` that stores the returns of earlier steps for a `Judge`."""

    def __init__(self, judge: Judge, umad: UMADConfig) -> None:
        """Create a memory without earlier returns."""
        self.judge = judge
        self._umad = umad
        self._earlier = Earlier()

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return the credit that the judge computes, multiplied by UMAD's confidence factors."""
        return self._umad.gain(groups, self.judge(groups, signals, self._earlier))

    def state(self) -> dict[str, object]:
        """Return the running means and variances of earlier returns."""
        return {"earlier": self._earlier.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that a call of `state` returned."""
        self._earlier.load_state(state["earlier"])


def _remember_returns(judge: Judge, umad: UMADConfig, team: Team, seed: int) -> CreditMemory:
    return ComparedWithEarlier(judge, umad)
