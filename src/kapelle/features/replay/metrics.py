"""The metrics of replay."""

from __future__ import annotations

from kapelle.runs.definitions import Metric

METRICS = (
    Metric(
        "replay_groups",
        "groups",
        "Number of past groups that the step learned from in addition to its own (`tasks.replay`).",
        "0 for many steps: no group has both success and failure.",
        known_as="replayed groups",
    ),
    Metric(
        "replay_age",
        "steps",
        "Age of those groups in steps; other metrics of episodes exclude them.",
        "Rises together with replay_log_ratio: set `tasks.replay.max_age`.",
        known_as="age of the replay buffer",
    ),
    Metric(
        "replay_log_ratio",
        "nats",
        "Mean of |log π(token) − log π_then(token)| over their tokens, before the update.",
        "Above the logarithm of the clip range: most of their tokens are too old to contribute a gradient.",
        known_as="mean absolute log ratio",
    ),
)
