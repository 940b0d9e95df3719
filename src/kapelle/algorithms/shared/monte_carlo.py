"""What all algorithms without a critic share: their settings, and the row that they build.

Each compares returns in its own way. Reward sharing, penalties, the handling of truncated turns, the loss and the
order of updates are the same for all, and are here.
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
from kapelle.types import Group


class Judge(Protocol):
    """Gives credit by comparing returns with one another, and with earlier ones where one is alone in its set."""

    def __call__(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return credit for every turn that is trained on, and take its returns in among the earlier ones."""
        ...


class MonteCarlo(Settings):
    """Settings of an algorithm that judges by returns alone."""

    group_size: int = Field(default=8, ge=2)
    """Episodes per task; a group of one has nothing to compare with."""
    team_reward: TeamReward = "mean"
    penalties: PenaltyConfig = FREE
    truncated: Truncated = "keep"
    truncation_penalty: float = Field(default=0.0, ge=0.0)
    """Subtracted from the reward of a turn cut short, with `truncated: penalise`."""
    loss: SurrogateConfig = SurrogateConfig()
    reference_every: int = Field(default=0, ge=0)
    """Steps between refreshes of the reference policy; 0 never refreshes it. Read only where a KL
    coefficient is above 0."""
    order: OrderConfig = Joint()
    """Whether policies are updated together, in turn, by chance, or one after another."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps into which each pass is divided."""
    umad: UMADConfig = UMADConfig()

    @model_validator(mode="after")
    def _confidence_compares(self) -> MonteCarlo:
        return self.umad.needs_a_group(self, self.group_size)

    @model_validator(mode="after")
    def _penalty_with_its_mode(self) -> MonteCarlo:
        if (self.truncation_penalty > 0) != (self.truncated == "penalise"):
            raise ValueError("`truncation_penalty` goes with `truncated: penalise`; set both or neither")
        return self

    @property
    def forms(self) -> PenaltyConfig:
        """The penalties, that of truncation among them."""
        return self.penalties.model_copy(update={"no_stop": self.penalties.no_stop + self.truncation_penalty})

    def rewards(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, float]:
        """Return the reward of every turn on its agent's own path, after sharing, penalties and influence."""
        own = step_rewards(groups, turn_rewards, self.team_reward, self.forms)
        return self.umad.with_influence(own, groups, signals) if self.umad.influence else own

    def joint_rewards(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, float]:
        """Return the same with the team's reward placed once for all agents, round by round."""
        joint = step_rewards(groups, round_rewards, self.team_reward, self.forms)
        return self.umad.with_influence(joint, groups, signals) if self.umad.influence else joint

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
        """Return the row; `reference` adds a reference policy, `needs` further signals.

        Credit is given by `credit`, by a `memory`, or by a `judge`, whose earlier returns are then the memory: `credit` is
        the judge without any.
        """
        if judge is not None:
            check_parameters(f"Algorithm '{name}': `credit`", judge, "groups", "signals", "earlier")
            credit = partial(judge, earlier=None)
            memory = lambda team, seed: ComparedWithEarlier(judge, self.umad)  # noqa: E731
        order = self.order.build(self.loss.old)
        held = reference or self.loss.kl_coefficient > 0
        signals: tuple[Signal, ...] = (ReferenceLogProbs(),) if held else ()
        if self.loss.proximal:
            signals = (*signals, ProximalLogProbs())
        return Algorithm(
            name=name,
            policy_loss=self.loss.build(),
            annealed=self.loss.annealed,
            credit=None if credit is None else self.umad.gained(credit),
            data=Data(group_size=self.group_size, redraw=redraw),
            needs=(*signals, *needs),
            update=Update(self.epochs, self.minibatches, order, self.loss.entropy),
            memory=memory,
            returns=partial(agent_returns, how=self.team_reward, penalties=self.forms),
            after_update=refreshed(self.reference_every) if held else (),
            checks=(*checks, *order_checks(self.order, name), self.umad.check),
        )


def spread(
    settings: MonteCarlo, groups: Sequence[Group], advantage: Mapping[TurnKey, float]
) -> dict[TurnKey, Credit]:
    """Return credit that gives every token of a turn the turn's advantage; a turn without one, or masked, has weight 0."""
    credit: dict[TurnKey, Credit] = {}
    for key, turn in turns_of(groups):
        masked = settings.truncated == "mask" and turn.finish_reason == "length"
        advantage_T = torch.full((len(turn.completion_ids),), advantage.get(key, 0.0), dtype=torch.float64)
        # A number beyond float32 becomes infinity here, which the update refuses.
        credit[key] = Credit(advantage_T.float(), weight=float(key in advantage and not masked))
    return credit


class ComparedWithEarlier:
    """A judge with the earlier returns that it compares with; a `CreditMemory`."""

    def __init__(self, judge: Judge, umad: UMADConfig) -> None:
        """Start without earlier returns."""
        self._judge, self._umad = judge, umad
        self._earlier = Earlier()

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return the judge's credit, with UMAD's gains."""
        return self._umad.gain(groups, self._judge(groups, signals, self._earlier))

    def metrics(self) -> Mapping[str, float]:
        """Return none: earlier returns show in the metrics of their own steps."""
        return {}

    def state(self) -> dict[str, object]:
        """Return the earlier returns' means and variances."""
        return {"earlier": self._earlier.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._earlier.load_state(state["earlier"])
