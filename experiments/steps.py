"""Few calculator steps of GSM8K, played again and again."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kapelle.environments.gsm8k_steps import GSM8KSteps
from kapelle.types import Split, Task


class FewSteps(GSM8KSteps):
    """The steps of the train split that stand first, and no others; all of the test split."""

    name: Literal["experiments.steps:FewSteps"] = "experiments.steps:FewSteps"  # type: ignore[assignment]
    only: int = Field(default=64, ge=1)

    def task(self, split: Split, index: int) -> Task:
        """Return the step at an index, in training modulo the number of those that are played."""
        return super().task(split, index % self.only if split == "train" else index)
