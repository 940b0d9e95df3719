"""The tasks of training steps: each fitting task once per epoch.

They depend on the settings and the number of the step, so a resumed run has the same tasks.
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
"""Number of draws from an infinite split after which the search for a fitting task stops."""

Roles = Sequence[Mapping[str, Cast]]
"""For each task of a step, the agents whose role is taken by another policy or player."""
Assign = Callable[[int, int], Roles]
"""(Number of a step, number of its tasks) → the roles."""


class Draws(Protocol):
    """Draws the tasks of steps."""

    def of(self, step: int, attempt: int) -> list[Task]:
        """Return the tasks of a step (from 1); each `attempt` (from 0) is another draw for the same step."""
        ...


class EpochDraws:
    """Draws each task of the training split once per epoch, in a new random order; from a generated split, draws new tasks."""

    def __init__(self, environment: Environment, config: RunConfig, fits: Fits | None = None) -> None:
        """Draw tasks for which `fits` is true and that are not in an evaluation set; a finite split is searched at the first step."""
        self.environment, self.config = environment, config
        self._fits = untested(config, fits)

    @cached_property
    def fitting(self) -> Sequence[int]:
        """The fitting indices of a finite split; a feature may reduce them to a subset."""
        size, fits = self.environment.size("train"), self._fits
        assert size is not None, "an infinite split has no indices"
        return [k for k in range(size) if fits is None or fits(task_of(self.environment, "train", k))]

    def of(self, step: int, attempt: int, wanted: Fits | None = None) -> list[Task]:
        """Return the tasks of a step; see `Draws`. From a generated split, only `wanted` tasks are drawn."""
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
    """The tasks of every step, with the roles that other policies or players take in them."""

    draws: Draws
    count: int
    """Number of tasks of a step."""
    assign: Assign | None = None
    """Assigns roles in the tasks of the next steps; None means that agents keep their roles."""

    def of(self, step: int, attempt: int = 0) -> list[Task]:
        """Return the tasks of a step with their assigned roles; see `Draws`."""
        tasks, roles = self.draws.of(step, attempt), self.roles(step)
        if roles is None:
            return tasks
        return [replace(task, cast=cast) for task, cast in zip(tasks, roles, strict=True)]

    def roles(self, step: int) -> Roles | None:
        """Return the roles that other policies or players take in each task of a step; None if there are none."""
        return None if self.assign is None else self.assign(step, self.count)


def training_tasks(environment: Environment, config: RunConfig, step: int, attempt: int = 0) -> list[Task]:
    """Return the tasks of a step as `EpochDraws` draws them, without limits on prompts."""
    return EpochDraws(environment, config).of(step, attempt)


def draws_of(environment: Environment, config: RunConfig, fits: Fits | None = None) -> Draws:
    """Return the object that draws the tasks of a run's steps: a feature, or else `EpochDraws`."""
    draws = EpochDraws(environment, config, fits)
    makers = [section.draws for section in sections_of(config).values() if section.draws]
    made: Draws = find_object(makers[0], "feature")(draws) if makers else draws
    return made


def tasks_of(setup: RolloutSetup, config: RunConfig) -> TrainingTasks:
    """Return the tasks of a run's steps."""
    fits = short_enough(config, setup.team, setup.engine.renderer)
    return TrainingTasks(draws_of(setup.environment, config, fits), config.training.tasks_per_step)
