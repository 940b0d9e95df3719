"""MAGRPO: one joint comparison for the whole team (2508.04652).

The G episodes of a task are G joint attempts. In every round the set holds the team's return from that round on, and
all agents that acted in it get the same advantage: (R − mean_g) / (std_g + ε).

Prompts of later rounds differ inside a set (see `groups.py`). With `tree: true` they do not: all G
joint attempts at a moment continue one history (`tree.py`). `joint` defines how attempts are made of the agents'
candidates: `aligned` takes the k-th of each, `cross` every combination, and a candidate is then worth the mean of
those that it is part of. The episode continues with the first candidates, a plain sample of the team's play.

Deviations of the tree from the authors' code (comlrl 1.4.3, `MAGRPOTrainer`): it expands every joint attempt to the
end and trains on all of it, Gᵗ histories at round t; here one history continues, and the others end in `continuations`
plain episodes that are not trained on. The mean over those stands for its mean over a node's children. With `cross`
it sums where this takes the mean, which is G^(n−1) times as much. Its threshold that stops good branches early is not
here. Agents that act one after another branch one after another.

Deviations from the paper: the ratio is clipped; the paper's trainer takes one on-policy step, for which nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import BY_SCALE, Earlier, by_round, compare
from kapelle.algorithms.shared.monte_carlo import spread
from kapelle.algorithms.shared.rewards import chain_rewards
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.algorithms.shared.tree import TreeSampling, aligned, cross, first
from kapelle.rows import Signals, TurnKey
from kapelle.types import Episode, Group


class SummedSurrogate(SurrogateConfig):
    """The clipped surrogate, its log-probs summed over a turn and averaged over turns unless told otherwise."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] | None = "sequence_sum"
    constant: int = Field(default=1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _a_whole_turn_is_a_sum(cls, given: Any) -> Any:
        """With one ratio per turn there is already one loss per turn, and nothing to sum."""
        if isinstance(given, dict) and given.get("level", "token") != "token":
            return {"aggregation": None, **given}
        return given


class MAGRPO(TreeSampling):
    """Settings of multi-agent GRPO."""

    name: Literal["magrpo"] = "magrpo"
    scale: Literal["std", "none"] = "none"
    """`std` divides by the group's spread, as GRPO does; the paper's estimator does not."""
    loss: SummedSurrogate = SummedSurrogate()
    joint: Literal["aligned", "cross"] = "aligned"
    """Which joint attempts a moment of a tree has; only `tree: true` reads it."""

    @model_validator(mode="after")
    def _joint_of_a_tree(self) -> MAGRPO:
        if self.joint == "cross" and not self.tree:
            raise ValueError("`joint: cross` goes with `tree: true`; set both or neither")
        return self

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        if self.tree:
            judged_by = {"aligned": aligned, "cross": cross}[self.joint]
            return self.tree_row(self.name, BY_SCALE[self.scale], judged_by, first, self.earned_together)
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return credit without a tree: the team's return from each round on, against those of the other episodes."""
        members = by_round(groups, self.joint_rewards(groups, signals))
        return spread(self, groups, compare(members, BY_SCALE[self.scale], earlier))

    def earned_together(self, episode: Episode) -> Mapping[str, float]:
        """Return what the team earned, once, as every agent's return."""
        total = sum(chain_rewards(episode, self.team_reward, self.forms).values())
        return dict.fromkeys(episode.agents, total)
