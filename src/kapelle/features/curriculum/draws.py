"""The tasks of steps by difficulty: those within the wanted solve rates, with easy tasks first in a curriculum."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil, inf
from typing import TYPE_CHECKING

from kapelle.environment import task_of
from kapelle.errors import ConfigError
from kapelle.features.curriculum.settings import CurriculumConfig
from kapelle.runtime.randomness import derive_seed
from kapelle.types import Task

if TYPE_CHECKING:
    from kapelle.training.selection import EpochDraws

LOOKED_AT = 512
"""Number of tasks of an infinite split that are compared by difficulty."""
SOLVE_RATE = "solve_rate"
"""Word in place of a field name that selects the measured solve rate (`tasks.difficulty`)."""
_LAST_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?=\D*$)")


def hardness(task: Task, field: str) -> float:
    """Return the difficulty of a task: the number in a field of its data, or the last number in its text.

    Tasks without a number have infinite difficulty and come last. Raises ConfigError for a field that does not exist.
    """
    if field not in task.data:
        known = ", ".join(sorted(task.data)) or "none"
        raise ConfigError(
            f"`tasks.curriculum.by: {field}` is not a field of task {task.id} (its fields: {known}). Use one of these, or `{SOLVE_RATE}`."
        )
    value = task.data[field]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    number = _LAST_NUMBER.search(value) if isinstance(value, str) else None
    return float(number.group()) if number else inf


class DrawsByDifficulty:
    """Draws the tasks of steps: from the easiest share of the tasks during a curriculum, and later as in `EpochDraws`."""

    def __init__(self, epochs: EpochDraws) -> None:
        self._epochs, self._config, self._environment = epochs, epochs.config, epochs.environment
        self.rates: Mapping[int, float] | None = None
        """Index of a task → measured solve rate."""
        self._hard: Mapping[int, float] = {}
        """Index of a task of a finite split → difficulty."""
        self._levels: Sequence[float] | None = None
        """Difficulties, ascending, once they are known."""

    @cached_property
    def measured(self) -> Sequence[int]:
        """The indices of the tasks whose solve rates are measured."""
        return self._epochs.fitting

    @property
    def left(self) -> Sequence[int]:
        """The indices of the tasks that training uses."""
        return self._epochs.fitting

    def use(self, rates: Mapping[int, float]) -> None:
        """Exclude tasks by their measured solve rates; raises ConfigError if this excludes all tasks."""
        wanted = self._config.tasks.difficulty
        assert wanted is not None, "rates are measured only with this section"
        self.rates, self._levels = rates, None
        left = [k for k in self.measured if k not in rates or wanted.low <= rates[k] <= wanted.high]
        if not left:
            known = [rates[k] for k in self.measured if k in rates]
            raise ConfigError(
                f"`tasks.difficulty` excludes all {len(known)} tasks: their solve rates are {min(known):.0%} to {max(known):.0%}, but "
                f"`low` and `high` are {wanted.low:.0%} and {wanted.high:.0%}. Widen this range."
            )
        self._epochs.fitting = left

    def of(self, step: int, attempt: int) -> list[Task]:
        """Return the tasks of a step; see `Draws`."""
        wanted = self._config.tasks.curriculum
        hardest = inf if wanted is None else self._hardest(wanted, step)
        if wanted is None or hardest == inf:
            return self._epochs.of(step, attempt)
        if self._environment.size("train") is None:
            return self._epochs.of(step, attempt, lambda task: hardness(task, wanted.by) <= hardest)
        easy = [k for k in self.left if self._hard[k] <= hardest]
        count = self._config.training.tasks_per_step
        draw = random.Random(derive_seed(self._config.seed, "curriculum", step, attempt))
        chosen: list[int] = []
        while len(chosen) < count:
            chosen += draw.sample(easy, min(len(easy), count - len(chosen)))
        return [task_of(self._environment, "train", index) for index in chosen]

    def _hardest(self, wanted: CurriculumConfig, step: int) -> float:
        """Return the greatest difficulty of a step's tasks; infinite after the curriculum."""
        share = wanted.start + (1.0 - wanted.start) * (step - 1) / wanted.steps
        if share >= 1.0:
            return inf
        if self._levels is None:
            endless = self._environment.size("train") is None
            indices = range(LOOKED_AT) if endless else self.left
            if self.rates is not None and wanted.by == SOLVE_RATE:
                self._hard = {k: 1.0 - self.rates.get(k, 0.0) for k in indices}
            else:
                tasks = {k: task_of(self._environment, "train", k) for k in indices}
                self._hard = {k: hardness(task, wanted.by) for k, task in tasks.items()}
            self._levels = sorted(self._hard.values())
        return self._levels[ceil(share * len(self._levels)) - 1]
