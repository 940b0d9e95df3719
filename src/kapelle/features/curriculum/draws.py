"""Draw the tasks of steps by difficulty: only tasks within a range of solve rates, and with a curriculum, easy tasks first."""

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
"""Number of tasks of an unlimited split whose difficulties are compared."""
SOLVE_RATE = "solve_rate"
"""Value of `tasks.curriculum.by` that selects the measured solve rate (`tasks.difficulty`) instead of a field."""
_LAST_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?=\D*$)")


def hardness(task: Task, field: str) -> float:
    """Return the difficulty of a task, which is the number in a field of its data or the last number in the text of this field.

    Tasks without a number have infinite difficulty and come last. Raises ConfigError if the field does not exist.
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
    """Draws the tasks of steps by difficulty.

    During a curriculum, tasks are drawn from the easiest share of the tasks, and later as in `EpochDraws`.
    """

    def __init__(self, epochs: EpochDraws) -> None:
        self._epochs, self._config, self._environment = epochs, epochs.config, epochs.environment
        self.rates: Mapping[int, float] | None = None
        """Mapping from the index of each task to its measured solve rate."""
        self._hard: Mapping[int, float] = {}
        """Mapping from the index of each task of a finite split to its difficulty."""
        self._levels: Sequence[float] | None = None
        """Difficulties in ascending order, or None if they are not yet known."""

    @cached_property
    def measured(self) -> Sequence[int]:
        """The indices of the tasks whose solve rates are measured."""
        return self._epochs.fitting

    @property
    def left(self) -> Sequence[int]:
        """The indices of the tasks that training uses."""
        return self._epochs.fitting

    def use(self, rates: Mapping[int, float]) -> None:
        """Exclude tasks by their measured solve rates. Raises ConfigError if this excludes all tasks."""
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
        """Return the maximum difficulty of the tasks of a step, which is infinite after the curriculum."""
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
