"""MARS: turn-level returns, normalised for each player (2510.15414).

Players of a game face different odds: the second player of Kuhn poker wins more than the first. Each turn's
return-to-go (γ = 1, over the player's own turns) is normalised over all turns of its player in the step, so that no
seat is better than another on average. `sum_then_normalise` is the paper's order; `normalise_then_sum` that of its
public code: rewards normalised per player, then summed, then centred on the mean of each player's distinct sums.

Global whitening is left out, because it would undo the centring. A player is an agent in one game of a mixture (`Task.part`),
and in one seat where seats are drawn (`Episode.roles`); with one policy in all seats the normalisation is still per
seat. The authors' settings for several games group by the game's tag and by player too.
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
    """Episodes per task; players are compared over the whole step, not within a group."""
    team_reward: TeamReward = "individual"
    normalise: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    """Whether a player's returns are summed and then normalised, or the turns' scores are normalised and then summed."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
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
