"""The metrics of parallel calls."""

from __future__ import annotations

from kapelle.runs.definitions import Metric

METRICS = (
    Metric(
        "swarm/weight",
        "share",
        "Share of the weights `swarm.parallel` and `swarm.finish` that remains in the step.",
        "Above 0 at the end: the planner is still rewarded for calls.",
        known_as="λ₁ and λ₂, relative to the first step",
    ),
    Metric(
        "swarm/calls",
        "calls",
        "Mean number of calls of other agents in an episode.",
        "1 or less: the planner works alone or gives the whole task to one call (serial collapse).",
        known_as="sub-agents per task",
    ),
    Metric(
        "swarm/finished",
        "share",
        "Share of the calls that ended by themselves and are not empty.",
        "Falling while `swarm/calls` rises: calls are made for the reward only.",
        known_as="r_finish",
    ),
    Metric(
        "swarm/critical_tokens",
        "tokens",
        "Mean number of completion tokens on the longest path through an episode; calls by one turn count as simultaneous.",
        "As high as `swarm/tokens`: nothing runs in parallel.",
        known_as="critical steps, in tokens",
    ),
    Metric(
        "swarm/tokens",
        "tokens",
        "Mean number of completion tokens of an episode.",
        "Rising faster than `swarm/critical_tokens` falls: parallel calls repeat work.",
        known_as="total tokens",
    ),
)
