"""The tasks of training steps: those that fit the context and the wanted difficulty; in a curriculum, easy tasks come first.

They depend on the settings, the number of the step, and solve rates that are measured once and saved. So a resumed run has the
same tasks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf

from kapelle.environment import Environment, task_of
from kapelle.errors import ConfigError
from kapelle.rollout.episodes import shared_rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.process_tree import doing
from kapelle.runtime.randomness import capture_random, derive_seed, restore_random
from kapelle.settings.schema import RunConfig
from kapelle.setup.preparation import SOLVE_RATE, hardness, short_enough
from kapelle.setup.problems import drawn, untested
from kapelle.types import Cast, Task

REDRAWN = 1000
"""Number of draws from an infinite split after which the search for a fitting task stops."""
LOOKED_AT = 512
"""Number of tasks of an infinite split that a curriculum compares by difficulty."""
PLAYED = 256
"""Number of tasks whose solve rates are measured at once."""

Roles = Sequence[Mapping[str, Cast]]
"""For each task of a step, the agents with a role that another policy or player has."""
Assign = Callable[[int, int], Roles]
"""(Number of a step, number of its tasks) → the roles."""


class TrainingTasks:
    """The tasks of every step: those of the training split that fit, each once per epoch in a new random order.

    During a curriculum each step draws from its share of the tasks.
    """

    def __init__(
        self, environment: Environment, config: RunConfig, fits: Callable[[Task], bool] | None = None
    ) -> None:
        """Take tasks for which `fits` is true and that are in no evaluation set; a finite split is searched at the first step."""
        self._environment, self._config, self._fits = environment, config, untested(config, fits)
        self._left: Sequence[int] | None = None
        """Fitting indices of a finite split, once they are known."""
        self.rates: Mapping[int, float] | None = None
        """Index of a task → measured solve rate."""
        self._hard: Mapping[int, float] = {}
        """Index of a task of a finite split → difficulty."""
        self._levels: Sequence[float] | None = None
        """Difficulties, ascending, once they are known."""
        self.assign: Assign | None = None
        """Assigns roles in the tasks of the next steps; None follows the team map."""

    def of(self, step: int, attempt: int = 0) -> list[Task]:
        """Return the tasks of a step (from 1) with their assigned roles; each `attempt` (from 0) is another draw for the same step."""
        tasks, roles = self._of(step, attempt), self.roles(step)
        if roles is None:
            return tasks
        return [replace(task, cast=cast) for task, cast in zip(tasks, roles, strict=True)]

    def roles(self, step: int) -> Roles | None:
        """Return the roles that other policies or players have in each task of a step; None without any."""
        return None if self.assign is None else self.assign(step, self._config.training.tasks_per_step)

    def _of(self, step: int, attempt: int) -> list[Task]:
        config, environment = self._config, self._environment
        count = config.training.tasks_per_step
        offset = attempt * config.training.steps
        cursors = range((step - 1 + offset) * count, (step + offset) * count)
        hardest = self._hardest(step)
        if environment.size("train") is None:
            first = (step - 1) * count
            return [self._drawn(cursor, first + number, hardest) for number, cursor in enumerate(cursors)]
        left = self._finite()
        if hardest < inf:
            easy = [k for k in left if self._hard[k] <= hardest]
            draw = random.Random(derive_seed(config.seed, "curriculum", step, attempt))
            chosen: list[int] = []
            while len(chosen) < count:
                chosen += draw.sample(easy, min(len(easy), count - len(chosen)))
            return [task_of(environment, "train", index) for index in chosen]
        orders: dict[int, list[int]] = {}
        for epoch in {cursor // len(left) for cursor in cursors}:
            orders[epoch] = list(left)
            random.Random(derive_seed(config.seed, "epoch", epoch)).shuffle(orders[epoch])
        return [
            task_of(environment, "train", orders[cursor // len(left)][cursor % len(left)])
            for cursor in cursors
        ]

    def measure(self, setup: RolloutSetup) -> None:
        """Measure the team's solve rate of each task, once, if the settings select tasks by difficulty."""
        wanted = self._config.tasks.difficulty
        if wanted is None or self.rates is not None:
            return
        doing("measuring how hard the tasks are")
        drawn = capture_random()  # a resumed run skips the measurement and must draw the same afterwards
        rates: dict[int, float] = {}
        left = self._finite()
        for begin in range(0, len(left), PLAYED):
            part = left[begin : begin + PLAYED]
            tasks = [task_of(self._environment, "train", index) for index in part]
            seed = derive_seed(self._config.seed, "difficulty", begin)
            for index, group in zip(part, shared_rollout(setup, tasks, wanted.samples, seed), strict=True):
                scored = [each.success >= 1.0 for each in group.valid if each.success is not None]
                if scored:
                    rates[index] = sum(scored) / len(scored)
        restore_random(drawn)
        self.rates, self._left, self._levels = rates, None, None

    def metrics(self) -> dict[str, float]:
        """Return the number of selected tasks and their solve rate, if rates were measured."""
        if self.rates is None:
            return {}
        left = self._finite()
        solved = [self.rates[k] for k in left if k in self.rates]
        return {
            "tasks_left": float(len(left)),
            "tasks_solve_rate": sum(solved) / len(solved) if solved else 0.0,
        }

    def state(self) -> str:
        """Return the measured rates, for a checkpoint."""
        return json.dumps(None if self.rates is None else list(self.rates.items()))

    def load_state(self, state: str) -> None:
        """Restore what `state` returned."""
        rates = json.loads(state)
        self.rates = None if rates is None else {int(index): float(rate) for index, rate in rates}
        self._left = self._levels = None

    def _drawn(self, cursor: int, played: int, hardest: float) -> Task:
        for attempt in range(REDRAWN):
            index = drawn(self._config.seed, cursor, *((attempt,) if attempt else ()))
            task = task_of(self._environment, "train", index, played=played)
            if (self._fits is None or self._fits(task)) and (hardest == inf or self._value(task) <= hardest):
                return task
        raise ConfigError(
            f"`tasks` and `evaluation.sets` exclude {REDRAWN} tasks of `{self._environment.name}` in a row. Raise "
            "`tasks.max_prompt_tokens` or `tasks.curriculum.start`, or evaluate on other problems."
        )

    def _finite(self) -> Sequence[int]:
        if self._left is not None:
            return self._left
        size, fits = self._environment.size("train"), self._fits
        wanted, rates = self._config.tasks.difficulty, self.rates
        assert size is not None, "an infinite split has no indices"
        left = [k for k in range(size) if fits is None or fits(task_of(self._environment, "train", k))]
        if wanted is not None and rates is not None:
            known = [rates[k] for k in left if k in rates]
            left = [k for k in left if k not in rates or wanted.low <= rates[k] <= wanted.high]
            if not left:
                raise ConfigError(
                    f"`tasks.difficulty` excludes all {len(known)} tasks: their solve rates are {min(known):.0%} to {max(known):.0%}, and "
                    f"`low` and `high` are {wanted.low:.0%} and {wanted.high:.0%}. Widen them."
                )
        self._left = left
        return left

    def _hardest(self, step: int) -> float:
        """Return the greatest difficulty of a step's tasks; infinite without a curriculum, or after it."""
        wanted = self._config.tasks.curriculum
        if wanted is None:
            return inf
        share = wanted.start + (1.0 - wanted.start) * (step - 1) / wanted.steps
        if share >= 1.0:
            return inf
        if self._levels is None:
            if self._environment.size("train") is None:
                values = [self._value(task_of(self._environment, "train", k)) for k in range(LOOKED_AT)]
            else:
                left = self._finite()
                if self.rates is not None and wanted.by == SOLVE_RATE:
                    self._hard = {k: 1.0 - self.rates.get(k, 0.0) for k in left}
                else:
                    self._hard = {k: self._value(task_of(self._environment, "train", k)) for k in left}
                values = list(self._hard.values())
            self._levels = sorted(values)
        return self._levels[ceil(share * len(self._levels)) - 1]

    def _value(self, task: Task) -> float:
        wanted = self._config.tasks.curriculum
        assert wanted is not None
        return hardness(task, wanted.by)


def training_tasks(environment: Environment, config: RunConfig, step: int, attempt: int = 0) -> list[Task]:
    """Return the tasks of a step without a curriculum and without limits on prompts; see `TrainingTasks`."""
    plain = config.model_copy(update={"tasks": config.tasks.model_copy(update={"curriculum": None})})
    return TrainingTasks(environment, plain).of(step, attempt)


def tasks_of(setup: RolloutSetup, config: RunConfig) -> TrainingTasks:
    """Return the tasks of a run's steps."""
    return TrainingTasks(setup.environment, config, short_enough(config, setup.team, setup.engine.renderer))
