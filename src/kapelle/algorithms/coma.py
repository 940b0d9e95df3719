"""COMA: each turn against what its agent might have said instead, by a central critic (1705.08926).

A_i = Q(s, a) − mean_k Q(s, (a_−i, a_i^k)) (eq. 4). Q is a critic over messages: its value after the turn, when it has read everything that
all agents read and said until then, the answers of others at the same moment included. It is fitted to what the team earned from
the turn on. The alternatives a_i^k are answers of the same agent to the same prompt in the task's other episodes: samples of
its policy, which the critic reads in the turn's place. No episode is played again, for worlds in which none can be.

The baseline does not depend on what the turn said, so it bends nothing, whatever the critic thinks. Q(s, a) does: with
`worth: value`, the paper's, the update follows the critic, and is a multiple of ∇J where the critic is right. With `worth: return` what was
earned stands in its place, and the update is a multiple of ∇J with any critic.

Deviations from the paper:

- `worth: return` unless set. A critic over messages that explains nothing yet leads the policies astray with `value`
  (docs/algorithms/coma.md has figures).
- The expectation over an agent's actions is a mean over samples, since a language has no list of them; the turn's own answer is not
  among them.
- Where no other episode has the same prompt (later turns), the mean is over Q of the agent's turns of the same number in the other
  episodes, in their own histories; where there are none, nothing is subtracted.
- The critic is fitted to returns in place of TD(λ) with a target network.
- Agents of one policy share it by `team.sharing`; there is no agent number among what they read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit, CriticSpec
from kapelle.algorithms.shared.gae import normalised
from kapelle.algorithms.shared.groups import by_agent_turn
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.algorithms.shared.surrogate import ValueLossConfig
from kapelle.algorithms.signals.counterfactual import COUNTERFACTUAL, CounterfactualValues
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import torch
from kapelle.types import Group


class COMA(MonteCarlo):
    """Settings of counterfactual multi-agent policy gradients."""

    name: Literal["coma"] = "coma"
    group_size: int = Field(default=8, ge=2)
    """Episodes per task; the answers of the others are a turn's alternatives."""
    worth: Literal["value", "return"] = "return"
    """What a turn was worth: what was earned from it on, or as in the paper the critic's value after it."""
    normalise: Literal["policy", "agent", "batch", "none"] = "policy"
    """Over whose turns of the update advantages are whitened."""
    value_loss: ValueLossConfig = ValueLossConfig()

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        critic = CriticSpec(
            "central",
            self.value_loss.build(),
            "shared",
            self.value_loss.coefficient,
            unit="after",
            bootstraps=False,
        )
        return self.row(self.name, credit=self.credit, needs=(CounterfactualValues(critic),))

    def credit(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return A = Q(s, a) − mean_k Q(s, (a_−i, a_i^k)) for every token of each turn, and the return as the critic's target."""
        same_turn: dict[tuple[int | str, ...], list[TurnKey]] = {}
        earned: dict[TurnKey, float] = {}
        for member in by_agent_turn(groups, self.rewards(groups, signals)):
            (key,) = member.keys
            earned[key] = member.value
            same_turn.setdefault(member.place, []).append(key)
        advantage: dict[TurnKey, float] = {}
        for keys in same_turn.values():
            for key in keys:
                instead_K = signals[COUNTERFACTUAL][key]
                if not len(instead_K) and len(keys) > 1:
                    instead_K = torch.cat([signals.values[other] for other in keys if other != key])
                baseline = float(instead_K.mean()) if len(instead_K) else 0.0
                worth = earned[key] if self.worth == "return" else float(signals.values[key])
                advantage[key] = worth - baseline
        judged = [(key, turn) for key, turn in turns_of(groups) if key in advantage]
        advantage_K = torch.tensor([advantage[key] for key, _ in judged], dtype=torch.float64)
        turns = [turn for _, turn in judged]
        whitened = normalised(advantage_K, turns, [1] * len(turns), self.normalise).tolist() if judged else []
        credit = spread(self, groups, dict(zip([key for key, _ in judged], whitened, strict=True)))
        return {
            key: replace(given, return_T=torch.tensor([earned[key]])) if key in earned else given
            for key, given in credit.items()
        }
