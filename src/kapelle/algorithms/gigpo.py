"""GiGPO: GRPO's advantage plus a step advantage among turns that met the same state (2505.10978).

    A = A^E + ω·A^S

A^E is GRPO's: the agent's return over its trajectory, compared with the task's other episodes (eq. 3). A^S compares turns of
the group that met the same state (an anchor state), each with its discounted return-to-go (eq. 5 to 7). A state that no other
episode met has A^S = 0.

With `state: context`, a state is the whole prompt, token for token. The comparison is then exact, but states rarely repeat in
multi-turn conversations. With `new_messages` (the authors' `anchor_obs`), it is what the agent has read since its last
turn. Such states repeat more often, but their histories differ.

Deviations from the paper:

- With `scale: none`, a state that an episode meets several times is compared with the other episodes only. The paper's mean
  includes the episode's own later returns, which depend on its action; `scale: std` is the paper's form.
- `alone: episode` uses A^E as the A^S of a state that no other episode met. With 0, rare states have less weight, which
  biases the expected update. With A^E, `scale: none` and `gamma: 1`, the expected update is a multiple of ∇J.
- States must be equal. The authors' code can also cluster similar texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import BY_SCALE, Earlier, Member, by_agent, by_state, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.functional.advantages import group_scaled
from kapelle.rows import Signals, TurnKey
from kapelle.runtime.on_demand import torch
from kapelle.types import Group


class GiGPO(MonteCarlo):
    """Settings of group-in-group policy optimisation."""

    name: Literal["gigpo"] = "gigpo"
    scale: Literal["std", "none"] = "std"
    """`std` divides both advantages by the standard deviation of the set; `none` (the authors' `mean_norm`) does not."""
    omega: float = Field(default=1.0, ge=0.0)
    """ω, the weight of the step advantage; with 0, the advantage is that of `grpo`."""
    gamma: float = Field(default=0.95, ge=0.0, le=1.0)
    """Discount from one of the agent's turns to the next, in the step advantage."""
    state: Literal["context", "new_messages"] = "context"
    """Definition of equal states: equal prompts (`context`), or equal messages since the agent's last turn (`new_messages`)."""
    alone: Literal["zero", "episode"] = "zero"
    """Step advantage of a state that no other episode met: `zero`, as in the paper, or the episode's advantage."""

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A^E + ω·A^S for every token of each turn."""
        reward = self.rewards(groups, signals)
        episode = compare(by_agent(groups, reward), BY_SCALE[self.scale], earlier)
        if self.omega == 0.0:
            return spread(self, groups, episode)
        sets: dict[tuple[int | str, ...], list[Member]] = {}
        for member in by_state(groups, reward, gamma=self.gamma, latest=self.state == "new_messages"):
            sets.setdefault(member.place, []).append(member)
        most = max([len(group.valid) for group in groups], default=0)
        step = {}
        for members in sets.values():
            for member, advantage in zip(members, self._within(members, most), strict=True):
                (key,) = member.keys
                without_others = episode[key] if self.alone == "episode" else 0.0
                step[key] = without_others if advantage is None else advantage
        return spread(self, groups, {key: own + self.omega * step[key] for key, own in episode.items()})

    def _within(self, members: Sequence[Member], most: int) -> list[float | None]:
        """Return each turn's advantage among the turns that met the same state; None if no other episode met it.

        `most` is the largest number of valid episodes of a task.
        """
        value_B = torch.tensor([member.value for member in members], dtype=torch.float64)
        episode_B = torch.tensor([member.keys[0].episode for member in members])
        # Turns × turns: 1 for turns of other episodes. Later returns of the turn's own episode depend on its action.
        others_BB = (episode_B[:, None] != episode_B).double()
        count_B = others_BB.sum(1)
        if self.scale == "std":
            advantage_B = group_scaled(value_B, torch.zeros_like(episode_B), 1)
        else:
            # Scale by (N − 1)/N, as in R − mean of a full set (`Comparison.resized`).
            advantage_B = (value_B - others_BB @ value_B / count_B.clamp(min=1)) * (most - 1) / most
        return [a if n else None for a, n in zip(advantage_B.tolist(), count_B.tolist(), strict=True)]
