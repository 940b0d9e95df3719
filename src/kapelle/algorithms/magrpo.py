"""MAGRPO: one joint comparison for the whole team (2508.04652).

The G episodes of a task are G joint attempts. In every round the set holds the team's return from that round on, and
all agents that spoke in it get the same advantage: (R − mean_g) / (std_g + ε).

Prompts of later rounds differ inside a set (`groups.py` says what that means). Deviations from the paper: the ratio is
clipped; the paper's trainer takes one on-policy step, for which nothing is clipped.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm
from kapelle.algorithms.groups import by_round
from kapelle.algorithms.monte_carlo import MonteCarlo, SetCredit
from kapelle.algorithms.surrogate import SurrogateConfig
from kapelle.functional.advantages import group_centred, group_scaled


class SummedSurrogate(SurrogateConfig):
    """The clipped surrogate, its log-probs summed over a turn and averaged over turns unless told otherwise."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] | None = "sequence_sum"
    constant: int = Field(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _a_whole_turn_is_a_sum(cls, given: Any) -> Any:
        """With one ratio for a turn there is one loss for it already, and nothing to be summed."""
        if isinstance(given, dict) and given.get("level", "token") != "token":
            return {"aggregation": None, **given}
        return given


class MAGRPO(MonteCarlo):
    """Settings of multi-agent GRPO."""

    name: Literal["magrpo"] = "magrpo"
    scale: Literal["std", "none"] = "none"
    """`std` divides by the group's spread, as GRPO does; the paper's estimator does not."""
    loss: SummedSurrogate = SummedSurrogate()

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        estimate = {"std": group_scaled, "none": group_centred}[self.scale]
        return self.row(self.name, SetCredit(self, by_round, estimate, self.paid_once))
