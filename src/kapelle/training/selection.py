"""Select the tasks of training steps. Each task that fits is drawn once per epoch.

The tasks of a step depend only on the settings and the number of the step, so a resumed run has the same tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from kapelle.environment import Environment, task_of
from kapelle.errors import ConfigError
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.plugins import find_object
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.feature import sections_of
from kapelle.settings.schema import RunConfig
from kapelle.setup.problems import Fits, drawn, untested
from kapelle.setup.prompt_lengths import short_enough
from kapelle.types import Cast, Task

REDRAWN = 1000
"""The maximum number of draws from an infinite split in the search for one task that fits."""

Roles = Sequence[Mapping[str, Cast]]
"""For each task of a step, a mapping from agents to the other policies or players that take their roles."""
Assign = Callable[[int, int], Roles]
"""A function from the number of a step and the number of its tasks to the assigned roles."""


class Draws(Protocol):
    """An object that draws the tasks of training steps."""

    def of(self, step: int, attempt: int) -> list[Task]:
        """Return the tasks of a step (starting from 1). Each `attempt` (starting from 0) is another draw for the same step."""
        ...


class EpochDraws:
    """Draw each task of a finite training split once per epoch, in a new random order. From an infinite split, draw new tasks."""

    def __init__(self, environment: Environment, config: RunConfig, fits: Fits | None = None) -> None:
        """Draw only tasks for which `fits` is true and that are not in an evaluation set.

        A finite split is searched at the first step.
        """
        self.environment, self.config = environment, config
        self._fits = untested(config, fits)

    @cached_property
    def fitting(self) -> Sequence[int]:
        """The indices of the tasks of a finite split that fit. A feature may reduce the indices to a subset."""
        size, fits = self.environment.size("train"), self._fits
        assert size is not None, "an infinite split has no indices"
        return [k for k in range(size) if fits is None or fits(task_of(self.environment, "train", k))]

    def of(self, step: int, attempt: int, wanted: Fits | None = None) -> list[Task]:
        """Return the tasks of a step as described in `Draws`.

        From an infinite split, only tasks for which `wanted` is true are drawn.
        """
        count = self.config.training.tasks_per_step
        offset = attempt * self.config.training.steps
        cursors = range((step - 1 + offset) * count, (step + offset) * count)
        if self.environment.size("train") is None:
            first = (step - 1) * count
            return [self._new(cursor, first + number, wanted) for number, cursor in enumerate(cursors)]
        fitting, orders = self.fitting, dict[int, list[int]]()
        for epoch in {cursor // len(fitting) for cursor in cursors}:
            orders[epoch] = list(fitting)
            random.Random(derive_seed(self.config.seed, "epoch", epoch)).shuffle(orders[epoch])
        indices = [orders[cursor // len(fitting)][cursor % len(fitting)] for cursor in cursors]
        return [task_of(self.environment, "train", index) for index in indices]

    def _new(self, cursor: int, played: int, wanted: Fits | None) -> Task:
        for attempt in range(REDRAWN):
            index = drawn(self.config.seed, cursor, *((attempt,) if attempt else ()))
            task = task_of(self.environment, "train", index, played=played)
            if (self._fits is None or self._fits(task)) and (wanted is None or wanted(task)):
                return task
        raise ConfigError(
            f"`tasks` and `evaluation.sets` exclude {REDRAWN} tasks of `{self.environment.name}` in a row. Change `tasks` to exclude fewer tasks, or "
            "evaluate on other problems."
        )


@dataclass(slots=True)
class TrainingTasks:
    """The tasks of all steps, with the roles that other policies or players take in each task."""

    draws: Draws
    count: int
    """The number of tasks per step."""
    assign: Assign | None = None
    """A function that assigns roles in the tasks of the next steps. With None, all agents keep their roles."""

    def of(self, step: int, attempt: int = 0) -> list[Task]:
        """Return the tasks of a step with their assigned roles; see `Draws` for the arguments."""
        tasks, roles = self.draws.of(step, attempt), self.roles(step)
        if roles is None:
            return tasks
        return [replace(task, cast=cast) for task, cast in zip(tasks, roles, strict=True)]

    def roles(self, step: int) -> Roles | None:
        """Return the roles that other policies or players take in each task of a step, or None if no roles are assigned."""
        return None if self.assign is None else self.assign(step, self.count)


def training_tasks(environment: Environment, config: RunConfig, step: int, attempt: int = 0) -> list[Task]:
    """Return the tasks of a step as drawn by `EpochDraws`, without limits on the length of prompts."""
    return EpochDraws(environment, config).of(step, attempt)


def draws_of(environment: Environment, config: RunConfig, fits: Fits | None = None) -> Draws:
    """Return the object that draws the tasks of a run: that of a feature if there is one, and `EpochDraws` otherwise."""
    draws = EpochDraws(environment, config, fits)
    makers = [section.draws for section in sections_of(config).values() if section.draws]
    made: Draws = find_object(makers[0], "feature")(draws) if makers else draws
    return made


def tasks_of(setup: RolloutSetup, config: RunConfig) -> TrainingTasks:
    """Return the object that contains the tasks of all steps of a run."""
    fits = short_enough(config, setup.team, setup.engine.renderer)
    return TrainingTasks(draws_of(setup.environment, config, fits), config.training.tasks_per_step)
