"""MARFT: reinforcement fine-tuning of a team as one chain of turns (arXiv:2504.16129).

The agents of a round act one after another, and each agent reads the turns of the agents before it. The whole episode is one
sequence of decisions with the TD error

    δ = r + γ·V(next observation in the chain) − V(this observation)

The next observation in the chain is that of the next agent. After the last agent, it is the observation of the first agent in
the following round. The team's reward is placed once, on the last turn of the chain. One central critic, with one value
before each turn, evaluates all agents.

- With `level: action` (the paper's first form), each turn has one ratio (the product over its tokens), one value and one
  loss. The weight of a turn is independent of its length.
- With `level: token`, each token has one ratio and one value; γ applies between turns only.

Deviations from the paper:

- The critic reads the global state through the base model's own layers, without an additional encoder.
- `team_reward: last` corresponds to `share_reward_in_agent: false` in the paper's public code.
- The paper's public code stores advantages as integers and treats agent number 0 in `share_critic_with` as "no". In this
  implementation, advantages are floats and 0 is a valid agent number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from pydantic import model_validator

from kapelle.algorithm import Algorithm
from kapelle.algorithms.ppo import ActorCritic, actor_critic_row
from kapelle.algorithms.shared.gae import GAECredit
from kapelle.algorithms.shared.rewards import chain_rewards, deferred_rewards, step_rewards
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group


class MARFT(ActorCritic):
    """Settings of MARFT, which is PPO on one chain of turns through all agents."""

    name: Literal["marft"] = "marft"
    level: Literal["action", "token"] = "action"
    """The unit of one decision: a whole turn (`action`), or a token. This setting determines `loss.level` and `gae.unit`,
    which must keep their defaults."""

    @model_validator(mode="after")
    def _one_level(self) -> MARFT:
        for section, key, given in (("loss", "level", self.loss.level), ("gae", "unit", self.gae.unit)):
            if given != "token":  # the default, which resolved settings contain
                raise ValueError(f"`{section}.{key}` is already set by `level: {self.level}`; remove it")
        self._leveled()
        return self

    def _leveled(self) -> MARFT:
        """Return the settings with `level` copied to `loss` and `gae`.

        Raises ValueError if `loss.aggregation` does not fit the level.
        """
        action = self.level == "action"
        if action and self.loss.aggregation not in (None, "sequence_mean"):
            raise ValueError(
                f"`level: action` has one loss per turn, which `loss.aggregation: {self.loss.aggregation}` would weight by the turn's "
                "length; remove `loss.aggregation`, or set `level: token`"
            )
        loss = self.loss.model_dump() | {"level": "turn" if action else "token"}
        gae = self.gae.model_copy(update={"unit": "turn" if action else "token"})
        return self.model_copy(update={"loss": SurrogateConfig.model_validate(loss), "gae": gae})

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        settings = self._leveled()
        later = partial(deferred_rewards, how=self.team_reward, chain=True)
        chain = GAECredit(settings.gae, self.rewards, later, chain=True)
        return actor_critic_row(settings, self.name, "central", chain)

    def rewards(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, float]:
        """Return the reward of every turn in one chain through all agents. The team's reward is counted once."""
        chain = step_rewards(groups, chain_rewards, self.team_reward, self.penalties)
        return self.umad.with_influence(chain, groups, signals)
