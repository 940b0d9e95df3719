"""REINFORCE++: policy gradients with advantages normalised over the whole batch, without groups or critics (arXiv:2501.03262).

    A_k = Σ_{k'≥k} γ^{k'−k} r_{k'}, whitened over all tokens of a policy

A_k is the advantage of token k. The reward r contains −β(log π_b − log π_ref) at every token and the reward of the turn at
its last token. Returns are computed over the agent's own tokens, over all of its turns in a row. Advantages are whitened per
policy, so a joint step of several policies is identical to separate steps.

With `baseline: group`, the mean return of the agent's group is subtracted first, and R − mean_g is then whitened over the
trajectories of a policy. With `whiten: attempts`, each trajectory counts once. With `whiten: tokens`, each token counts once,
which is another reading of the paper's indices.
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
    """Settings of REINFORCE++: policy gradients with advantages normalised over the batch."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    group_size: int = Field(default=1, ge=1)
    """The number of episodes per task, which must be at least 2 with `baseline: group`."""
    baseline: Literal["none", "group"] = "none"
    """The baseline that is subtracted before whitening: the mean return of the task's episodes (`group`), or nothing
    (`none`)."""
    whiten: Literal["attempts", "tokens"] = "attempts"
    """The unit that has equal weight in the whitening with `baseline: group`: trajectories (`attempts`) or tokens (`tokens`)."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """The discount from one token to the next."""
    kl_in_reward: float = Field(default=0.0, ge=0.0)
    """β, the coefficient of the per-token KL penalty to the reference policy."""

    @model_validator(mode="after")
    def _consistent(self) -> ReinforcePlusPlus:
        if self.baseline == "group" and self.group_size < 2:
            raise ValueError("`baseline: group` compares episodes of a task; set `group_size: 2` or more")
        if self.loss.level != "token" and (self.kl_in_reward or self.gamma != 1.0):
            raise ValueError(
                f"`loss.level: {self.loss.level}` has one ratio per completion, but `gamma` and `kl_in_reward` give each token "
                "its own return; set `loss.level: token`, or remove them"
            )
        if self.whiten == "tokens" and self.baseline != "group":
            raise ValueError(
                "`whiten` needs `baseline: group`; without a group baseline, advantages are always whitened over tokens"
            )
        if self.baseline == "group" and (self.kl_in_reward or self.gamma != 1.0):
            raise ValueError(
                "`baseline: group` gives a trajectory one advantage; remove `gamma` and `kl_in_reward`, and use "
                "`loss.kl_coefficient`"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        if self.baseline == "group":
            return self.row(self.name, judge=self.group_credit)
        return self.row(self.name, self.token_credit, reference=self.kl_in_reward > 0)

    def group_credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the advantage R − mean_g, whitened over the trajectories of each policy."""
        policy = {key: turn.policy for key, turn in turns_of(groups)}
        advantage: dict[TurnKey, float] = {}
        members = by_agent(groups, self.rewards(groups, signals))
        for name in dict.fromkeys(policy.values()):
            own = [member for member in members if policy[member.keys[0]] == name]
            counts = [member.tokens if self.whiten == "tokens" else 1 for member in own]
            # Whiten with each member's value repeated `count` times.
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
        """Return the whitened return-to-go of each token."""
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
