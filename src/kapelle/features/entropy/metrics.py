"""The metric of the entropy bonus."""

from __future__ import annotations

from kapelle.runs.definitions import Metric

METRICS = (
    Metric(
        "entropy_bonus/<agent>",
        "reward per nat",
        "Weight of the agent's entropy bonus in the step (`entropy.agents`).",
        "Above 0 at the end: the agent is still rewarded for varied answers.",
        known_as="entropy coefficient",
    ),
)
