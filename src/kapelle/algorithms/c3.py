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

Deviations from the paper: the return of each agent (`team_reward`) in place of the team's outcome alone; no value function mixed in; the clipped surrogate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Literal

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import LEFT_OUT, Earlier, by_agent, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.shared.rewards import agent_returns
from kapelle.rows import Signals, TurnKey
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
        return self

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        row = self.row(self.name, judge=self.credit)
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
        under: dict[str, dict[TurnKey, int]] = {}
        for g, group in enumerate(groups):
            for key, value, leaves in nodes(g, group, self.widths, self.returns):
                turn = group.episodes[key.episode].turns[key.turn]
                better[key] = value
                under.setdefault(turn.policy, {})[key] = leaves
        advantage: dict[TurnKey, float] = {}
        for own in under.values():
            mean = fmean(own.values())
            advantage |= {key: better[key] * leaves / mean for key, leaves in own.items()}
        return spread(self, groups, advantage)


def nodes(g: int, group: Group, widths: Sequence[int], returns: Any) -> list[tuple[TurnKey, float, int]]:
    """Return each turn that is trained on, its worth less that of its siblings, and how many episodes are under it.

    A turn that several episodes share is that of the first one which did not fail. Turns without siblings are left out.
    """
    paid = {e: returns(episode) for e, episode in enumerate(group.episodes) if episode.error is None}
    under = [math.prod(widths[depth:]) for depth in range(len(widths) + 1)]
    """Episodes that share the first moments, by how many of these there are."""
    found: list[tuple[TurnKey, float, int]] = []
    for e in paid:
        depth_of = {seen: k + 1 for k, seen in enumerate(_moments(group.episodes[e]))}
        for turn in group.episodes[e].turns:
            if not turn.trained:
                continue
            depth = min(depth_of[turn.seen], len(widths))
            first = e - e % under[depth]
            if any(other in paid for other in range(first, e)):
                continue  # an episode before it has the turn
            # The deepest moment up to here that has branched.
            branched = next((k for k in range(depth, 0, -1) if widths[k - 1] > 1), 0)
            worths = [
                [
                    paid[leaf][turn.agent]
                    for leaf in range(start, start + under[branched])
                    if leaf in paid and turn.agent in paid[leaf]
                ]
                for start in _siblings(e, under, branched)
            ]
            own = [
                paid[leaf][turn.agent]
                for leaf in range(first, first + under[depth])
                if leaf in paid and turn.agent in paid[leaf]
            ]
            others = [fmean(each) for each in worths if each]
            if others:
                found.append((TurnKey(g, e, turn.index), fmean(own) - fmean(others), under[depth]))
    return found


def _moments(episode: Episode) -> list[int]:
    return sorted({turn.seen for turn in episode.turns if turn.trained})


def _siblings(e: int, under: Sequence[int], branched: int) -> list[int]:
    """Return the first episodes of the other branches that part at a moment."""
    if not branched:
        return []
    size, whole = under[branched], under[branched - 1]
    start, own = e - e % whole, e - e % size
    return [first for first in range(start, start + whole, size) if first != own]
