"""Optimistic group credit: an action is worth what it earned in the best attempts in which it was played.

Where agents must change together, an agent that moves first is punished for what its partners have not learned yet: in the climbing
game the optimum lies beside a loss of 30, and the mean return leads everybody to the safe answer. Here the attempts of a
group in which an agent said the same after the same prompt are put together, and that action is worth the mean of the best
`best_share` of their returns: what it can earn with partners who play along. Worths are compared over the task's attempts, by agent and number
of its turn.

Known as lenient learning (Panait, Sullivan and Luke, AAMAS 2006), and for `best_share` → 0 as the optimistic
assumption of distributed Q-learning (Lauer and Riedmiller, ICML 2000); there over the time of a table of actions, here within one group.

With `best_share: 1` and `scale: none` the update is AT-GRPO's, a multiple of ∇J: each action has the mean of its returns in place of single
ones. Below 1 it climbs another objective: luck counts as partners' skill, and a risky action is overrated where rewards are
stochastic.
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
    """`std`: divided by the spread of the worths that are compared; `none`: differences from their mean alone."""
    best_share: float = Field(default=0.1, gt=0.0, le=1.0)
    """Share of an action's attempts, the best ones, whose mean return it is worth; of n at least one, and rounded up."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return each action's worth against the other attempts' at the same task, agent and number of its turn."""
        members = by_agent_turn(groups, self.rewards(groups, signals))
        played: dict[object, list[float]] = {}
        actions = [self._action(groups, member) for member in members]
        for action, member in zip(actions, members, strict=True):
            played.setdefault(action, []).append(member.value)
        worth: dict[object, float] = {}
        for action, values in played.items():
            # 0.28 · 25 is a little above 7 in floating point.
            best = sorted(values, reverse=True)[: math.ceil(self.best_share * len(values) - 1e-9)]
            worth[action] = math.fsum(best) / len(best)
        judged = [
            member._replace(value=worth[action]) for action, member in zip(actions, members, strict=True)
        ]
        return spread(self, groups, compare(judged, BY_SCALE[self.scale], earlier))

    @staticmethod
    def _action(groups: Sequence[Group], member: Member) -> object:
        """Return what makes a turn the same as another's: its set, what the agent read and what it said."""
        (key,) = member.keys
        turn = groups[key.group].episodes[key.episode].turns[key.turn]
        return member.place, turn.prompt_ids, turn.images, turn.completion_ids
