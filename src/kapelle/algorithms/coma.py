"""COMA: the advantage of a turn over other completions of its agent, estimated by a central critic (1705.08926).

    A_i = Q(s, a) − mean_k Q(s, (a_−i, a_i^k))        (eq. 4)

Q is a critic over messages: its value after the turn, given everything that all agents read and wrote until then, including
simultaneous completions of other agents. It is fitted to the return from the turn on. The alternatives a_i^k are the same
agent's completions of the same prompt in the task's other episodes, which are samples of its policy. The critic reads each
of them in place of the turn. No episode is continued, so the environment need not be repeatable.

The baseline is independent of the turn's completion, so it adds no bias with any critic. Q(s, a) can add bias: with
`worth: value`, the paper's form, the update follows the critic, and is a multiple of ∇J if the critic is correct. With
`worth: return` the sampled return replaces Q(s, a), and the update is a multiple of ∇J with any critic.

Deviations from the paper:

- `worth: return` is the default. With `value`, a critic over messages misleads the policies until it explains returns
  (figures in docs/algorithms/coma.md).
- The expectation over an agent's actions is a mean over samples, because the actions of a language model cannot be
  enumerated. The turn's own completion is excluded.
- In later turns, it can happen that no other episode has the same prompt. The mean is then over Q of the agent's turns of
  the same number in the other episodes, each with its own history. Without such turns, nothing is subtracted.
- The critic is fitted to returns, not by TD(λ) with a target network.
- `team.sharing` decides which agents share a policy; prompts contain no agent number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit
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
    """Episodes per task; the other episodes provide a turn's alternatives."""
    worth: Literal["value", "return"] = "return"
    """First term of the advantage: the return from the turn on, or the critic's value after the turn, as in the paper."""
    normalise: Literal["policy", "agent", "batch", "none"] = "policy"
    """Set over which the advantages of an update are whitened."""
    value_loss: ValueLossConfig = ValueLossConfig()

    def build(self) -> Algorithm:
        """Return the algorithm."""
        signal = CounterfactualValues(self.value_loss.q_critic())
        return self.row(self.name, credit=self.credit, needs=(signal,))

    def credit(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return A = Q(s, a) − mean_k Q(s, (a_−i, a_i^k)) for every token, and the return as the critic's target."""
        same_turn: dict[tuple[int | str, ...], list[TurnKey]] = {}
        return_of: dict[TurnKey, float] = {}
        for member in by_agent_turn(groups, self.rewards(groups, signals)):
            (key,) = member.keys
            return_of[key] = member.value
            same_turn.setdefault(member.place, []).append(key)
        advantage: dict[TurnKey, float] = {}
        for keys in same_turn.values():
            for key in keys:
                alternative_K = signals[COUNTERFACTUAL][key]
                if not len(alternative_K) and len(keys) > 1:
                    alternative_K = torch.cat([signals.values[other] for other in keys if other != key])
                baseline = float(alternative_K.mean()) if len(alternative_K) else 0.0
                value = return_of[key] if self.worth == "return" else float(signals.values[key])
                advantage[key] = value - baseline
        if not advantage:
            return spread(self, groups, {})
        found, turns = zip(*((key, turn) for key, turn in turns_of(groups) if key in advantage), strict=True)
        advantage_K = torch.tensor([advantage[key] for key in found], dtype=torch.float64)
        advantage_K = normalised(advantage_K, turns, [1] * len(turns), self.normalise)
        credit = spread(self, groups, dict(zip(found, advantage_K.tolist(), strict=True)))
        return {
            key: replace(given, return_T=torch.tensor([return_of[key]])) if key in return_of else given
            for key, given in credit.items()
        }
