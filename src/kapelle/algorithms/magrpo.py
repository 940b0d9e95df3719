"""MAGRPO: one joint comparison for the whole team (arXiv:2508.04652).

    A = R_k − mean_g R_k    (with `scale: std`, divided by std_g + ε)

The G episodes of a task are G joint samples. The comparison set of round k holds the team's returns R_k from that round on.
All agents that act in a round have the same advantage.

In later rounds, the prompts in a comparison set differ (see `groups.py`). With `tree: true` the prompts are equal, because
all G joint samples at a moment continue one history (`tree.py`). The setting `joint` defines how joint samples are formed
from the agents' candidates. `joint: aligned` combines the k-th candidates of all agents. `joint: cross` uses every
combination; the value of a candidate is then the mean over the combinations that contain the candidate. The episode continues
with the first candidate of each agent; together they are an ordinary sample from the team's policies.

Deviations of the tree from the authors' code (comlrl 1.4.3, `MAGRPOTrainer`):

- The code expands every joint sample to the end and trains on all of them, which gives Gᵗ histories at round t. In this
  implementation, one history continues, and the other joint samples are completed by `continuations` ordinary episodes, which
  are not trained on. The mean return of these episodes replaces the mean over a node's children.
- With `joint: cross`, the authors' code computes a sum over combinations and this module computes the mean; the two differ by
  a factor of G^(n−1).
- The threshold at which the authors' code stops good branches early is omitted.
- If agents act one after another, the tree branches at each agent in turn.

Deviations from the paper:

- The probability ratio is clipped. The paper's trainer takes one on-policy step, for which clipping has no effect.
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
    """Settings of the clipped surrogate. By default, the loss is summed over the tokens of a turn and averaged over turns."""

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] | None = "sequence_sum"
    constant: int = Field(default=1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _a_whole_turn_is_a_sum(cls, given: Any) -> Any:
        """Disable the default sum if there is one ratio per turn, because there is then already one loss per turn."""
        if isinstance(given, dict) and given.get("level", "token") != "token":
            return {"aggregation": None, **given}
        return given


class MAGRPO(TreeSampling):
    """Settings of MAGRPO (multi-agent GRPO)."""

    name: Literal["magrpo"] = "magrpo"
    scale: Literal["std", "none"] = "none"
    """How advantages are scaled: `std` divides by the standard deviation as in GRPO, and `none` does not, as in the paper."""
    loss: SummedSurrogate = SummedSurrogate()
    joint: Literal["aligned", "cross"] = "aligned"
    """How joint samples are formed from the agents' candidates at a moment of the tree: the k-th candidates of all agents
    (`aligned`), or every combination (`cross`). This setting is used only with `tree: true`."""

    @model_validator(mode="after")
    def _joint_of_a_tree(self) -> MAGRPO:
        if self.joint == "cross" and not self.tree:
            raise ValueError("`joint: cross` needs `tree: true`; set both or neither")
        return self

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        if self.tree:
            judged_by = {"aligned": aligned, "cross": cross}[self.joint]
            return self.tree_row(self.name, BY_SCALE[self.scale], judged_by, first, self.earned_together)
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the credit without a tree: the team's return from each round on, compared with that of the other episodes."""
        members = by_round(groups, self.joint_rewards(groups, signals))
        return spread(self, groups, compare(members, BY_SCALE[self.scale], earlier))

    def earned_together(self, episode: Episode) -> Mapping[str, float]:
        """Return the team's return for each agent. The team's return is counted once and is the same for every agent."""
        total = sum(chain_rewards(episode, self.team_reward, self.forms).values())
        return dict.fromkeys(episode.agents, total)
