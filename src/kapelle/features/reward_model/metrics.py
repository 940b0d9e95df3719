"""The metric of a refreshed verifier."""

from __future__ import annotations

from kapelle.runs.definitions import Metric

METRICS = (
    Metric(
        "verifier_labels",
        "answers",
        "Number of answers graded so far for a verifier that continues to be trained.",
        "Does not grow: this environment's turns are not graded.",
        known_as="reward model labels",
    ),
)
