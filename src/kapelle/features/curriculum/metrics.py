"""The metrics of tasks that are selected by difficulty."""

from __future__ import annotations

from kapelle.runs.definitions import Metric

METRICS = (
    Metric(
        "tasks_left",
        "tasks",
        "Number of training tasks that remain after `tasks.difficulty`; only with that setting.",
        "Few: the same tasks recur often; widen `low` and `high`.",
        known_as="tasks after filtering",
    ),
    Metric(
        "tasks_solve_rate",
        "share",
        "How often the initial weights solved those tasks, as measured before the first step.",
        "Near 0 or 1: groups have no variance to learn from.",
        known_as="pass rate before training",
    ),
)
