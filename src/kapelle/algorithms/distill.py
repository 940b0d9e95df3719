"""On-policy distillation: each policy learns from a frozen teacher on its own samples.

The loss is the reverse KL divergence to the teacher over whole completions y for the team's prompts x,

    KL(π(·|x) ‖ T(·|x)) = E_{y~π}[Σ_t log π(y_t) − log T(y_t)]

(generalised knowledge distillation of arXiv:2306.13649 with λ = 1 and the reverse KL; MiniLLM, arXiv:2306.08543, eq. 2). The
gradient of the loss is E[Σ_t ∇log π(y_t) · Σ_{s≥t} (log π(y_s) − log T(y_s))], so the advantage of a token is

    R_t = Σ_{s≥t} γ^{s−t} · (log T(y_s) − log π(y_s)),    A_t = R_t − mean R_t in the task's other episodes

with γ = `discount` = 1. The mean is over tokens at the same position t in the same turn of the same agent. The baseline is
independent of the sampled token. Subtracting the baseline removes what all episodes have in common, which is most of R_t as
long as policy and teacher are far apart. If no other episode has a token at this position, the baseline is a running mean
over earlier steps, which is stored in the checkpoint.

With `discount: 0`, R_t contains only the token's own term. The loss is then the sum of per-token KL divergences at the
positions that the policy reaches, without the effect of a token on later positions. Rewards and critics are not used.

Deviations from the papers:

- The divergence is estimated from the sampled tokens and not summed over the vocabulary, because the teacher's logits are not
  stored.
- The clipped surrogate replaces the plain policy gradient; with one pass over the data, both have the same gradient.
- MiniLLM's length normalisation and its mixing with teacher samples are omitted.
- Both log-probs are computed at the agent's sampling temperature.
- Prompts are treated as given: the gradient ignores the effect of a policy's completions on later prompts.
- With `training.max_staleness`, log π is computed with the weights that sampled the completion.
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
    """The teacher: the path of a model, the PEFT folder of an adapter, or an earlier run (`RUN`, `RUN@best`, `RUN@STEP`).
    With a run, the teacher of each policy is the policy of the same name in that run. Give one teacher for all policies, or a
    mapping from policies to teachers. Resolved settings contain the folders of the teachers."""
    discount: float = Field(default=1.0, ge=0.0, le=1.0)
    """γ, the discount per token: 1 minimises the divergence of whole completions, and 0 minimises the divergence of single
    tokens."""
    group_size: int = Field(default=4, ge=1)
    """The number of episodes per task. With 1, the baseline is a running mean over earlier steps."""
    epochs: int = Field(default=1, ge=1)
    """The number of passes over the samples of each step."""
    minibatches: int = Field(default=1, ge=1)
    """The number of optimiser steps into which each pass over the samples is divided."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return Algorithm(
            name=self.name,
            policy_loss=SurrogateConfig().build(),
            data=Data(group_size=self.group_size),
            needs=(TeacherLogProbs(self.teacher),),
            update=Update(self.epochs, self.minibatches),
            memory=lambda team, seed: TaughtCredit(self.discount),
        )


BY_POSITION = Comparison(leave_one_out, start=0.0)
"""A comparison with the mean of the other episodes. Before there are earlier returns, a lone value is compared with 0, the
return of a policy that equals its teacher."""


class TaughtCredit:
    """A `CreditMemory` that computes advantages from a teacher's log-probs and stores the moments of earlier returns per position.

    The metrics of this class report the divergence of each policy from its teacher.
    """

    def __init__(self, discount: float) -> None:
        """Create an empty memory with the discount γ."""
        self._discount = discount
        self._earlier = Earlier()
        self._metrics: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return the advantage of each token."""
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
        """Return the reverse KL divergence of each policy to its teacher at the sampled tokens, in nats per token."""
        return self._metrics

    def state(self) -> dict[str, object]:
        """Return the running means and variances of earlier returns."""
        return {"earlier": self._earlier.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that a call of `state` returned."""
        self._earlier.load_state(state["earlier"])
