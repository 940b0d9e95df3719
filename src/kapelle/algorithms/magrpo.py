"""MAGRPO: one joint comparison for the whole team (2508.04652).

    A = R_k − mean_g R_k    (with `scale: std`, divided by std_g + ε)

The G episodes of a task are G joint samples. In round k, the set holds the team's return R_k from that round on. All agents
that acted in the round get the same advantage.

Prompts of later rounds differ inside a set (see `groups.py`). With `tree: true` they are equal: all G joint samples at a
moment continue one history (`tree.py`). `joint` defines how joint samples are formed from the agents' candidates: `aligned`
takes the k-th candidate of each agent. `cross` takes every combination; a candidate's value is then the mean over those
that contain it. The episode continues with the first candidates, which are an ordinary sample from the team's policies.

Deviations of the tree from the authors' code (comlrl 1.4.3, `MAGRPOTrainer`):

- The code expands every joint sample to the end and trains on all of them, which gives Gᵗ histories at round t. Here one
  history continues, and the other joint samples are completed by `continuations` ordinary episodes, which are not trained
  on. Their mean replaces the code's mean over a node's children.
- With `cross` the code takes a sum where this module takes the mean; the two differ by a factor of G^(n−1).
- The code's threshold that stops good branches early is omitted.
- Agents that act one after another branch one after another.

Deviations from the paper:

- The ratio is clipped. The paper's trainer takes one on-policy step, for which clipping has no effect.
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
    """Settings of the clipped surrogate, by default summed over a turn's tokens and averaged over turns."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] | None = "sequence_sum"
    constant: int = Field(default=1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _a_whole_turn_is_a_sum(cls, given: Any) -> Any:
        """Do not sum with one ratio per turn, because there is already one loss per turn."""
        if isinstance(given, dict) and given.get("level", "token") != "token":
            return {"aggregation": None, **given}
        return given


class MAGRPO(TreeSampling):
    """Settings of multi-agent GRPO."""

    name: Literal["magrpo"] = "magrpo"
    scale: Literal["std", "none"] = "none"
    """`std` divides by the standard deviation, as GRPO does; `none` does not, as in the paper."""
    loss: SummedSurrogate = SummedSurrogate()
    joint: Literal["aligned", "cross"] = "aligned"
    """Joint samples at a moment of a tree; used with `tree: true`."""

    @model_validator(mode="after")
    def _joint_of_a_tree(self) -> MAGRPO:
        if self.joint == "cross" and not self.tree:
            raise ValueError("`joint: cross` needs `tree: true`; set both or neither")
        return self

    def build(self) -> Algorithm:
        """Return the algorithm."""
        if self.tree:
            judged_by = {"aligned": aligned, "cross": cross}[self.joint]
            return self.tree_row(self.name, BY_SCALE[self.scale], judged_by, first, self.earned_together)
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return credit without a tree: the team's return from each round on, compared with that of the other episodes."""
        members = by_round(groups, self.joint_rewards(groups, signals))
        return spread(self, groups, compare(members, BY_SCALE[self.scale], earlier))

    def earned_together(self, episode: Episode) -> Mapping[str, float]:
        """Return the team's return for each agent; it is counted once and is the same for every agent."""
        total = sum(chain_rewards(episode, self.team_reward, self.forms).values())
        return dict.fromkeys(episode.agents, total)
