"""R-NaD: regularised Nash dynamics (2002.08456; DeepNash, 2206.15378), for two players of a zero-sum game.

Each move costs whoever makes it, and pays the other, by how much likelier it has become than a reference π_reg would make it:

    r̃ᵢ = rᵢ − η·[i moved]·log(π(a)/π_reg(a)) + η·[the other moved]·log(π(a)/π_reg(a))

The game stays zero-sum, and has one equilibrium, to which following the gradient leads where it circles in the game itself.
Every `reference_every` steps π_reg becomes the policy, and the fixed points approach an equilibrium of the game as it is.

A = R̃ − mean of the other attempts' R̃, R̃ the transformed return from the agent's k-th turn on. A move's term is the sum over its tokens; the
other's is paid to the agent's last turn that was over, or taken at the same moment, when that move was made.

In a game of one move each the expected update is that of a KL penalty to the reference (`loss.kl_estimator: k2`, `reference_every`), since the
other's term does not depend on one's own move. With several moves it also judges a move by where it leads: to positions in which oneself, and
the other, will have strayed from the reference.

Deviations from DeepNash: the clipped surrogate on group returns for NeuRD with v-trace values; π_reg changes at once in place of
gliding; no threshold on rare moves, and log-probs of the sampling policy. A turn that is not trained, such as a league's past self, has no term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import LEFT_OUT, Earlier, by_agent_turn, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.shared.rewards import over
from kapelle.errors import ConfigError
from kapelle.functional.divergences import kl_k1
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.team import Team
from kapelle.types import Group


class RNaD(MonteCarlo):
    """Settings of regularised Nash dynamics."""

    name: Literal["rnad"] = "rnad"
    team_reward: Literal["individual"] = "individual"
    """What one wins the other loses: nothing is shared."""
    eta: float = Field(default=0.2, gt=0.0)
    """η: what a nat of distance from the reference costs, in units of what is earned."""
    reference_every: int = Field(default=20, ge=1)
    """Steps after which the reference becomes the policy as it is then."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, judge=self.credit, reference=True, checks=(check_two_players,))

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return each turn's transformed return from there on, against the other attempts'."""
        members = by_agent_turn(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(members, LEFT_OUT, earlier))

    def rewards(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, float]:
        """Return the transformed reward of every turn."""
        reward = dict(super().rewards(groups, signals))
        for g, group in enumerate(groups):
            for e, episode in enumerate(group.episodes):
                for turn in episode.turns if episode.error is None else ():
                    key = TurnKey(g, e, turn.index)
                    if key not in signals.reference:
                        continue
                    strayed = kl_k1(torch.tensor(turn.logprobs), signals.reference[key])
                    term = self.eta * float(strayed.sum())
                    reward[key] -= term
                    # What the other moved is paid from what this move answers; nothing, if it had not moved yet.
                    until = over(episode, turn)
                    answered = [each for each in episode.turns[:until] if each.agent != turn.agent]
                    if answered:
                        reward[TurnKey(g, e, answered[-1].index)] += term
        return reward


def check_two_players(team: Team) -> None:
    """Raise ConfigError unless two agents play."""
    if len(team.names) != 2:
        raise ConfigError(
            f"`rnad` is for two players who win from one another; this team has {len(team.names)} agents ({', '.join(team.names)}). "
            "Set `team.agents: 2`, or `algorithm.name: mmd`."
        )
