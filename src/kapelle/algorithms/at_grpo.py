"""AT-GRPO: comparison sets by agent and turn, and tree sampling that makes them exact (2510.11062).

Without a tree a set holds the same agent's turns of the same number in the episodes of a task, each worth its
return from that turn on. From the second turn on their prompts differ, so they are not quite comparable.

With `tree: true` one episode per task is played, and at every turn of a trained agent `group_size` candidates are
sampled from the same prompt (the paper's K). Its worth is what the agent earns when the episode continues
from it (`tree.py`). The episode continues with the best one (the first of equals), and all of them, the best included,
are trained on in one set. So an agent whose text is no answer, such as the Reasoner of a chain, is judged by what the
others achieve with it.

Deviations from the paper:

- A candidate's worth is a return, sampled by `continuations` episodes. The paper gives each candidate the reward of
  its own turn at once, r = α·r_team + r_local, with rules made for each task and role; worlds of users have no
  such rules. An immediate reward is part of the return.
- α is not a setting: `team_reward` says how what the agents earn becomes what one is trained on (`mean` and `sum` are
  the team's alone, `individual` is each agent's own). A world that pays agents α·team + local gives the paper's mix.
- Where agents move at the same moment, a candidate is judged together with the others' first candidates, and each
  agent continues with its own best; the best ones together have not been tried.
- A world uses the episode's seed in every continuation: all candidates get the same cards.
"""

from __future__ import annotations

from typing import Literal

from kapelle.algorithm import Algorithm
from kapelle.algorithms.shared.groups import BY_SCALE, by_agent_turn
from kapelle.algorithms.shared.monte_carlo import over_sets
from kapelle.algorithms.shared.tree import TreeSampling, alone, best


class ATGRPO(TreeSampling):
    """Settings of agent- and turn-wise GRPO."""

    name: Literal["at_grpo"] = "at_grpo"
    scale: Literal["std", "none"] = "std"
    """`std`: divided by the spread of the candidates; `none`: differences from their mean alone."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        how = BY_SCALE[self.scale]
        if self.tree:
            return self.tree_row(self.name, how, alone, best)
        return self.row(self.name, judge=over_sets(self, by_agent_turn, how))
