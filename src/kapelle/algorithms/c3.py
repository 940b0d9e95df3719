"""C3: episodes are sampled as a nested tree, in which every node is trained on and compared with its siblings (arXiv:2603.06859).

With `widths: [w₁, w₂, …]`, the first moment of a task is sampled w₁ times, the second moment after each of these samples w₂
times, and so on. A group has w₁·w₂·… episodes, which share their turns up to the moment at which they branch. A moment is a
point of an episode at which one trained agent moves, or several trained agents move at once. Turns of frozen agents do not
branch. Let W be the mean return of the episodes under a node. The advantage of the node is

    A = W − mean W of its siblings

Siblings have the same prompt. At a moment beyond the last width, or of width 1, nothing branches; a turn is then compared at
the deepest earlier moment that branches. Every sampled turn is trained on once.

A node at depth d is one of w₁·…·w_d nodes of its depth. The advantage of a node is therefore weighted by the number of
episodes under the node, divided by the mean of that number over the turns of the same policy. The expected update is then a
multiple of ∇J (`tests/algorithms/test_expected_replays.py`). If all agents share one policy, early and late turns have the
same weights as in independent episodes.

Shared tokens are sampled and counted once: with two turns of equal length per episode, 4 × 3 episodes cost 16 turns,
whereas 12 GRPO episodes cost 24.

With `replay: false` (the paper's ablation), episodes share no turns. Each episode is compared with all other episodes of its
group, as in RLOO.

The authors' code has two more variants, which the setting `variant` selects by the authors' names. Q is the value of a
central critic after a turn; the critic is fitted to W.

    reward_only     A = W − mean W of the siblings
    value_assisted  A = W − (1 − α) · mean W of the siblings − α · mean Q of the siblings
    value_only      A = Q − mean Q of the siblings

The completions of siblings are independent of the turn's own completion, so `value_assisted` is unbiased with any critic.
`value_only` is unbiased if the critic is correct.

Deviations from the paper:

- Each agent has its own return (`team_reward`); the paper uses the team's outcome alone.
- `reward_only` is the default; the authors' code defaults to `value_assisted` with α = 1.
- The critic also reads prompts, and is trained on each node once.
- The loss is the clipped surrogate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import LEAVE_ONE_OUT, Earlier, by_agent, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.shared.surrogate import ValueLossConfig
from kapelle.algorithms.signals.critic_values import CriticValues
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.types import Episode, Group


class C3(MonteCarlo):
    """Settings of C3, which samples episodes as a nested tree."""

    name: Literal["c3"] = "c3"
    widths: tuple[int, ...] = Field(default=(4, 3), min_length=1)
    """The number of samples at each depth of the tree: at the first moment, then at the second moment after each of these
    samples, and so on."""
    group_size: int = Field(default=12, ge=2)
    """The number of episodes per task, which is the product of `widths`. If `group_size` is set and `widths` is not,
    `group_size` is split into two widths that are as equal as possible: 8 becomes 4 × 2."""
    replay: bool = True
    """Whether episodes share their turns up to the point at which they branch. With false, whole episodes are compared."""
    variant: Literal["reward_only", "value_assisted", "value_only"] = "reward_only"
    """The form of the advantage: returns only, returns with a critic's values of the siblings in the baseline, or the
    critic's values only."""
    alpha: float = Field(default=1.0, ge=0.0, le=1.0)
    """α, the weight of the critic's values in the baseline. This setting is used only with `variant: value_assisted`."""
    value_loss: ValueLossConfig = ValueLossConfig()

    @model_validator(mode="before")
    @classmethod
    def _product(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("widths", ()), list | tuple):
            return given
        count = given.get("group_size")
        if "widths" not in given and type(count) is int and count >= 2:
            second = max(width for width in range(1, math.isqrt(count) + 1) if count % width == 0)
            return {**given, "widths": (count // second, second) if second > 1 else (count,)}
        widths = given.get("widths", (4, 3))
        if not all(type(width) is int and width >= 1 for width in widths):
            raise ValueError(f"`widths` is {list(widths)!r}; use whole numbers of at least 1")
        return {"group_size": math.prod(widths), **given}

    @model_validator(mode="after")
    def _leaves(self) -> C3:
        if self.group_size != math.prod(self.widths):
            raise ValueError(
                f"`group_size` is {self.group_size}, but the product of `widths` is {math.prod(self.widths)}; remove `group_size`"
            )
        if self.order.build().sequential:
            raise ValueError(
                "`order: sequential` multiplies ratios over the rounds of one episode, which `c3` does not support; set "
                "`order: joint`"
            )
        if self.umad.active:
            raise ValueError(
                "`umad` compares whole episodes, but a tree compares turns with the same prompt; remove `umad`"
            )
        if self.variant != "reward_only" and not self.replay:
            raise ValueError(
                f"`variant: {self.variant}` compares sibling turns, which `replay: false` does not sample; remove one of the two"
            )
        if self.alpha != 1.0 and self.variant != "value_assisted":
            raise ValueError("`alpha` needs `variant: value_assisted`; set both or neither")
        return self

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        needs = () if self.variant == "reward_only" else (CriticValues(self.value_loss.q_critic()),)
        row = self.row(self.name, judge=self.credit, needs=needs)
        return replace(row, data=replace(row.data, widths=self.widths if self.replay else ()))

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return, for each sampled turn, W minus the mean W of its siblings, weighted by the number of episodes that share the turn."""
        if not self.replay:
            members = by_agent(groups, self.rewards(groups, signals))
            return spread(self, groups, compare(members, LEAVE_ONE_OUT, earlier))
        value: dict[TurnKey, float] = {}
        difference: dict[TurnKey, float] = {}
        leaves_of: dict[str, dict[TurnKey, int]] = {}
        for g, group in enumerate(groups):
            for node in nodes(g, group, self.widths, self.returns):
                turn = group.episodes[node.key.episode].turns[node.key.turn]
                value[node.key] = node.worth
                if node.siblings:
                    difference[node.key] = self._difference(node, signals)
                    leaves_of.setdefault(turn.policy, {})[node.key] = node.leaves
        advantage: dict[TurnKey, float] = {}
        for own in leaves_of.values():
            mean = fmean(own.values())
            advantage |= {key: difference[key] * leaves / mean for key, leaves in own.items()}
        credit = spread(self, groups, advantage)
        if self.variant == "reward_only":
            return credit
        return {
            key: replace(given, return_T=torch.tensor([value[key]])) if key in value else given
            for key, given in credit.items()
        }

    def _difference(self, node: TreeTurn, signals: Signals) -> float:
        """Return the advantage of a turn over its siblings, before weighting."""
        worths = fmean(sibling.worth for sibling in node.siblings)
        if self.variant == "reward_only":
            return node.worth - worths
        values = fmean(fmean(float(signals.values[key]) for key in sibling.keys) for sibling in node.siblings)
        if self.variant == "value_only":
            return float(signals.values[node.key]) - values
        return node.worth - (1.0 - self.alpha) * worths - self.alpha * values


class Sibling(NamedTuple):
    """A sibling of a turn: another branch at the moment at which the turn is compared."""

    worth: float
    """The mean return of the episodes of this branch."""
    keys: tuple[TurnKey, ...]
    """The keys of the agent's turn at that moment, or of all turns of the moment if only other agents move."""


class TreeTurn(NamedTuple):
    """A trained turn of the tree, with the mean return of its episodes and its siblings."""

    key: TurnKey
    worth: float
    """The mean return of the episodes that share this turn."""
    siblings: tuple[Sibling, ...]
    """The siblings of the turn. The tuple is empty if no moment up to and including the turn's moment branches, or if the
    other branches failed."""
    leaves: int
    """The number of episodes that share this turn, including failed episodes."""


def nodes(
    g: int, group: Group, widths: Sequence[int], returns: Callable[[Episode], Mapping[str, float]]
) -> list[TreeTurn]:
    """Return the trained turns of a group, each once.

    A turn that several episodes share is taken from the first of these episodes that did not fail.
    """
    returns_of = {e: returns(episode) for e, episode in enumerate(group.episodes) if episode.error is None}
    moments = {e: _moments(group.episodes[e]) for e in returns_of}
    # Number of episodes that share the first `depth` moments.
    under = [math.prod(widths[depth:]) for depth in range(len(widths) + 1)]
    found: list[TreeTurn] = []
    for e in returns_of:
        depth_of = {seen: k + 1 for k, seen in enumerate(moments[e])}
        for turn in group.episodes[e].turns:
            if not turn.trained:
                continue
            depth = min(depth_of[turn.completed_before], len(widths))
            first = e - e % under[depth]
            if any(other in returns_of for other in range(first, e)):
                continue  # an earlier episode has this turn
            # The deepest moment up to this one that branches.
            branched = next((k for k in range(depth, 0, -1) if widths[k - 1] > 1), 0)
            siblings = []
            for start in _siblings(e, under, branched):
                leaves = _leaves(returns_of, turn.agent, start, under[branched])
                if leaves:
                    seen = moments[leaves[0]][branched - 1]
                    episode = group.episodes[leaves[0]]
                    there = [
                        other for other in episode.turns if other.trained and other.completed_before == seen
                    ]
                    own = [other for other in there if other.agent == turn.agent] or there
                    worth = fmean(returns_of[leaf][turn.agent] for leaf in leaves)
                    keys = tuple(TurnKey(g, leaves[0], other.index) for other in own)
                    siblings.append(Sibling(worth, keys))
            leaves = _leaves(returns_of, turn.agent, first, under[depth])
            worth = fmean(returns_of[leaf][turn.agent] for leaf in leaves)
            found.append(TreeTurn(TurnKey(g, e, turn.index), worth, tuple(siblings), under[depth]))
    return found


def _leaves(returns: Mapping[int, Mapping[str, float]], agent: str, start: int, count: int) -> list[int]:
    """Return the indices of the valid episodes of a branch in which the agent has a return."""
    return [leaf for leaf in range(start, start + count) if agent in returns.get(leaf, {})]


def _moments(episode: Episode) -> list[int]:
    return sorted({turn.completed_before for turn in episode.turns if turn.trained})


def _siblings(e: int, under: Sequence[int], branched: int) -> list[int]:
    """Return the index of the first episode of every other branch at the moment `branched`."""
    if not branched:
        return []
    size, total = under[branched], under[branched - 1]
    start, own = e - e % total, e - e % size
    return [first for first in range(start, start + total, size) if first != own]
