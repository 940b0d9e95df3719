"""R-NaD: regularised Nash dynamics for two players of a zero-sum game (arXiv:2002.08456; DeepNash, arXiv:2206.15378).

The reward is transformed with a reference policy π_reg. For each move, η times the log-ratio is subtracted from the player's
reward and added to the opponent's reward:

    r̃ᵢ = rᵢ − η·[i moved]·log(π(a)/π_reg(a)) + η·[the opponent moved]·log(π(a)/π_reg(a))

The transformed game is still zero-sum and has a unique equilibrium. Gradient steps converge to this equilibrium, whereas they
cycle in the original game. Every `reference_every` steps, π_reg is replaced by the current policy, and the successive fixed
points approach an equilibrium of the original game.

The advantage is A = R̃ − mean R̃ of the other episodes, where R̃ is the transformed return from the agent's k-th turn on. The
log-ratio of a move is the sum over its tokens. The opponent's term is placed on the agent's last turn that ended before the
opponent moved or was simultaneous with the move.

In a game with one move per player, the opponent's term is independent of the player's own move. The expected update is then
that of a KL penalty to the reference (`loss.kl_estimator: k2`, `reference_every`). With several moves, the update also
accounts for the positions to which a move leads, and for the log-ratios of both players at these positions.

Deviations from DeepNash:

- The clipped surrogate on group returns replaces NeuRD with v-trace values.
- The reference policy π_reg is replaced at once, without interpolation.
- Moves with a low probability are kept: there is no threshold on the probability.
- The log-probs of the current policy are those of the policy that sampled.
- A turn that is not trained, such as a turn of a past policy, has no log-ratio term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import LEAVE_ONE_OUT, Earlier, by_agent_turn, compare, valid_episodes
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.shared.rewards import count_ended
from kapelle.errors import ConfigError
from kapelle.functional.divergences import kl_k1
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.team import Team
from kapelle.types import Group


class RNaD(MonteCarlo):
    """Settings of R-NaD: regularised Nash dynamics."""

    name: Literal["rnad"] = "rnad"
    team_reward: Literal["individual"] = "individual"
    """How rewards are shared. The value is always `individual`, because the game is zero-sum."""
    eta: float = Field(default=0.2, gt=0.0)
    """η, the weight of the log-ratio to the reference policy in the reward, in units of reward per nat."""
    reference_every: int = Field(default=20, ge=1)
    """The number of steps between two refreshes of the reference policy."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit, reference=True, checks=(check_two_players,))

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the transformed return from each turn on minus the mean transformed return of the other episodes."""
        members = by_agent_turn(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(members, LEAVE_ONE_OUT, earlier))

    def rewards(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, float]:
        """Return the reward of every turn after R-NaD's transformation."""
        reward = dict(super().rewards(groups, signals))
        for g, e, episode in valid_episodes(groups):
            for turn in episode.turns:
                key = TurnKey(g, e, turn.index)
                if key not in signals.reference:
                    continue
                log_ratio_T = kl_k1(torch.tensor(turn.logprobs), signals.reference[key])
                term = self.eta * float(log_ratio_T.sum())
                reward[key] -= term
                # The opponent gains the term on the turn that this one answers; an opponent without a turn gains nothing.
                ended = episode.turns[: count_ended(episode, turn)]
                answered = [other for other in ended if other.agent != turn.agent]
                if answered:
                    reward[TurnKey(g, e, answered[-1].index)] += term
        return reward


def check_two_players(team: Team) -> None:
    """Raise ConfigError unless the team has two agents."""
    if len(team.names) != 2:
        raise ConfigError(
            f"`rnad` needs two players of a zero-sum game, but this team has {len(team.names)} agents "
            f"({', '.join(team.names)}). Set `team.agents: 2`, or `algorithm.name: mmd`."
        )
