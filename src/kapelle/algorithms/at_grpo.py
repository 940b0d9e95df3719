"""AT-GRPO: group-relative advantages per agent and turn, with tree sampling that makes the groups exact (arXiv:2510.11062).

    A = (R_t − mean R_t) / (std R_t + ε)

Without a tree, a comparison set contains turns of one agent with the same turn number, one from each episode of a task. R_t
is the return from turn t on. From the second turn on, the prompts in a comparison set differ, so the comparison is
approximate.

With `tree: true`, each task has one episode. At every turn of a trained agent, `group_size` candidates (the paper's K) are
sampled from the same prompt. The value of a candidate is the agent's mean return over episodes that continue from the
candidate (`tree.py`). The episode continues with the best candidate (the first one if several are tied). All candidates are
trained on and form one comparison set. An agent that does not write the answer, such as the Reasoner of a chain, is thus
evaluated by what the other agents achieve with its text.

Deviations from the paper:

- A candidate's value is a return, estimated from `continuations` episodes. The paper uses the reward of the candidate's own
  turn, r = α·r_team + r_local, which it takes from rules per task and role. A user's environment has no such rules. The
  return includes the immediate reward of the turn, if there is one.
- `team_reward` replaces α: it defines how the agents' rewards become each agent's training reward. `mean` and `sum` use only
  the team's reward; `individual` uses each agent's own. An environment whose rewards are α·r_team + r_local reproduces the
  paper's rewards.
- If several agents move at the same moment, a candidate is evaluated together with the other agents' first candidates. Each
  agent continues with its own best candidate; the combination of these best candidates is not evaluated.
- An environment uses the episode's seed in every continuation, so all candidates face the same random events, such as the
  cards dealt.
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
    """Settings of AT-GRPO, which is GRPO with comparison sets per agent and turn."""

    name: Literal["at_grpo"] = "at_grpo"
    scale: Literal["std", "none"] = "std"
    """How advantages are scaled: `std` divides the differences from the mean by the standard deviation, and `none` does not
    scale them."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        if self.tree:
            return self.tree_row(self.name, BY_SCALE[self.scale], alone, best)
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the credit without a tree: the return from each turn on, compared among turns of the same agent and turn number."""
        members = by_agent_turn(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(members, BY_SCALE[self.scale], earlier))
