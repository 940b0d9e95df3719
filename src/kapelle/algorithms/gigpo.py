"""GiGPO: groups within groups, of turns that met the same state (2505.10978).

A = A^E + ω·A^S. A^E is GRPO's: the agent's return over its trajectory against the task's other attempts (eq. 3). A^S compares
turns of the group that met the same state (an anchor state), each with its discounted return-to-go (eq. 5 to 7): what
differs there is what was done there. A state that no other attempt met has nothing to be compared with, and A^S is 0.

`state: context` is all that the agent reads, token for token: equal prompts, so the comparison is exact, and rare where
conversations are kept. `heard` is what the agent has read since its last turn, the authors' `anchor_obs`: met more often,
by turns whose history differs.

Deviations from the paper:

- A state that an attempt meets again is compared with the other attempts alone, with `scale: none`. The paper's mean holds the attempt's
  own later returns, which depend on what it did; `scale: std` is the paper's.
- `alone: episode` gives a lone state A^E as its A^S. With 0, states that the policy seldom meets weigh less, which bends
  the expected update; with A^E, `scale: none` and `gamma: 1` it is a multiple of ∇J.
- States are compared exactly. The authors' code can also cluster texts that are alike.
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
    """`std` divides both levels by the spread of what is compared; `none` leaves differences, the authors' `mean_norm`."""
    omega: float = Field(default=1.0, ge=0.0)
    """Weight ω of the step's advantage beside the episode's; 0 is `grpo`."""
    gamma: float = Field(default=0.95, ge=0.0, le=1.0)
    """Discount of rewards from one of the agent's turns to the next, in the step's advantage."""
    state: Literal["context", "heard"] = "context"
    """What must be equal: all that the agent reads (`context`), or the messages since its last turn (`heard`)."""
    alone: Literal["zero", "episode"] = "zero"
    """The step's advantage of a state that no other attempt met: `zero`, as in the paper, or the episode's advantage."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
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
        for member in by_state(groups, reward, gamma=self.gamma, latest=self.state == "heard"):
            sets.setdefault(member.place, []).append(member)
        attempts = max([len(group.valid) for group in groups], default=0)
        step = {}
        for members in sets.values():
            for member, advantage in zip(members, self._within(members, attempts), strict=True):
                (key,) = member.keys
                lone = episode[key] if self.alone == "episode" else 0.0
                step[key] = lone if advantage is None else advantage
        return spread(self, groups, {key: own + self.omega * step[key] for key, own in episode.items()})

    def _within(self, members: Sequence[Member], attempts: int) -> list[float | None]:
        """Return each turn's advantage among those that met its state; None where no other attempt met it."""
        value_B = torch.tensor([member.value for member in members], dtype=torch.float64)
        by_B = torch.tensor([member.keys[0].episode for member in members])
        # Turns × turns: 1 where another attempt met the state. What the own attempt earns later depends on what is judged.
        others_BB = (by_B[:, None] != by_B).double()
        count_B = others_BB.sum(1)
        if self.scale == "std":
            advantage_B = group_scaled(value_B, torch.zeros_like(by_B), 1)
        else:
            # (N − 1)/N of the difference, as a full set's R − mean has it (`Comparison.resized`).
            advantage_B = (value_B - others_BB @ value_B / count_B.clamp(min=1)) * (attempts - 1) / attempts
        return [a if n else None for a, n in zip(advantage_B.tolist(), count_B.tolist(), strict=True)]
