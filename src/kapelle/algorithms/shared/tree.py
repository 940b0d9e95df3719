"""Tree sampling: episodes branch at every turn, so that a comparison set contains the candidates for one prompt.

At every moment at which trained agents move, each of these agents samples `group_size` candidates from the same prompt. A
*joint action* is one candidate of each agent that moves at that moment. The value of a joint action is the mean return over
`continuations` episodes that continue from the joint action, with all later turns sampled again. The return includes reward
sharing and penalties. All candidates of a moment are trained on, and each is compared with the other candidates for its
prompt. Continuations are not trained on.

An algorithm defines which joint actions determine the value of a candidate:

- `alone`: the candidate together with the first candidate of every other agent (AT-GRPO);
- `aligned`: the k-th candidates of all agents are one joint action (MAGRPO);
- `cross`: every combination of candidates is a joint action, and the value of a candidate is the mean over the combinations
  that contain the candidate (MAGRPO).

The episode continues with each agent's candidate of highest value (`best`; the first candidate if several are tied), or with
each agent's first candidate (`first`). First candidates are ordinary samples, so with `first` the episodes follow the
policies' distribution.

With n agents at a moment and G candidates, there are at most n·(G − 1) + 1 (`alone`), G (`aligned`) or Gⁿ (`cross`) joint
actions. Each joint action is continued c times, where c is the number of continuations; joint actions with equal tokens are
continued only once.
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
    """Return the joint action of the candidate and the first candidates of all other agents."""
    return [tuple(candidate if m == mover else 0 for m in range(len(counts)))]


def aligned(counts: Sequence[int], mover: int, candidate: int) -> Sequence[JointAction]:
    """Return the joint action of all agents' candidates with the same number. An agent with only one candidate uses this candidate."""
    return [tuple(min(candidate, count - 1) for count in counts)]


def cross(counts: Sequence[int], mover: int, candidate: int) -> Sequence[JointAction]:
    """Return the joint actions of the candidate with every combination of the other agents' candidates."""
    choices: Iterable[Sequence[int]] = (
        [candidate] if m == mover else range(count) for m, count in enumerate(counts)
    )
    return list(product(*choices))


def best(values: Sequence[float]) -> int:
    """Return the number of the candidate with the highest value. If several are tied, return the number of the first."""
    return max(range(len(values)), key=lambda k: (values[k], -k))


def first(values: Sequence[float]) -> int:
    """Return the number of the first candidate, which the agent would have sampled without a tree."""
    return 0


class TreeSampling(MonteCarlo):
    """Settings of an algorithm with optional tree sampling."""

    tree: bool = False
    """Whether tree sampling replaces independent episodes. With tree sampling, each task has one episode, with `group_size`
    candidates at every turn of a trained agent."""
    continuations: int = Field(default=1, ge=1)
    """The number of continuations per joint action. This setting is used only with `tree: true`."""

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
        """Return the algorithm with tree sampling.

        The function `returns` computes the returns for candidate values; the default is the return used in training.
        """
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
    """Return credit for the turns of a tree. The value of each candidate is compared with the other candidates for its prompt."""
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
