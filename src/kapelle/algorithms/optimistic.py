"""Optimistic group credit: the value of an action is its mean return over the best episodes in which the action was chosen.

    Q(a) = mean of the best `best_share` of the returns after a,    A = (Q(a) − mean Q) / (std Q + ε)

If agents must change together, an agent that changes first is penalised for what its partners have not learned yet. In the
climbing game, the optimum is next to a loss of 30, and mean returns lead all agents to the safe action. In optimistic group
credit, the episodes of a group in which an agent gave the same completion to the same prompt are pooled as one action. The
value of the action is the mean of the best returns of these episodes (the share `best_share`), which shows what the action
can achieve with cooperating partners. Values are compared over the episodes of the task, per agent and turn number.

The idea is known as lenient learning (Panait, Sullivan and Luke, AAMAS 2006). In the limit of a `best_share` of 0, it is the
optimistic assumption of distributed Q-learning (Lauer and Riedmiller, ICML 2000). These methods keep a table of actions over
time; in this implementation, all returns come from one group.

With `best_share: 1` and `scale: none`, the mean of an action's returns replaces its single returns. The expected update is
then that of AT-GRPO, which is a multiple of ∇J. With `best_share` below 1, the objective differs from J: luck is mistaken for
the skill of partners, and risky actions are overrated if rewards are stochastic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import BY_SCALE, Earlier, Member, by_agent_turn, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group


class Optimistic(MonteCarlo):
    """Settings of optimistic group credit."""

    name: Literal["optimistic"] = "optimistic"
    scale: Literal["std", "none"] = "std"
    """How advantages are scaled: `std` divides the differences from the mean by the standard deviation, and `none` does not
    scale them."""
    best_share: float = Field(default=0.1, gt=0.0, le=1.0)
    """The share of the best returns of an action whose mean is the value of the action. The number of returns is rounded up,
    so it is at least 1."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return, for each turn, the value of its action, compared with the values for the same task, agent and turn number."""
        members = by_agent_turn(groups, self.rewards(groups, signals))
        actions = [self._action(groups, member) for member in members]
        returns: dict[object, list[float]] = {}
        for action, member in zip(actions, members, strict=True):
            returns.setdefault(action, []).append(member.value)
        value: dict[object, float] = {}
        for action, own in returns.items():
            # In floating point 0.28 · 25 is slightly above 7.
            best = sorted(own, reverse=True)[: math.ceil(self.best_share * len(own) - 1e-9)]
            value[action] = math.fsum(best) / len(best)
        members = [
            member._replace(value=value[action]) for action, member in zip(actions, members, strict=True)
        ]
        return spread(self, groups, compare(members, BY_SCALE[self.scale], earlier))

    @staticmethod
    def _action(groups: Sequence[Group], member: Member) -> object:
        """Return the key of a turn's action: the comparison set, the prompt and the completion."""
        (key,) = member.keys
        turn = groups[key.group].episodes[key.episode].turns[key.turn]
        return member.place, turn.prompt_ids, turn.images, turn.completion_ids
