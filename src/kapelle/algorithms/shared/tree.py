"""Trees: episodes that branch at every turn, so that a comparison set holds one prompt's candidates.

At every moment at which trained agents move, each samples `group_size` candidates from the same prompt.
A *joint action* is one candidate of each agent that moves at that moment. Its worth is what the episode pays when it
continues from there, with all later turns sampled anew: the mean over `continuations` episodes of the
return that the algorithm trains on, reward sharing and penalties included. All candidates of a moment are trained on,
each compared with its siblings; continuations are not.

An algorithm chooses which joint actions give a candidate its worth:

- `alone`: the one with the others' first candidates (AT-GRPO);
- `aligned`: the k-th candidates of all agents are one joint action (MAGRPO);
- `cross`: every combination is one; a candidate's worth is their mean (MAGRPO).

The episode continues with each agent's candidate of greatest worth (`best`, the first of equals), or with the first one
(`first`), a plain sample, so that episodes are distributed as the team plays.

With n agents at a moment, G candidates and c continuations there are at most n·(G − 1) + 1, G or Gⁿ joint actions,
each continued c times; candidates with the same tokens are continued once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Credit, JointAction, JudgedBy, Tree
from kapelle.algorithms.shared.groups import Comparison, Earlier, Member, compare, place_of
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.types import Episode, Group


def alone(counts: Sequence[int], mover: int, candidate: int) -> Sequence[JointAction]:
    """Return the candidate with the first one of every other agent."""
    return [tuple(candidate if m == mover else 0 for m in range(len(counts)))]


def aligned(counts: Sequence[int], mover: int, candidate: int) -> Sequence[JointAction]:
    """Return every agent's candidate of the same number; an agent with one candidate uses that."""
    return [tuple(min(candidate, count - 1) for count in counts)]


def cross(counts: Sequence[int], mover: int, candidate: int) -> Sequence[JointAction]:
    """Return the candidate with every combination of the others'."""
    choices: Iterable[Sequence[int]] = (
        [candidate] if m == mover else range(count) for m, count in enumerate(counts)
    )
    return list(product(*choices))


def best(worths: Sequence[float]) -> int:
    """Return the number of the candidate of greatest worth, the first of equals."""
    return max(range(len(worths)), key=lambda k: (worths[k], -k))


def first(worths: Sequence[float]) -> int:
    """Return the first candidate's number: what the agent would have sampled without a tree."""
    return 0


class TreeSampling(MonteCarlo):
    """Settings of an algorithm that can branch at every turn."""

    tree: bool = False
    """Branch at every turn instead of playing whole episodes side by side: one episode for each task, and
    `group_size` candidates at every turn of a trained agent."""
    continuations: int = Field(default=1, ge=1)
    """How often the episode is continued from each joint action, with `tree: true`."""

    @model_validator(mode="after")
    def _tree_and_what_it_needs(self) -> TreeSampling:
        if self.continuations > 1 and not self.tree:
            raise ValueError("`continuations` goes with `tree: true`; set both or neither")
        if self.tree and (self.umad.confidence or self.umad.relative or self.umad.influence):
            raise ValueError(
                "`umad` compares whole episodes, and `tree: true` compares candidates of one prompt; set one of both"
            )
        if self.tree and self.order.build().sequential:
            raise ValueError(
                "`order: sequential` multiplies ratios round by round, and `tree: true` has several candidates in a "
                "round; set `order: joint`"
            )
        return self

    def tree_row(
        self,
        name: str,
        how: Comparison,
        judged_by: JudgedBy,
        chosen: Callable[[Sequence[float]], int],
        returns: Callable[[Episode], Mapping[str, float]] | None = None,
    ) -> Algorithm:
        """Return the row with a tree; `returns` say what a candidate's worth counts, else what each agent is trained on."""
        row = self.row(name, judge=partial(among_siblings, self, how))
        paid = returns or row.returns
        assert paid is not None, "Monte Carlo algorithms share the team's reward"
        tree = Tree(self.group_size, self.continuations, paid, judged_by, chosen)
        return replace(row, data=replace(row.data, group_size=1, tree=tree))


def among_siblings(
    settings: MonteCarlo,
    how: Comparison,
    groups: Sequence[Group],
    signals: Signals,
    earlier: Earlier | None = None,
) -> Mapping[TurnKey, Credit]:
    """Return credit for the turns of a tree: each candidate's worth, compared among those of its prompt."""
    members = []
    for key, turn in turns_of(groups):
        assert turn.worth is not None, "a tree's candidates are judged when they are sampled"
        root = key.turn if turn.parent is None else turn.parent
        episode = groups[key.group].episodes[key.episode]
        number = sum(one.agent == turn.agent for one in episode.turns[:root])
        members.append(
            Member(
                (key.group, key.episode, root),
                turn.worth,
                len(turn.completion_ids),
                (key,),
                (*place_of(episode, turn.agent), number),
            )
        )
    return spread(settings, groups, compare(members, how, earlier))
