"""The metrics of tasks that are selected by difficulty."""

from __future__ import annotations

from kapelle.runs.definitions import Metric

METRICS = (
    Metric(
        "tasks_left",
        "tasks",
        "Training tasks that `tasks.difficulty` leaves; with that setting only.",
        "Few: the same tasks come again and again; widen `low` and `high`.",
        known_as="tasks after filtering",
    ),
    Metric(
        "tasks_solve_rate",
        "share",
        "How often the first weights solved those tasks, as it was measured before the first step.",
        "Near 0 or 1: groups have no variance to learn from.",
        known_as="pass rate before training",
    ),
)
