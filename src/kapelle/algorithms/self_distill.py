"""Self-distillation: each policy learns from itself with more in the prompt, on its own samples.

The same weights compute the probability of a completion y for its prompt x, π(·|x), and for a prompt that also contains a
context c, T = π(·|x, c). The context is what the policy does not observe at test time: feedback of the environment, a correct answer
or another agent's critique. The loss is a divergence from the self-teacher T at the positions t that the policy reaches,

    Σ_t D(π(·|x, y_{<t}) ‖ T(·|x, c, y_{<t})),    T without gradient

(SDPO, arXiv:2601.20802, with the reverse KL or Jensen–Shannon divergence; SDFT, arXiv:2601.19897, with the reverse KL and a
demonstration as context). With u = T(y_t)/π(y_t), the score-function gradient of a divergence E_π[f(u)] has the weight f(u) −
u·f'(u), which gives each token the advantage

    reverse, KL(π ‖ T):           A = log u
    forward, KL(T ‖ π):           A = u − 1
    jensen_shannon:               A = ½·log((1 + u)/2)

plus constants that do not change the expected gradient. All three are 0 where the context changes nothing. Turns without a context
are not trained on; the metric `taught_share` counts the others. Rewards only decide which episodes count as correct answers
(`success`).

Deviations from the papers:

- The divergence is estimated from the sampled tokens and not summed over the (most likely) vocabulary, because the train engine
  returns the log-probs of given tokens. Alternatives that were not sampled are learned from only through normalisation.
- If the context depends on the completion, as feedback does, the expected gradient is that of E_y[log π(y) − log T(y|c(y))], in
  which each token is judged by the feedback on its own completion.
- With `reference_every`, the teacher is a copy that is replaced every so many steps; SDPO has a moving average of the weights.
- The clipped surrogate replaces SDPO's truncated importance weights; with one pass over the data, both have the same gradient.
- SDPO's mixture of this advantage with that of GRPO is omitted.
- log π is the log-prob of the sampler. With `training.max_staleness`, it is computed with the weights that sampled the completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit, CreditMemory, Data, Update
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.algorithms.signals.reference import refreshed
from kapelle.algorithms.signals.self_teacher import (
    OPENINGS,
    SELF_TEACHER,
    SelfTeacherLogProbs,
    SlowSelfTeacher,
)
from kapelle.errors import ConfigError, did_you_mean
from kapelle.functional.divergences import Divergence, towards
from kapelle.rows import Signals, TurnKey, turns_of
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.settings.base import Settings
from kapelle.team import Team
from kapelle.types import Group


class SelfDistill(Settings):
    """Settings of self-distillation."""

    name: Literal["self_distill"] = "self_distill"
    context: tuple[str, ...] = Field(default=("sibling", "feedback"), min_length=1)
    """Sources of the context; each turn has the first one that exists. `sibling`: the same turn in another episode of the group that
    succeeded. `solution`: the field `solution` or `answer` of the task's data. `feedback`: what the agent reads after the turn, or
    after its last turn what the environment reports. The name of an agent: what this agent writes after the turn."""
    success: float = Field(default=1.0, gt=0.0)
    """The lowest score of an episode that counts as a correct answer: `success`, or the agent's return if there is no such score."""
    divergence: Divergence = "reverse"
    """The divergence from the self-teacher: KL(π ‖ T) (`reverse`), KL(T ‖ π) (`forward`), or `jensen_shannon`."""
    reference_every: int = Field(default=0, ge=0)
    """With 0, the current weights are the teacher. Otherwise, the teacher is a copy of the policy that is replaced every so many
    steps, which changes more slowly than the policy."""
    group_size: int = Field(default=4, ge=1)
    """The number of episodes per task."""
    epochs: int = Field(default=1, ge=1)
    """The number of passes over the samples of each step."""
    minibatches: int = Field(default=1, ge=1)
    """The number of optimiser steps into which each pass over the samples is divided."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        slow = self.reference_every > 0
        teacher = SelfTeacherLogProbs(self.context, self.success, is_slow=slow)
        return Algorithm(
            name=self.name,
            policy_loss=SurrogateConfig().build(),
            data=Data(group_size=self.group_size),
            needs=(SlowSelfTeacher(teacher) if slow else teacher,),
            update=Update(self.epochs, self.minibatches),
            memory=lambda team, seed: SelfTaughtCredit(self.divergence),
            after_update=refreshed(self.reference_every),
            checks=(self.check_sources,),
            lacks="no turn has a context",
        )

    def check_sources(self, team: Team) -> None:
        """Raise ConfigError for a source of contexts that is unknown, or that needs more episodes per task."""
        known = (*OPENINGS, *team.names)
        for source in self.context:
            if source not in known:
                raise ConfigError(
                    f"`algorithm.context` names '{source}', which is neither a source of contexts ({', '.join(OPENINGS)}) nor an agent "
                    f"of this team.{did_you_mean(source, known)}"
                )
        if self.context == ("sibling",) and self.group_size == 1:
            raise ConfigError(
                "`algorithm.context: [sibling]` needs other episodes of the same task. Set `algorithm.group_size` to at least 2."
            )


class SelfTaughtCredit(CreditMemory):
    """Compute advantages from the log-probs of the self-teacher. The metrics report the last step; there is no other state."""

    def __init__(self, divergence: Divergence = "reverse") -> None:
        self._divergence = divergence
        self._metrics: dict[str, float] = {}

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return the advantage of each token. Turns without a context have weight 0."""
        credit: dict[TurnKey, Credit] = {}
        turns: dict[str, int] = {}
        log_ratios: dict[str, list[Tensor]] = {}
        taught = signals[SELF_TEACHER]
        for key, turn in turns_of(groups):
            own_T = torch.tensor(turn.logprobs)
            turns[turn.policy] = turns.get(turn.policy, 0) + 1
            if key not in taught:
                credit[key] = Credit(torch.zeros_like(own_T), weight=0.0)
                continue
            log_ratio_T = taught[key].float() - own_T
            log_ratios.setdefault(turn.policy, []).append(log_ratio_T)
            credit[key] = Credit(towards(log_ratio_T, self._divergence))
        self._metrics = {}
        for policy, count in turns.items():
            found = log_ratios.get(policy, [])
            self._metrics[f"taught_share/{policy}"] = len(found) / count
            if found:
                self._metrics[f"self_teacher_kl/{policy}"] = -float(torch.cat(found).mean())
        return credit

    def metrics(self) -> Mapping[str, float]:
        """Return the share of turns with a context, and log π − log T at their tokens, in nats per token."""
        return self._metrics
