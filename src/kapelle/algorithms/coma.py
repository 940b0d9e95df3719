"""COMA: a central critic estimates the advantage of a turn over alternative completions of the same agent (arXiv:1705.08926).

    A_i = Q(s, a) − mean_k Q(s, (a_−i, a_i^k))        (eq. 4)

Q is the value of a critic over messages after the turn. The critic reads everything that all agents read and wrote up to that
point, including simultaneous completions of other agents. The critic is fitted to the return from the turn on. The
alternatives a_i^k are completions that the same agent sampled for the same prompt in other episodes of the task. The critic
reads each alternative in place of the turn. No episode is continued, so the environment need not be repeatable.

The baseline is independent of the turn's completion, so it adds no bias, whatever the critic. Q(s, a) can add bias. With
`worth: value` (the paper's form), the expected update is a multiple of ∇J if the critic is correct. With `worth: return`, the
sampled return replaces Q(s, a), and the expected update is a multiple of ∇J with any critic.

Deviations from the paper:

- `worth: return` is the default. With `worth: value`, a critic over messages misleads the policies until the critic explains
  the returns (see the figures in docs/algorithms/coma.md).
- The expectation over an agent's actions is a mean over samples, because the actions of a language model cannot be
  enumerated. The turn's own completion is excluded.
- In later turns, it can happen that no other episode has the same prompt. The baseline is then the mean Q over the agent's
  turns with the same number in the other episodes, each after its own history. If there are no such turns, the baseline is 0.
- The critic is fitted to returns, not by TD(λ) with a target network.
- The setting `team.sharing` decides which agents share a policy. Prompts do not contain the number of the agent.
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
    """Settings of COMA (counterfactual multi-agent policy gradients)."""

    name: Literal["coma"] = "coma"
    group_size: int = Field(default=8, ge=2)
    """The number of episodes per task. The alternatives to a turn are taken from the other episodes of the task."""
    worth: Literal["value", "return"] = "return"
    """The first term of the advantage: the return from the turn on (`return`), or the critic's value after the turn as in the
    paper (`value`)."""
    normalise: Literal["policy", "agent", "batch", "none"] = "policy"
    """The set of turns over which the advantages of an update are whitened: those of one policy, those of one agent, all
    (`batch`), or no whitening (`none`)."""
    value_loss: ValueLossConfig = ValueLossConfig()

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        signal = CounterfactualValues(self.value_loss.q_critic())
        return self.row(self.name, credit=self.credit, needs=(signal,))

    def credit(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return the advantage Q(s, a) − mean_k Q(s, (a_−i, a_i^k)) for all tokens of each turn. The critic's target is the return."""
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
