"""AT-GRPO: comparison sets by agent and turn, and tree sampling that makes them exact (2510.11062).

Without a tree a set holds the same agent's turns of the same number in the episodes of a task, each worth its
return from that turn on. From the second turn on their prompts differ, so they are not quite comparable.

With `tree: true` one episode per task is played, and at every turn of a trained agent `group_size` candidates are
sampled from the same prompt (the paper's K). Its worth is what the agent earns when the episode continues
from it (`tree.py`). The episode continues with the best one (the first of equals), and all of them, the best included,
are trained on in one set. An agent that writes no answer itself, such as the Reasoner of a chain, is thus judged by what
the others achieve with its text.

Deviations from the paper:

- A candidate's worth is a return, sampled by `continuations` episodes. The paper gives each candidate the reward of
  its own turn at once, r = α·r_team + r_local, by rules written for each task and role, which a user's world lacks. An
  immediate reward is part of the return.
- `team_reward` takes the place of α. It says how what the agents earn becomes what one is trained on (`mean` and `sum` are
  the team's alone, `individual` is each agent's own). A world that pays agents α·team + local gives the paper's mix.
- Where agents move at the same moment, a candidate is judged together with the others' first candidates, and each
  agent continues with its own best; the best ones together have not been tried.
- A world uses the episode's seed in every continuation: all candidates get the same cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import BY_SCALE, Earlier, by_agent_turn, compare
from kapelle.algorithms.shared.monte_carlo import spread
from kapelle.algorithms.shared.tree import TreeSampling, alone, best
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group


class ATGRPO(TreeSampling):
    """Settings of agent- and turn-wise GRPO."""

    name: Literal["at_grpo"] = "at_grpo"
    scale: Literal["std", "none"] = "std"
    """`std`: divided by the spread of the candidates; `none`: differences from their mean alone."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        if self.tree:
            return self.tree_row(self.name, BY_SCALE[self.scale], alone, best)
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return credit without a tree: each turn's return-to-go against those of its number and agent."""
        members = by_agent_turn(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(members, BY_SCALE[self.scale], earlier))
