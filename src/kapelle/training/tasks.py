"""Which tasks a step of training plays."""

from __future__ import annotations

import random

from kapelle.environment import Environment
from kapelle.environments.bounded_worlds import task_of
from kapelle.runtime.seeds import derive_seed
from kapelle.settings.schema import RunConfig
from kapelle.types import Task


def training_tasks(environment: Environment, config: RunConfig, step: int, attempt: int = 0) -> list[Task]:
    """Return the tasks of a step: every task of a finite split once per epoch, in a new random order.

    `attempt` gives another draw for the same step, of tasks that later steps play too.
    """
    count = config.training.tasks_per_step
    size = environment.size("train")
    offset = attempt * config.training.steps
    cursors = range((step - 1 + offset) * count, (step + offset) * count)
    if size is None:
        return [
            task_of(environment, "train", derive_seed(config.seed, "task", cursor) >> 16)
            for cursor in cursors
        ]
    orders: dict[int, list[int]] = {}
    for epoch in {cursor // size for cursor in cursors}:
        orders[epoch] = list(range(size))
        random.Random(derive_seed(config.seed, "epoch", epoch)).shuffle(orders[epoch])
    return [task_of(environment, "train", orders[cursor // size][cursor % size]) for cursor in cursors]
