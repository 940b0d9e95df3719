"""On-policy distillation: each policy learns from a frozen teacher on its own samples.

The loss is the reverse KL to the teacher over whole completions y of the team's prompts x,

    KL(π(·|x) ‖ T(·|x)) = E_{y~π}[Σ_t log π(y_t) − log T(y_t)]

(generalised knowledge distillation of 2306.13649 with λ = 1 and the reverse KL; MiniLLM, 2306.08543, eq. 2). Its gradient is
E[Σ_t ∇log π(y_t) · Σ_{s≥t} (log π(y_s) − log T(y_s))], so the advantage of a token is

    R_t = Σ_{s≥t} γ^{s−t} · (log T(y_s) − log π(y_s)),    A_t = R_t − mean R_t in the task's other episodes

with γ = `discount` = 1. The mean is over the same turn of the same agent at the same position t. It is independent of the
sample, and removes what all episodes have in common, which is most of R_t while policy and teacher are far apart. If no other
episode has such a token, the baseline is a running mean over earlier steps, which the checkpoint keeps.

`discount: 0` keeps only each token's own term: the sum of per-token KLs at the positions that the policy reaches, ignoring
the effect of tokens on later positions. Rewards and critics are not used.

Deviations from the papers:

- The divergence is sampled, not summed over the vocabulary, because a teacher's logits are not kept.
- The clipped surrogate replaces plain policy gradient; with one pass over the data they are equal.
- MiniLLM's length normalisation and its mixed-in teacher samples are omitted.
- Both log-probs are at the agent's sampling temperature.
- Prompts are treated as given: the gradient ignores that a policy's text shapes later prompts.
- With `training.max_staleness`, log π is computed with the weights that sampled.
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
    """Settings of on-policy distillation."""

    name: Literal["distill"] = "distill"
    teacher: str | dict[str, str]
    """Teacher: a model's path, the PEFT folder of an adapter, or an earlier run (`RUN`, `RUN@best`, `RUN@STEP`), in which
    each policy's teacher is the policy of the same name. Give one teacher for all policies, or a mapping from policies to
    teachers. Resolved settings contain the folders."""
    discount: float = Field(default=1.0, ge=0.0, le=1.0)
    """γ: 1 minimises the divergence of whole completions, and 0 minimises that of single tokens."""
    group_size: int = Field(default=4, ge=1)
    """Episodes per task; with 1, the baseline is a running mean over earlier steps."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the samples of a step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps into which each pass is divided."""

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return Algorithm(
            name=self.name,
            policy_loss=SurrogateConfig().build(),
            data=Data(group_size=self.group_size),
            needs=(TeacherLogProbs(self.teacher),),
            update=Update(self.epochs, self.minibatches),
            memory=lambda team, seed: TaughtCredit(self.discount),
        )


BY_POSITION = Comparison(leave_one_out, start=0.0)
"""Value with which a token is compared before there are earlier returns: the return of a policy that equals its teacher."""


class TaughtCredit:
    """Advantages from a teacher's log-probs; a `CreditMemory` of earlier returns per position.

    Its metrics report each policy's divergence from its teacher.
    """

    def __init__(self, discount: float) -> None:
        """Take γ."""
        self._discount = discount
        self._earlier = Earlier()
        self._metrics: dict[str, float] = {}

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
        advantage_K = torch.tensor(compared_values(members, BY_POSITION, self._earlier))
        pieces = advantage_K.split([len(reward_T) for reward_T in reward])
        policies = [turn.policy for _, turn, _ in turns]
        self._metrics = {}
        for name in dict.fromkeys(policies):
            own = [reward_T for policy, reward_T in zip(policies, reward, strict=True) if policy == name]
            self._metrics[f"teacher_kl/{name}"] = -float(torch.cat(own).mean())
        return {key: Credit(piece_T) for (key, _, _), piece_T in zip(turns, pieces, strict=True)}

    def metrics(self) -> Mapping[str, float]:
        """Return each policy's reverse KL to its teacher at the sampled tokens, in nats per token."""
        return self._metrics

    def state(self) -> dict[str, object]:
        """Return the means and variances of earlier returns."""
        return {"earlier": self._earlier.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._earlier.load_state(state["earlier"])
