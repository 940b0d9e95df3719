"""Distillation on policy: each policy learns from a frozen teacher on its own samples.

The loss is the reverse KL to the teacher over whole completions y of the prompts x that the team meets,
KL(π(·|x) ‖ T(·|x)) = E_{y~π}[Σ_t log π(y_t) − log T(y_t)] (generalised knowledge distillation of 2306.13649 with λ = 1 and
the reverse KL; MiniLLM, 2306.08543, eq. 2). Its gradient is E[Σ_t ∇log π(y_t) · Σ_{s≥t} (log π(y_s) − log T(y_s))], so the
advantage of a token is

    R_t = Σ_{s≥t} γ^{s−t} · (log T(y_s) − log π(y_s)),    A_t = R_t − mean of R_t in the task's other episodes

with γ = `discount` = 1. The mean is over the same turn of the same agent at the same position t: it does not depend on
the judged sample, and subtracts what all attempts have in common, which is most of R_t while the two are far apart. Where
no other episode has such a token it is a running mean over earlier steps, kept in the checkpoint. `discount: 0` keeps each token's own term: the sum of per-token KLs at the positions that the policy
reaches, as if its tokens had no effect on later positions. It learns from the teacher alone, without rewards and without a critic.

Deviations from the papers: the divergence is sampled instead of summed over the vocabulary (a teacher's logits are not
kept); the clipped surrogate stands for plain policy gradient, and with one pass over the data they are the same;
MiniLLM's length normalisation and mixed-in teacher samples are left out. Both log-probs are at the agent's sampling
temperature. Prompts are taken as given: the gradient ignores that a policy's text shapes later prompts.
With `training.max_staleness` log π is that of the weights that sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit, Data, Taught, Update
from kapelle.algorithms.shared.groups import Comparison, Earlier, Member, compared_values, place_of
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.algorithms.signals.teacher import TEACHER, TeacherLogProbs
from kapelle.functional.advantages import leave_one_out
from kapelle.functional.returns import return_to_go
from kapelle.functional.shaping import kl_in_reward
from kapelle.rows import Signals, TurnKey, in_rounds
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings
from kapelle.types import Group


class Distill(Settings, Taught):
    """Settings of distillation on policy."""

    name: Literal["distill"] = "distill"
    teacher: str | dict[str, str]
    """Path of the model that teaches; an earlier run, of which each policy is taught by its own (`RUN`, `RUN@best`, `RUN@STEP`);
    or the PEFT folder of an adapter. One for all policies, or one for each, by policy. Resolved settings hold the folders."""
    discount: float = Field(default=1.0, ge=0.0, le=1.0)
    """γ: 1 lowers the divergence of whole completions, 0 that of each token alone."""
    group_size: int = Field(default=4, ge=1)
    """Episodes per task; one alone is compared with a running mean of earlier steps."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps into which each pass is divided."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return Algorithm(
            name=self.name,
            policy_loss=SurrogateConfig().build(),
            data=Data(group_size=self.group_size),
            needs=(TeacherLogProbs(self.teacher),),
            update=Update(self.epochs, self.minibatches),
            memory=lambda team, seed: TaughtCredit(self.discount),
        )


AT_ITS_PLACE = Comparison(leave_one_out, start=0.0)
"""Before there are earlier returns a token is compared with 0, the return of a policy that equals its teacher."""


class TaughtCredit:
    """Advantages by a teacher's log-probs; a `CreditMemory` of earlier divergences, at each position.

    It also shows how far each policy is from its teacher.
    """

    def __init__(self, discount: float) -> None:
        """Take γ."""
        self._discount = discount
        self._earlier = Earlier()
        self._row: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return each token's advantage."""
        turns = in_rounds(groups)
        if not turns:
            return {}
        reward: list[Tensor] = []
        members: list[Member] = []
        for key, turn, k in turns:
            reward_T = kl_in_reward(torch.tensor(turn.logprobs), signals[TEACHER][key], beta=1.0)
            reward.append(reward_T)
            return_T = return_to_go(reward_T[None], torch.ones_like(reward_T)[None], self._discount)[0]
            place = place_of(groups[key.group].episodes[key.episode], turn.agent)
            members += [
                Member((key.group, turn.agent, k, t), value, 1, (key,), (*place, k, t))
                for t, value in enumerate(return_T.tolist())
            ]
        advantage_K = torch.tensor(compared_values(members, AT_ITS_PLACE, self._earlier))
        pieces = advantage_K.split([len(reward_T) for reward_T in reward])
        policies = [turn.policy for _, turn, _ in turns]
        row: dict[str, float] = {}
        for name in dict.fromkeys(policies):
            own = [reward_T for policy, reward_T in zip(policies, reward, strict=True) if policy == name]
            row[f"teacher_kl/{name}"] = -float(torch.cat(own).mean())
        self._row = row
        return {key: Credit(piece_T) for (key, _, _), piece_T in zip(turns, pieces, strict=True)}

    def metrics(self) -> Mapping[str, float]:
        """Return each policy's reverse KL to its teacher, nats per token, as sampled."""
        return self._row

    def state(self) -> dict[str, object]:
        """Return the earlier returns' means and variances."""
        return {"earlier": self._earlier.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._earlier.load_state(state["earlier"])
