"""MARS: turn-level returns, normalised separately for each player (2510.15414).

    A_t = (R_t − mean) / (std + ε),    R_t = Σ_{t'≥t} r_t' over the player's own turns, γ = 1

The mean and standard deviation are over all turns of the player in the step. Players of a game face different odds: the second
player of Kuhn poker wins more than the first. Normalisation per player gives every role the same average advantage.

`sum_then_normalise` is the paper's order. `normalise_then_sum` is that of its public code: rewards are normalised per player,
then summed, then centred on the mean of each player's distinct sums. There is no global whitening, because it would undo the
centring.

A player is an agent in one game of a mixture (`Task.part`), and in one role if roles are drawn (`Episode.roles`). With one
policy in all roles, normalisation is still per role. The authors' settings for several games also group by game and player.
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
    """Settings of MARS."""

    name: Literal["mars"] = "mars"
    group_size: int = Field(default=1, ge=1)
    """Episodes per task; players are compared over the whole step, so 1 is enough."""
    team_reward: TeamReward = "individual"
    normalise: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    """Order of the two operations on a player's rewards: sum over turns, and normalisation."""

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return each turn's normalised return-to-go."""
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
        how = Comparison(lambda _, player_B, n: normalise(reward_B, path_B, player_B, n), scaled=True)
        members = [
            Member(place, to_go, len(turn.completion_ids), (key,), place)
            for (key, turn), place, to_go in zip(
                turns, places, turn_return_to_go(reward_B, path_B, 1.0).tolist(), strict=True
            )
        ]
        return spread(self, groups, compare(members, how, earlier))
