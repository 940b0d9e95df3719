"""MARS: advantages are turn-level returns that are normalised separately for each player (arXiv:2510.15414).

    A_t = (R_t − mean) / (std + ε),    R_t = Σ_{t'≥t} r_t' over the player's own turns, γ = 1

The mean and standard deviation are computed over all turns of the player in the training step. The players of a game have
different odds: the second player of Kuhn poker wins more than the first. Normalisation per player gives every role the same
average advantage.

The order `sum_then_normalise` is that of the paper. The order `normalise_then_sum` is that of the paper's public code:
rewards are normalised per player, then summed, then centred on the mean of each player's distinct sums. Advantages are not
whitened over the batch, because whitening would undo the centring.

A player is an agent in one game of a mixture (`Task.part`) and, if roles are drawn at random, in one role (`Episode.roles`).
Normalisation is per role even if one policy has all roles. The authors' settings for several games also group by game and
player.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import Comparison, Earlier, Member, compare, place_of
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.shared.rewards import TeamReward
from kapelle.functional.advantages import normalise_then_sum, sum_then_normalise
from kapelle.functional.returns import turn_return_to_go
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import torch
from kapelle.types import Group


class MARS(MonteCarlo):
    """Settings of MARS: turn-level returns with a separate normalisation per player."""

    name: Literal["mars"] = "mars"
    group_size: int = Field(default=1, ge=1)
    """The number of episodes per task. Returns are compared over the whole training step, so 1 is enough."""
    team_reward: TeamReward = "individual"
    normalise: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    """The order of two operations on the rewards of a player: the sum over turns and the normalisation."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the normalised return-to-go of each turn."""
        turns = turns_of(groups)
        if not turns:
            return {}
        reward = self.rewards(groups, signals)
        paths: dict[tuple[int, int, str], int] = {}
        places = [place_of(groups[key.group].episodes[key.episode], turn.agent) for key, turn in turns]
        path_B = torch.tensor(
            [paths.setdefault((key.group, key.episode, turn.agent), len(paths)) for key, turn in turns]
        )
        reward_B = torch.tensor([reward[key] for key, _ in turns], dtype=torch.float64)
        order = {"sum_then_normalise": sum_then_normalise, "normalise_then_sum": normalise_then_sum}
        normalise = order[self.normalise]
        how = Comparison(lambda _, player_B, n: normalise(reward_B, path_B, player_B, n), scale="std")
        members = [
            Member(place, to_go, len(turn.completion_ids), (key,), place)
            for (key, turn), place, to_go in zip(
                turns, places, turn_return_to_go(reward_B, path_B, 1.0).tolist(), strict=True
            )
        ]
        return spread(self, groups, compare(members, how, earlier))
