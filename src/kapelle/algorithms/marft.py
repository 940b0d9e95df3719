"""MARFT: reinforcement fine-tuning of a team as one chain of turns (2504.16129).

The agents of a round act one after another, each reading the turns of those before it, so the whole episode is one
sequence of decisions: δ = r + γ·V(next observation in the chain) − V(this observation), the next observation being
the next agent's, and after the last agent the first one's in the following round. What the team earns is placed once,
on the chain's last turn. A central critic, with one value before each turn, judges them all.

`level: action` (the paper's first form): one ratio per turn, the product over its tokens, one value and one loss per
turn, so that a turn weighs the same however long it is.
`level: token`: a ratio and a value for each token; γ crosses turns only.

Deviations from the paper: the critic reads the global state through the base model's own layers, in place of an
additional encoder; `team_reward: last` is the paper's public code with `share_reward_in_agent: false`. That code
allocates advantages as integers, and reads the seat number 0 in `share_critic_with` as "no"; here advantages are floats
and seat 0 is a seat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from pydantic import model_validator

from kapelle.algorithm import Algorithm
from kapelle.algorithms.ppo import ActorCritic, actor_critic_row
from kapelle.algorithms.shared.gae import GAECredit
from kapelle.algorithms.shared.rewards import chain_rewards, paid_later, step_rewards
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group


class MARFT(ActorCritic):
    """Settings of MARFT."""

    name: Literal["marft"] = "marft"
    level: Literal["action", "token"] = "action"
    """What one decision is; it sets `loss.level` and `gae.unit`, which must not be set as well."""

    @model_validator(mode="after")
    def _one_level(self) -> MARFT:
        for section, key, given in (("loss", "level", self.loss.level), ("gae", "unit", self.gae.unit)):
            if given != "token":  # the default, which a resolved run file repeats
                raise ValueError(f"`{section}.{key}` follows from `level: {self.level}`; remove it")
        self._leveled()
        return self

    def _leveled(self) -> MARFT:
        """Return the settings with the level in loss and GAE; ValueError for a loss that does not fit it."""
        action = self.level == "action"
        if action and self.loss.aggregation not in (None, "sequence_mean"):
            raise ValueError(
                f"`level: action` has one loss per turn, and `loss.aggregation: {self.loss.aggregation}` would count it once "
                "for every token: remove `loss.aggregation`, or set `level: token`. A run made before this was refused has it "
                "in its config.yaml; remove the line there, its weights stay as they are"
            )
        loss = self.loss.model_dump() | {"level": "turn" if action else "token"}
        gae = self.gae.model_copy(update={"unit": "turn" if action else "token"})
        return self.model_copy(update={"loss": SurrogateConfig.model_validate(loss), "gae": gae})

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        settings = self._leveled()
        later = partial(paid_later, how=self.team_reward, placed=chain_rewards)
        chain = GAECredit(settings.gae, self.rewards, later, chain=True)
        return actor_critic_row(settings, self.name, "central", chain)

    def rewards(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, float]:
        """Return the reward of every turn in one chain through all agents, the team's counted once."""
        chain = step_rewards(groups, chain_rewards, self.team_reward, self.penalties)
        return self.umad.with_influence(chain, groups, signals) if self.umad.influence else chain
