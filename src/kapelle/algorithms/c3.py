"""C3: a nested tree whose every node is trained on (2603.06859).

With `widths: [w₁, w₂, …]` each first moment of a task is sampled w₁ times, each second moment after it w₂ times, and so on, so that a group has w₁·w₂·…
episodes, which share the turns before they part. A moment is one at which trained agents speak, at once or one alone; frozen agents do not branch. The worth W of a
node is the mean return of the episodes under it, and

    A = W − mean W of its siblings,

which read the same prompt. At moments beyond the last width, and where a width is 1, an agent is compared as the last moment was that branched. Every sampled turn is trained on once.
A node of depth d is w₁·…·w_d times as frequent as a first one, so its advantage is weighed by the number of episodes under it, over the mean of that number among
its policy's turns: with that the expected update is ∇J (`tests/algorithms/test_expected_replays.py`), and one policy for all agents weighs early and late turns as one episode does.

Tokens are sampled and counted once: 4 × 3 episodes of two turns of equal length cost 16 turns, where 12 of GRPO cost 24.

With `replay: false` episodes share nothing (the paper's ablation): each is compared with all others of its group, as RLOO does.

**With a critic.** The authors' code knows two more variants, here under their names. Q is a central critic's value after a turn; it learns W.

    reward_only     A = W − mean W of the siblings
    value_assisted  A = W − (1 − α) · mean W of the siblings − α · mean Q of the siblings
    value_only      A = Q − mean Q of the siblings

Siblings' words do not depend on the turn's own, so that `value_assisted` is unbiased with any critic; `value_only` follows the critic, and is unbiased where that is right.

Deviations from the paper: the return of each agent (`team_reward`) in place of the team's outcome alone; `reward_only` unless set, where the code's default is `value_assisted` with
α = 1; the critic also reads prompts, and learns from each node once; the clipped surrogate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Credit, CriticSpec
from kapelle.algorithms.shared.groups import LEFT_OUT, Earlier, by_agent, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.shared.rewards import agent_returns
from kapelle.algorithms.shared.surrogate import ValueLossConfig
from kapelle.algorithms.signals.critic_values import CriticValues
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.types import Episode, Group


class C3(MonteCarlo):
    """Settings of the nested tree."""

    name: Literal["c3"] = "c3"
    widths: tuple[int, ...] = Field(default=(4, 3), min_length=1)
    """How often the first moment is sampled, the second one after each of those, and so on."""
    group_size: int = Field(default=12, ge=2)
    """The product of `widths`. Given alone, it is that of two widths as equal as they can be: 8 is 4 × 2."""
    replay: bool = True
    """Whether episodes share the turns before they part; without, they are compared as whole attempts."""
    variant: Literal["reward_only", "value_assisted", "value_only"] = "reward_only"
    """What a turn was worth and what it is compared with: returns; returns, and a critic's values of its siblings; or the critic's values alone."""
    alpha: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of the critic's values in what is subtracted, with `variant: value_assisted`."""
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
            raise ValueError(f"`widths` are whole numbers of 1 or more, and not {list(widths)!r}")
        return {"group_size": math.prod(widths), **given}

    @model_validator(mode="after")
    def _leaves(self) -> C3:
        if self.group_size != math.prod(self.widths):
            raise ValueError(
                f"`group_size` is {self.group_size}, and the product of `widths` {math.prod(self.widths)}; remove `group_size`"
            )
        if self.order.build().sequential:
            raise ValueError("`order: sequential` multiplies ratios round by round; set `order: joint`")
        if self.umad.confidence or self.umad.relative or self.umad.influence:
            raise ValueError("`umad` compares whole episodes, and a tree the turns of one prompt; remove it")
        if self.variant != "reward_only" and not self.replay:
            raise ValueError(
                f"`variant: {self.variant}` values siblings, and `replay: false` has none; remove one of them"
            )
        if self.alpha != 1.0 and self.variant != "value_assisted":
            raise ValueError("`alpha` goes with `variant: value_assisted`; set both or neither")
        return self

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        critic = CriticSpec(
            "central",
            self.value_loss.build(),
            "shared",
            self.value_loss.coefficient,
            unit="after",
            bootstraps=False,
        )
        needs = () if self.variant == "reward_only" else (CriticValues(critic),)
        row = self.row(self.name, judge=self.credit, needs=needs)
        return replace(row, data=replace(row.data, widths=self.widths if self.replay else ()))

    def returns(self, episode: Episode) -> Mapping[str, float]:
        """Return what each agent is trained on."""
        return agent_returns(episode, self.team_reward, self.forms)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return each sampled turn's worth less that of its siblings, weighed by the episodes under it."""
        if not self.replay:
            members = by_agent(groups, self.rewards(groups, signals))
            return spread(self, groups, compare(members, LEFT_OUT, earlier))
        better: dict[TurnKey, float] = {}
        worth: dict[TurnKey, float] = {}
        under: dict[str, dict[TurnKey, int]] = {}
        for g, group in enumerate(groups):
            for node in nodes(g, group, self.widths, self.returns):
                turn = group.episodes[node.key.episode].turns[node.key.turn]
                worth[node.key] = node.worth
                if node.siblings:
                    better[node.key] = self._better(node, signals)
                    under.setdefault(turn.policy, {})[node.key] = node.leaves
        advantage: dict[TurnKey, float] = {}
        for own in under.values():
            mean = fmean(own.values())
            advantage |= {key: better[key] * leaves / mean for key, leaves in own.items()}
        credit = spread(self, groups, advantage)
        if self.variant == "reward_only":
            return credit
        return {
            key: replace(given, return_T=torch.tensor([worth[key]])) if key in worth else given
            for key, given in credit.items()
        }

    def _better(self, node: TreeTurn, signals: Signals) -> float:
        """Return how much better a turn was than its siblings."""
        worths = fmean(sibling.worth for sibling in node.siblings)
        if self.variant == "reward_only":
            return node.worth - worths
        values = fmean(fmean(float(signals.values[key]) for key in sibling.keys) for sibling in node.siblings)
        if self.variant == "value_only":
            return float(signals.values[node.key]) - values
        return node.worth - (1.0 - self.alpha) * worths - self.alpha * values


class Sibling(NamedTuple):
    """Another branch of the moment that a turn is compared at."""

    worth: float
    """Mean return of its episodes."""
    keys: tuple[TurnKey, ...]
    """The turn that the agent took there; all of that moment, where another agent speaks."""


class TreeTurn(NamedTuple):
    """A turn that is trained on."""

    key: TurnKey
    worth: float
    """Mean return of the episodes under it."""
    siblings: tuple[Sibling, ...]
    """Empty where no moment up to the turn's has branched, and where the others failed."""
    leaves: int
    """Episodes under it, failed ones too."""


def nodes(g: int, group: Group, widths: Sequence[int], returns: Any) -> list[TreeTurn]:
    """Return each turn that is trained on.

    A turn that several episodes share is that of the first one which did not fail.
    """
    paid = {e: returns(episode) for e, episode in enumerate(group.episodes) if episode.error is None}
    moments = {e: _moments(group.episodes[e]) for e in paid}
    under = [math.prod(widths[depth:]) for depth in range(len(widths) + 1)]
    """Episodes that share the first moments, by how many of these there are."""
    found: list[TreeTurn] = []
    for e in paid:
        depth_of = {seen: k + 1 for k, seen in enumerate(moments[e])}
        for turn in group.episodes[e].turns:
            if not turn.trained:
                continue
            depth = min(depth_of[turn.seen], len(widths))
            first = e - e % under[depth]
            if any(other in paid for other in range(first, e)):
                continue  # an episode before it has the turn
            # The deepest moment up to here that has branched.
            branched = next((k for k in range(depth, 0, -1) if widths[k - 1] > 1), 0)
            siblings = []
            for start in _siblings(e, under, branched):
                leaves = _leaves(paid, turn.agent, start, under[branched])
                if leaves:
                    seen = moments[leaves[0]][branched - 1]
                    there = [
                        each for each in group.episodes[leaves[0]].turns if each.trained and each.seen == seen
                    ]
                    own = [each for each in there if each.agent == turn.agent] or there
                    worth = fmean(paid[leaf][turn.agent] for leaf in leaves)
                    siblings.append(Sibling(worth, tuple(TurnKey(g, leaves[0], each.index) for each in own)))
            worth = fmean(paid[leaf][turn.agent] for leaf in _leaves(paid, turn.agent, first, under[depth]))
            found.append(TreeTurn(TurnKey(g, e, turn.index), worth, tuple(siblings), under[depth]))
    return found


def _leaves(paid: Mapping[int, Mapping[str, float]], agent: str, start: int, count: int) -> list[int]:
    """Return the episodes of a branch that did not fail and paid an agent."""
    return [leaf for leaf in range(start, start + count) if leaf in paid and agent in paid[leaf]]


def _moments(episode: Episode) -> list[int]:
    return sorted({turn.seen for turn in episode.turns if turn.trained})


def _siblings(e: int, under: Sequence[int], branched: int) -> list[int]:
    """Return the first episodes of the other branches that part at a moment."""
    if not branched:
        return []
    size, whole = under[branched], under[branched - 1]
    start, own = e - e % whole, e - e % size
    return [first for first in range(start, start + whole, size) if first != own]
