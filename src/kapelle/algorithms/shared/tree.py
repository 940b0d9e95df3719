"""Tree sampling: episodes branch at every turn, so that a comparison set holds the candidates for one prompt.

At every moment at which trained agents move, each samples `group_size` candidates from the same prompt. A *joint action*
is one candidate of each agent that moves at that moment. Its value is the mean return over `continuations` episodes that
continue from it, with all later turns sampled again. The return includes reward sharing and penalties. All candidates of
a moment are trained on, each compared with the other candidates for its prompt; continuations are not trained on.

An algorithm defines which joint actions give a candidate its value:

- `alone`: the candidate with the first candidate of every other agent (AT-GRPO);
- `aligned`: the k-th candidates of all agents are one joint action (MAGRPO);
- `cross`: every combination is a joint action, and a candidate's value is their mean (MAGRPO).

The episode continues with each agent's candidate of highest value (`best`; the first one if several are tied), or with the
first candidate (`first`). The first candidate is an ordinary sample, so episodes follow the policies' distribution.

With n agents at a moment, G candidates and c continuations there are at most n·(G − 1) + 1, G or Gⁿ joint actions,
respectively. Each is continued c times; candidates with equal tokens are continued once.
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
    """Return the candidate together with every other agent's first candidate."""
    return [tuple(candidate if m == mover else 0 for m in range(len(counts)))]


def aligned(counts: Sequence[int], mover: int, candidate: int) -> Sequence[JointAction]:
    """Return every agent's candidate of the same number; an agent with one candidate uses that one."""
    return [tuple(min(candidate, count - 1) for count in counts)]


def cross(counts: Sequence[int], mover: int, candidate: int) -> Sequence[JointAction]:
    """Return the candidate together with every combination of the other agents' candidates."""
    choices: Iterable[Sequence[int]] = (
        [candidate] if m == mover else range(count) for m, count in enumerate(counts)
    )
    return list(product(*choices))


def best(values: Sequence[float]) -> int:
    """Return the number of the candidate with the highest value; the first one if several are tied."""
    return max(range(len(values)), key=lambda k: (values[k], -k))


def first(values: Sequence[float]) -> int:
    """Return the number of the first candidate, which the agent would have sampled without a tree."""
    return 0


class TreeSampling(MonteCarlo):
    """Settings of an algorithm with optional tree sampling."""

    tree: bool = False
    """Tree sampling in place of independent episodes: one episode per task, and `group_size` candidates at every turn of a
    trained agent."""
    continuations: int = Field(default=1, ge=1)
    """Continuations per joint action, with `tree: true`."""

    @model_validator(mode="after")
    def _tree_and_what_it_needs(self) -> TreeSampling:
        if self.continuations > 1 and not self.tree:
            raise ValueError("`continuations` needs `tree: true`; set both or neither")
        if self.tree and self.umad.active:
            raise ValueError(
                "`umad` compares whole episodes, but `tree: true` compares candidates for one prompt; remove one of them"
            )
        if self.tree and self.order.build().sequential:
            raise ValueError(
                "`order: sequential` multiplies ratios over rounds, but `tree: true` has several candidates per round; set "
                "`order: joint`"
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
        """Return the algorithm with a tree. `returns` gives the return behind a candidate's value; by default, the trained one."""
        row = self.row(name, judge=partial(among_siblings, self, how))
        returns = returns or row.returns
        assert returns is not None, "Monte Carlo algorithms share the team's reward"
        tree = Tree(self.group_size, self.continuations, returns, judged_by, chosen)
        return replace(row, data=replace(row.data, group_size=1, tree=tree))


def among_siblings(
    settings: MonteCarlo,
    how: Comparison,
    groups: Sequence[Group],
    signals: Signals,
    earlier: Earlier | None = None,
) -> Mapping[TurnKey, Credit]:
    """Return credit for the turns of a tree: each candidate's value compared with the other candidates for its prompt."""
    members = []
    for key, turn in turns_of(groups):
        assert turn.continuation_return is not None, (
            "tree sampling sets `continuation_return` of every candidate"
        )
        root = key.turn if turn.parent is None else turn.parent
        episode = groups[key.group].episodes[key.episode]
        number = sum(one.agent == turn.agent for one in episode.turns[:root])
        members.append(
            Member(
                (key.group, key.episode, root),
                turn.continuation_return,
                len(turn.completion_ids),
                (key,),
                (*place_of(episode, turn.agent), number),
            )
        )
    return spread(settings, groups, compare(members, how, earlier))
