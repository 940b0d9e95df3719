"""The metric of a refreshed verifier."""

from __future__ import annotations

from kapelle.runs.definitions import Metric

METRICS = (
    Metric(
        "verifier_labels",
        "answers",
        "Answers graded so far for a verifier that continues learning.",
        "No growth: nothing grades this environment's turns.",
        known_as="reward model labels",
    ),
)
