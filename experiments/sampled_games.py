"""Sampled self-play of tables on a game's tree held as arrays: `python -m experiments.sampled_games leduc_poker`.

The update is `grpo`'s without scale: groups of games on the same cards, each player compared with its mean in its group, an entropy
bonus, Adam without momentum. Hundreds of games take a hundredth of a second here, so that rates, schedules and budgets can be told
apart over seeds before a language model is trained.

Shapes: N moves of a step; S information states; E entries of a policy (one for each legal move of each state); H histories; K most children.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from kapelle.algorithms.shared.surrogate import annealed
from kapelle.environments.openspiel.tree import GameTree, tree_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


Credit = Literal["group", "value", "exact"]
"""A move's advantage: what was earned less the mean of the games on the same cards, or less the exact value of where the game stood; or that
value after the move less the one before."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How tables learn."""

    steps: int = 400
    deals: int = 64
    """Groups of a step, each dealt its own cards."""
    group: int = 8
    rate: float = 0.1
    entropy: float = 0.3
    """Coefficient of the bonus, in units of what is won."""
    entropy_end: float | None = None
    """What it comes to in a straight line; None keeps it."""
    falling: bool = False
    """Whether the rate falls to 0 in a straight line."""
    momentum: float = 0.0
    """Adam's β₁."""
    memory: float = 0.95
    """Adam's β₂."""
    credit: Credit = "group"


class SampledGame:
    """A game of two whose moves are drawn on arrays."""

    def __init__(self, tree: GameTree) -> None:
        """Take the tree of a zero-sum game."""
        self.tree = tree
        number = np.bincount(tree._parent[1:], minlength=tree.histories)
        self.child_HK = np.zeros((tree.histories, number.max()), np.int64)
        place = np.zeros(tree.histories, np.int64)
        for history in range(1, tree.histories):
            above = tree._parent[history]
            self.child_HK[above, place[above]] = history
            place[above] += 1
        self.children_H = number
        self.chance_H = (tree._state < 0) & (number > 0)
        self._real_HK = np.arange(number.max())[None] < number[:, None]
        self._entry_HK = np.where(self._real_HK, tree._entry[self.child_HK], -1)
        self._drawn_HK = np.where(self._real_HK, tree._chance[self.child_HK], 0.0)

    def softmax(self, logits_E: Floats) -> Floats:
        """Return each state's distribution."""
        states, count = self.tree._state_of_entry, len(self.tree._owner)
        most_S = np.full(count, -np.inf)
        np.maximum.at(most_S, states, logits_E)
        weight_E = np.exp(logits_E - most_S[states])
        shares_E: Floats = weight_E / np.bincount(states, weight_E, count)[states]
        return shares_E

    def even(self) -> Floats:
        """Return the policy that draws every legal move alike."""
        return self.softmax(np.zeros(self.tree.entries))

    def table(self, policy_E: Floats) -> dict[str, dict[int, float]]:
        """Return a policy as the tree's exact values take it."""
        values = iter(policy_E.tolist())
        return {
            key: {action: next(values) for action in actions}
            for key, actions in zip(self.tree.states, self.tree.actions, strict=True)
        }

    def nash_conv(self, policy_E: Floats) -> float:
        """Return what both players together could gain by deviating; what one wins the other loses."""
        table = self.table(policy_E)
        return sum(self.tree.best_response(table, seat)[0] for seat in (0, 1))

    def average(self, policies: Sequence[Floats]) -> Floats:
        """Return the policy that draws one of these for a whole game, seat by seat."""
        tree = self.tree
        asked = np.flatnonzero(tree._state >= 0)
        total_E, weight_S = np.zeros(tree.entries), np.zeros(len(tree._owner))
        for policy_E in policies:
            reach_S = np.zeros(len(tree._owner))
            for seat in (0, 1):
                step_H = np.ones(tree.histories)
                mine = tree._moved[tree._mover == seat]
                step_H[mine] = policy_E[tree._entry[mine]]
                reach_H = tree._reach(step_H)
                own = asked[tree._owner[tree._state[asked]] == seat]
                reach_S[tree._state[own]] = reach_H[own]
            total_E += reach_S[tree._state_of_entry] * policy_E
            weight_S += reach_S
        mixed_E: Floats = total_E / weight_S[tree._state_of_entry]
        return mixed_E

    def play(
        self, policy_E: Floats, plan: Plan, draw: np.random.Generator
    ) -> tuple[NDArray[np.int64], Floats]:
        """Return each move of a step's games as its entry, and its advantage."""
        tree, deals, group = self.tree, plan.deals, plan.group
        games = deals * group
        shares_HK = np.where(self._entry_HK >= 0, policy_E[np.maximum(self._entry_HK, 0)], self._drawn_HK)
        below_HK = shares_HK.cumsum(1)
        cards = np.repeat(draw.random((deals, 8)), group, 0)  # the same in a group
        dealt, at = np.zeros(games, np.int64), np.zeros(games, np.int64)
        live = np.arange(games)
        moves: list[NDArray[np.int64]] = []
        movers: list[NDArray[np.int64]] = []
        while len(live):
            here = at[live]
            chance = self.chance_H[here]
            point = np.where(chance, cards[live, np.minimum(dealt[live], 7)], draw.random(len(live)))
            dealt[live] += chance
            chosen = np.minimum((point[:, None] > below_HK[here]).sum(1), self.children_H[here] - 1)
            after = self.child_HK[here, chosen]
            moves.append(after[~chance])
            movers.append(live[~chance])
            at[live] = after
            live = live[self.children_H[after] > 0]
        paid = tree._paid[at, 0]
        after_N, game_N = np.concatenate(moves), np.concatenate(movers)
        if plan.credit == "group":
            gain_N = (paid - np.repeat(paid.reshape(deals, group).mean(1), group))[game_N]
        else:
            worth_H = tree._values(tree._steps(policy_E), tree._paid[:, 0])
            earned_N = paid[game_N] if plan.credit == "value" else worth_H[after_N]
            gain_N = earned_N - worth_H[tree._parent[after_N]]
        move_N = tree._entry[after_N]
        first_N = tree._owner[tree._state_of_entry[move_N]] == 0
        return move_N, np.where(first_N, gain_N, -gain_N)

    def learn(self, plan: Plan, seed: int) -> list[Floats]:
        """Return the policy after each fortieth of a run that starts with even play."""
        tree, draw = self.tree, np.random.default_rng(seed)
        states, count = tree._state_of_entry, len(tree._owner)
        logits_E, first_E, second_E = (np.zeros(tree.entries) for _ in range(3))
        found = []
        for step in range(plan.steps):
            policy_E = self.softmax(logits_E)
            bonus = annealed(plan.entropy, plan.entropy_end, step / plan.steps)
            move_N, advantage_N = self.play(policy_E, plan, draw)
            gain_E = np.bincount(move_N, advantage_N, tree.entries)
            visit_S = np.bincount(states[move_N], minlength=count)
            log_E = np.log(np.maximum(policy_E, 1e-30))
            entropy_S = -np.bincount(states, policy_E * log_E, count)
            gradient_E = gain_E - policy_E * np.bincount(states, gain_E, count)[states]
            gradient_E -= bonus * visit_S[states] * policy_E * (log_E + entropy_S[states])
            gradient_E /= len(move_N)
            first_E = plan.momentum * first_E + (1 - plan.momentum) * gradient_E
            second_E = plan.memory * second_E + (1 - plan.memory) * gradient_E**2
            rate = plan.rate * (1 - step / plan.steps if plan.falling else 1.0)
            mean_E, square_E = (
                first_E / (1 - plan.momentum ** (step + 1)),
                second_E / (1 - plan.memory ** (step + 1)),
            )
            logits_E = logits_E + rate * mean_E / (np.sqrt(square_E) + 1e-8)
            if (step + 1) * 40 // plan.steps > step * 40 // plan.steps:
                found.append(self.softmax(logits_E))
        return found

    def measure(self, plan: Plan, seeds: int) -> Mapping[str, list[float]]:
        """Return NashConv of the last policy and of the average of the later half, by seed."""
        runs = [self.learn(plan, seed) for seed in range(seeds)]
        return {
            "last": [self.nash_conv(run[-1]) for run in runs],
            "later half": [self.nash_conv(self.average(run[len(run) // 2 :])) for run in runs],
        }


def main() -> None:
    """Print NashConv of plans that are given by their fields."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("game")
    parser.add_argument("--seeds", type=int, default=5)
    for name in ("steps", "deals", "group", "rate", "entropy", "momentum", "memory"):
        usual = getattr(Plan(), name)
        parser.add_argument(f"--{name}", type=type(usual), default=usual)
    parser.add_argument("--entropy-end", type=float)
    parser.add_argument("--falling", action="store_true")
    parser.add_argument("--credit", choices=get_args(Credit), default="group")
    given = vars(parser.parse_args())
    game, seeds = SampledGame(tree_of(given.pop("game"))), given.pop("seeds")
    even = game.nash_conv(game.even())
    print(f"even play {even:.3f}")
    for name, values in game.measure(Plan(**given), seeds).items():
        shown = " ".join(f"{value:.3f}" for value in values)
        print(f"{name:10} {shown}   mean {fmean(values):.3f}, {fmean(values) / even:.1%} of even play's")


if __name__ == "__main__":
    main()
