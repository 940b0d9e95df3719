"""GRPO for teams: a completion is judged by how much better it is than the others of its group.

Group relative policy optimisation (2402.03300), A = (R − mean_g) / (std_g + ε). Options give its relatives:

- `scale: none` is Dr.GRPO's advantage (2503.20783); with `loss.aggregation: sequence_sum` its whole loss.
- `loss.level: sequence` is GSPO (2507.18071); `loss.kind: cispo` is CISPO (2506.13585),
  `loss.kind: sapo` SAPO (2511.20347).
- `loss.clip_high` above `clip_low`, `redraw` and `penalties.overlong_buffer` are DAPO (2503.14476).

With `compare: agent` an agent's return, after team-reward sharing, is compared with the same agent's in the group;
with `compare: episode` the whole episode's return is compared, the team's rewards counted once, and every agent gets
its advantage. They differ only where agents are paid differently. All turns of a trajectory get its advantage.
`compare: prompt` compares turns that read the same, those of all agents with one policy, by their agents' own returns from there on:
R-Zero's groups (2508.05004), in which a solver's answers to one problem are compared with one another.

Deviations from the paper: no KL penalty by default (`loss.kl_coefficient` turns it on), tokens of the global
batch weigh the same (`loss.aggregation: sequence_mean` is the paper's), one update per batch by default.
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
    """`agent` compares an agent's return with its own in the group's other episodes, `episode` the whole episode's return, `prompt`
    the returns of all turns of a policy that read the same; that needs `team_reward: individual`."""
    scale: Literal["std", "none"] = "std"
    """`std` as in GRPO; `none` as in Dr.GRPO (2503.20783)."""
    redraw: int = Field(default=0, ge=0)
    """DAPO's dynamic sampling: how often a group without variance is replaced by another task's."""

    @model_validator(mode="after")
    def _own_pay_for_one_prompt(self) -> GRPO:
        if self.compare == "prompt" and self.team_reward != "individual":
            raise ValueError(
                f"`compare: prompt` compares agents of one episode, and `team_reward: {self.team_reward}` pays each for what the others "
                "said: set `team_reward: individual`, or `compare: agent`"
            )
        return self

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return self.row(self.name, judge=self.credit, redraw=self.redraw)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A = (R − mean_g) / (std_g + ε) for every token of each turn; without `scale` A = R − mean_g."""
        if self.compare == "episode":
            attempts = by_episode(groups, self.joint_rewards(groups, signals))
        else:
            attempts = {"agent": by_agent, "prompt": by_prompt}[self.compare](
                groups, self.rewards(groups, signals)
            )
        return spread(self, groups, compare(attempts, BY_SCALE[self.scale], earlier))
