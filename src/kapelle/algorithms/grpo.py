"""GRPO for teams: each completion's return is compared with the mean of the completions in its group.

Group relative policy optimisation (2402.03300):

    A = (R − mean_g) / (std_g + ε)

Options give its variants:

- `scale: none` is Dr.GRPO's advantage (2503.20783); with `loss.aggregation: sequence_sum` it is Dr.GRPO's whole loss.
- `loss.level: sequence` is GSPO (2507.18071), `loss.kind: cispo` is CISPO (2506.13585), `loss.kind: sapo` is SAPO
  (2511.20347).
- `loss.clip_high` above `clip_low`, `redraw` and `penalties.overlong_buffer` are DAPO (2503.14476).

`compare` defines the comparison set. All turns of a trajectory get the trajectory's advantage.

- `agent`: an agent's return, after team-reward sharing, is compared with the same agent's returns in the group.
- `episode`: the whole episode's return is compared, with the team's rewards counted once, and every agent gets its advantage.
  The two differ only if agents receive different rewards.
- `prompt`: turns with the same prompt are compared, across all agents of one policy, by their agents' own returns from that
  turn on. These are R-Zero's groups (2508.05004), in which a solver's answers to one problem are compared.

Deviations from the paper:

- There is no KL penalty by default; `loss.kl_coefficient` turns it on.
- All tokens of the global batch have equal weight; `loss.aggregation: sequence_mean` is the paper's form.
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
    """Settings of group relative policy optimisation."""

    name: Literal["grpo"] = "grpo"
    compare: Literal["agent", "episode", "prompt"] = "agent"
    """Comparison set: an agent's returns in the group (`agent`), whole episodes' returns (`episode`), or the returns of all
    turns of a policy with the same prompt (`prompt`, which needs `team_reward: individual`)."""
    scale: Literal["std", "none"] = "std"
    """`std` divides by the standard deviation, as in GRPO; `none` does not, as in Dr.GRPO (2503.20783)."""
    redraw: int = Field(default=0, ge=0)
    """Maximum number of times that a group without variance is replaced by another task's group (DAPO's dynamic sampling)."""

    @model_validator(mode="after")
    def _own_reward_per_prompt(self) -> GRPO:
        if self.compare == "prompt" and self.team_reward != "individual":
            raise ValueError(
                f"`compare: prompt` compares agents of one episode, but `team_reward: {self.team_reward}` gives them a common "
                "reward; set `team_reward: individual`, or `compare: agent`"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return self.row(self.name, judge=self.credit, redraw=self.redraw)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A = (R − mean_g) / (std_g + ε) for every token of each turn; with `scale: none`, A = R − mean_g."""
        if self.compare == "episode":
            members = by_episode(groups, self.joint_rewards(groups, signals))
        elif self.compare == "prompt":
            members = by_prompt(groups, self.rewards(groups, signals))
        else:
            members = by_agent(groups, self.rewards(groups, signals))
        return spread(self, groups, compare(members, BY_SCALE[self.scale], earlier))
