"""REINFORCE++: one normalisation over the whole batch takes the place of groups and critics (2501.03262).

A at token k = Σ_{k'≥k} γ^{k'−k} r_{k'}, where r carries −β(log π_b − log π_ref) at every token and the turn's reward
at its last, whitened over all tokens of a policy. `baseline: group` is the form with a baseline: R − mean_g of the
agent's attempts, then whitened over a policy's attempts, each counting once (`whiten: attempts`), or over their tokens, as
the indices of the paper's formula can be read (`whiten: tokens`).

Returns run over the agent's own tokens, all its turns in a row. Whitening is per policy: a joint step is then each
policy's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import CENTRED, Earlier, by_agent, compared_values
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.functional.masking import masked_whiten
from kapelle.functional.returns import return_to_go
from kapelle.functional.shaping import kl_in_reward
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import torch
from kapelle.types import Group, Turn


class ReinforcePlusPlus(MonteCarlo):
    """Settings of REINFORCE++."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    group_size: int = Field(default=1, ge=1)
    """Episodes per task; two or more with `baseline: group`."""
    baseline: Literal["none", "group"] = "none"
    """`group`: the mean of the task's episodes is taken off first."""
    whiten: Literal["attempts", "tokens"] = "attempts"
    """What weighs the same in the mean and spread of `baseline: group`; without it tokens always do."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per token."""
    kl_in_reward: float = Field(default=0.0, ge=0.0)
    """β of the per-token penalty to the reference policy."""

    @model_validator(mode="after")
    def _consistent(self) -> ReinforcePlusPlus:
        if self.baseline == "group" and self.group_size < 2:
            raise ValueError("`baseline: group` compares attempts; set `group_size: 2` or more")
        if self.loss.level != "token" and (self.kl_in_reward or self.gamma != 1.0):
            raise ValueError(
                f"`loss.level: {self.loss.level}` has one ratio for a whole completion, while `gamma` and `kl_in_reward` "
                "give each of its tokens another return: leave `loss.level: token`, or leave them out"
            )
        if self.whiten == "tokens" and self.baseline != "group":
            raise ValueError(
                "`whiten` is about `baseline: group`; without it, tokens are whitened in any case"
            )
        if self.baseline == "group" and (self.kl_in_reward or self.gamma != 1.0):
            raise ValueError(
                "`baseline: group` gives a whole attempt one advantage: leave `gamma` and `kl_in_reward` out, and "
                "use `loss.kl_coefficient`"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        if self.baseline == "group":
            return self.row(self.name, judge=self.group_credit)
        return self.row(self.name, self.token_credit, reference=self.kl_in_reward > 0)

    def group_credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return R − mean_g, whitened over each policy's attempts."""
        policy = {key: turn.policy for key, turn in turns_of(groups)}
        advantage: dict[TurnKey, float] = {}
        members = by_agent(groups, self.rewards(groups, signals))
        for name in dict.fromkeys(policy.values()):
            own = [member for member in members if policy[member.keys[0]] == name]
            counts = [member.tokens if self.whiten == "tokens" else 1 for member in own]
            # The members' values, whitened over all of them, each as often as its count.
            centred = compared_values(own, CENTRED, earlier)
            count_B = torch.tensor(counts)
            value_K = torch.tensor(centred, dtype=torch.float64).repeat_interleave(count_B)
            whitened_K = masked_whiten(value_K, torch.ones_like(value_K)).tolist()
            first = (count_B.cumsum(0) - count_B).tolist()
            advantage |= {
                key: whitened_K[k] for member, k in zip(own, first, strict=True) for key in member.keys
            }
        return spread(self, groups, advantage)

    def token_credit(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each token's whitened return-to-go."""
        reward = self.rewards(groups, signals)
        paths: dict[str, dict[tuple[int, int, str], list[tuple[TurnKey, Turn]]]] = {}
        for key, turn in turns_of(groups):
            own = paths.setdefault(turn.policy, {})
            own.setdefault((key.group, key.episode, turn.agent), []).append((key, turn))
        pad = torch.nn.utils.rnn.pad_sequence
        credit = spread(self, groups, reward)
        for trajectories in paths.values():
            rows = []
            for pairs in trajectories.values():
                pieces = []
                for key, turn in pairs:
                    reward_T = torch.zeros(len(turn.completion_ids))
                    if self.kl_in_reward:
                        logp_T = torch.tensor(turn.logprobs)
                        reward_T += kl_in_reward(logp_T, signals.reference[key], beta=self.kl_in_reward)
                    reward_T[-1] += reward[key]
                    pieces.append(reward_T)
                rows.append(torch.cat(pieces))
            reward_NT = pad(rows, batch_first=True)
            mask_NT = pad([torch.ones_like(row_T) for row_T in rows], batch_first=True)
            advantage_NT = masked_whiten(return_to_go(reward_NT, mask_NT, self.gamma), mask_NT)
            for pairs, advantage_T in zip(trajectories.values(), advantage_NT, strict=True):
                lengths = [len(turn.completion_ids) for _, turn in pairs]
                for (key, _), a_T in zip(pairs, advantage_T[: sum(lengths)].split(lengths), strict=True):
                    credit[key] = replace(credit[key], advantage_T=a_T)
        return credit
