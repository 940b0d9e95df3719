"""GiGPO: the advantage of GRPO plus a step advantage among turns in the same state (arXiv:2505.10978).

    A = A^E + ω·A^S

A^E is the advantage of GRPO: the agent's return over its trajectory, compared with the other episodes of the task (eq. 3).
A^S compares turns of the group that start in the same state (an anchor state) by their discounted returns-to-go (eq. 5 to 7).
If no other episode reaches a state, A^S is 0.

With `state: context`, a state is the whole prompt, token for token. The comparison is then exact, but states rarely repeat in
multi-turn conversations. With `state: new_messages` (the authors' `anchor_obs`), a state is what the agent has read since its
last turn. Such states repeat more often, but the histories before them differ.

Deviations from the paper:

- With `scale: none`, a turn in a state that its episode reaches several times is compared with other episodes only. The
  paper's mean includes the episode's own later returns, which depend on the action of the turn; `scale: std` is the paper's
  form.
- With `alone: episode`, A^S of a state that no other episode reaches is A^E. With `alone: zero`, A^S of such states is 0,
  which gives rare states less weight and biases the expected update. With `alone: episode`, `scale: none` and `gamma: 1`, the
  expected update is a multiple of ∇J.
- Only identical states are compared. The authors' code can also cluster similar texts.
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
    """Settings of GiGPO (group-in-group policy optimisation)."""

    name: Literal["gigpo"] = "gigpo"
    scale: Literal["std", "none"] = "std"
    """How advantages are scaled: `std` divides both advantages by the standard deviation of their comparison set, and `none`
    (the authors' `mean_norm`) does not scale them."""
    omega: float = Field(default=1.0, ge=0.0)
    """ω, the weight of the step advantage. With 0, the advantage is the same as in `grpo`."""
    gamma: float = Field(default=0.95, ge=0.0, le=1.0)
    """The discount from one turn of an agent to its next turn in the step advantage."""
    state: Literal["context", "new_messages"] = "context"
    """The definition of a state: the whole prompt (`context`), or the messages since the agent's last turn (`new_messages`)."""
    alone: Literal["zero", "episode"] = "zero"
    """The step advantage in a state that no other episode reaches: 0 as in the paper (`zero`), or the advantage of the whole
    episode (`episode`)."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return the advantage A^E + ω·A^S for every token of each turn."""
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
        """Return, for each turn, its advantage among the turns in the same state, or None if no other episode reaches the state.

        The argument `most` is the largest number of valid episodes of a task.
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
