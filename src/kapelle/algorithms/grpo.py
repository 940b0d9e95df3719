"""GRPO for teams: the return of each completion is compared with the mean return of the completions in its group.

The advantage of group relative policy optimisation (arXiv:2402.03300) is

    A = (R − mean_g) / (std_g + ε)

The settings of this class select variants of GRPO:

- `scale: none` is the advantage of Dr.GRPO (arXiv:2503.20783). With `loss.aggregation: sequence_sum` as well, the loss is
  also that of Dr.GRPO.
- `loss.level: sequence` is GSPO (arXiv:2507.18071), `loss.kind: cispo` is CISPO (arXiv:2506.13585), `loss.kind: sapo` is SAPO
  (arXiv:2511.20347).
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
from kapelle.algorithms.shared.groups import BY_SCALE, Earlier, by_agent, by_episode, by_prompt, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group


class GRPO(MonteCarlo):
    """Settings of GRPO (group relative policy optimisation)."""

    name: Literal["grpo"] = "grpo"
    compare: Literal["agent", "episode", "prompt"] = "agent"
    """The comparison set: the returns of one agent in the group (`agent`), the returns of whole episodes (`episode`), or the
    returns of all turns of a policy with the same prompt (`prompt`, which needs `team_reward: individual`)."""
    scale: Literal["std", "none"] = "std"
    """How advantages are scaled: `std` divides by the standard deviation as in GRPO, and `none` does not, as in Dr.GRPO
    (arXiv:2503.20783)."""
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
        """Return the advantage A = (R − mean_g) / (std_g + ε) for every token of each turn. With `scale: none`, A = R − mean_g."""
        if self.compare == "episode":
            members = by_episode(groups, self.joint_rewards(groups, signals))
        elif self.compare == "prompt":
            members = by_prompt(groups, self.rewards(groups, signals))
        else:
            members = by_agent(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(members, BY_SCALE[self.scale], earlier))
