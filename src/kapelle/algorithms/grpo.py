"""GRPO for teams: the return of each completion is compared with the mean return of the completions in its group.

The advantage of group relative policy optimisation (arXiv:2402.03300) is

    A = (R − mean_g) / (std_g + ε)

The settings of this class select variants of GRPO:

- `scale: none` is the advantage of Dr.GRPO (arXiv:2503.20783). With `loss.aggregation: sequence_sum` as well, the loss is
  also that of Dr.GRPO.
- `scale: mean` is the advantage of MaxRL (arXiv:2602.02710), A = (R − mean_g) / mean_g. A group of N episodes with rewards 0
  and 1 and with the success rate p then follows the gradient of −Σ_{k=1}^{N−1} (1 − p)^k / k, which approaches log p as N
  grows. Returns must be at least 0.
- `loss.level: sequence` is GSPO (arXiv:2507.18071), `loss.kind: cispo` is CISPO (arXiv:2506.13585), `loss.kind: sapo` is SAPO
  (arXiv:2511.20347), and `loss.kind: dppo` is DPPO (arXiv:2602.04879).
- `loss.clip_high` above `loss.clip_low`, `redraw` and `penalties.overlong_buffer` together are DAPO (arXiv:2503.14476).

The setting `compare` defines the comparison set. All turns of a trajectory have the advantage of the trajectory.

- `agent`: an agent's return, after team-reward sharing, is compared with the same agent's returns in the group.
- `episode`: the return of the whole episode is compared, with the team's rewards counted once, and all agents have the same
  advantage. `agent` and `episode` differ only if the agents receive different rewards.
- `prompt`: turns with the same prompt are compared, across all agents of one policy, by the returns of their agents from that
  turn on. R-Zero (arXiv:2508.05004) uses such groups, in which a solver's answers to one problem are compared.

Deviations from the paper:

- There is no KL penalty by default. The setting `loss.kl_coefficient` turns it on.
- All tokens of the global batch have equal weight. The paper's form is `loss.aggregation: sequence_mean`.
- There is one update per batch by default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import (
    BY_SCALE,
    Earlier,
    Member,
    by_agent,
    by_episode,
    by_prompt,
    compare,
)
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.errors import AlgorithmError
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group


class GRPO(MonteCarlo):
    """Settings of GRPO (group relative policy optimisation)."""

    name: Literal["grpo"] = "grpo"
    compare: Literal["agent", "episode", "prompt"] = "agent"
    """The comparison set: the returns of one agent in the group (`agent`), the returns of whole episodes (`episode`), or the
    returns of all turns of a policy with the same prompt (`prompt`, which needs `team_reward: individual`)."""
    scale: Literal["std", "none", "mean"] = "std"
    """How advantages are scaled: `std` divides by the standard deviation as in GRPO, `mean` divides by the mean return as in
    MaxRL (arXiv:2602.02710), and `none` does not divide, as in Dr.GRPO (arXiv:2503.20783). With `mean`, returns must be at least
    0."""
    redraw: int = Field(default=0, ge=0)
    """The maximum number of times that a group whose returns are all equal is replaced by the group of another task (dynamic
    sampling in DAPO)."""

    @model_validator(mode="after")
    def _own_reward_per_prompt(self) -> GRPO:
        if self.compare == "prompt" and self.team_reward != "individual":
            raise ValueError(
                f"`compare: prompt` compares agents of one episode, but `team_reward: {self.team_reward}` gives them a common "
                "reward; set `team_reward: individual`, or `compare: agent`"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit, redraw=self.redraw)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the advantage A = (R − mean_g) / (std_g + ε) for every token of each turn.

        With `scale: none`, A = R − mean_g. With `scale: mean`, A = (R − mean_g) / mean_g.

        Raises AlgorithmError with `scale: mean` if a return is below 0.
        """
        if self.compare == "episode":
            members = by_episode(groups, self.joint_rewards(groups, signals))
        elif self.compare == "prompt":
            members = by_prompt(groups, self.rewards(groups, signals))
        else:
            members = by_agent(groups, self.rewards(groups, signals))
        if self.scale == "mean":
            _need_at_least_0(members)
        return spread(self, groups, compare(members, BY_SCALE[self.scale], earlier))


def _need_at_least_0(members: Sequence[Member]) -> None:
    lowest = min(members, key=lambda member: member.value, default=None)
    if lowest is not None and lowest.value < 0:
        key = lowest.keys[0]
        raise AlgorithmError(
            f"Algorithm 'grpo': `scale: mean` divides by the mean return, but turn {key.turn} of episode {key.episode} of group {key.group} "
            f"has a return of {lowest.value:g}. Use rewards of at least 0 without penalties, or set `scale: none`."
        )
