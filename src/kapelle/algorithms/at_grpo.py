"""AT-GRPO: comparison sets by agent and turn, and tree sampling that makes them exact (2510.11062).

Without a tree a set holds the same agent's turns of the same number in the episodes of a task, each worth its
return from that turn on. From the second turn on their prompts differ, so they are not quite comparable.

With `tree: true` one episode per task is played, and at every turn of a trained agent `group_size` candidates are
sampled from the very same prompt. Each is worth what its text would score as this agent's answer; the best goes on
(the first of equals), and all of them, the best too, are trained on in one set. It needs a world that can score a
text at any time; others are refused before a model loads.

Deviations from the paper: a candidate's worth is its own score alone; the paper adds a team reward of the joint
state with a weight α, which is the same for every candidate of a turn until the others have answered it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from kapelle.algorithm import Algorithm, Credit, Estimates, TurnKey, turns_of
from kapelle.algorithms.groups import Member, by_agent_turn, compare
from kapelle.algorithms.monte_carlo import MonteCarlo, SetCredit, spread
from kapelle.functional.advantages import group_centred, group_scaled
from kapelle.types import Group


class ATGRPO(MonteCarlo):
    """Settings of agent- and turn-wise GRPO."""

    name: Literal["at_grpo"] = "at_grpo"
    tree: bool = False
    """Branch at every turn instead of playing whole episodes side by side."""
    scale: Literal["std", "none"] = "std"

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        if not self.tree:
            estimate = {"std": group_scaled, "none": group_centred}[self.scale]
            return self.row(self.name, SetCredit(self, by_agent_turn, estimate))
        row = self.row(self.name, self.tree_credit, branches=self.group_size)
        return replace(row, group_size=1)

    def tree_credit(self, groups: Sequence[Group], estimates: Estimates) -> Mapping[TurnKey, Credit]:
        """Return each candidate's advantage among those of its prompt."""
        members = []
        for key, turn in turns_of(groups):
            assert turn.score is not None, "a tree's candidates are scored when they are sampled"
            root = key.turn if turn.parent is None else turn.parent
            worth = turn.score + self.forms.of(turn)
            members.append(Member((key.group, key.episode, root), worth, len(turn.completion_ids), (key,)))
        estimate = {"std": group_scaled, "none": group_centred}[self.scale]
        return spread(self, groups, compare(members, estimate))
