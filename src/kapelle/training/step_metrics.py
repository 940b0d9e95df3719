"""Metrics of a step about credit, critics and time; `metrics` has those about episodes.

Shapes: K tokens of one agent or critic in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kapelle.algorithm import Credit
from kapelle.functional.value_losses import explained_variance
from kapelle.metrics.timeline import Timeline
from kapelle.rows import Column, Sample, TurnKey, turns_of
from kapelle.types import Group


def credit_metrics(groups: Sequence[Group], credit: Mapping[TurnKey, Credit]) -> dict[str, float]:
    """Return how many turns of each agent were trained on, and the mean and spread of its advantages."""
    by_agent: dict[str, list[Tensor]] = {}
    row: dict[str, float] = {}
    for key, turn in turns_of(groups):
        by_agent.setdefault(turn.agent, []).append(credit[key].advantage_T)
        row[f"samples/{turn.agent}"] = row.get(f"samples/{turn.agent}", 0.0) + float(credit[key].weight > 0)
    for agent, pieces in by_agent.items():
        all_K = torch.cat(pieces).double()
        row[f"advantage/{agent}"] = float(all_K.mean())
        row[f"advantage_std/{agent}"] = float(all_K.std()) if all_K.numel() > 1 else 0.0
    return row


def critic_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how much of the returns' variance each critic explained before it learns from them."""
    row: dict[str, float] = {}
    for critic in dict.fromkeys(sample.learner for sample in samples):
        own = [sample for sample in samples if sample.learner == critic]
        value_K, return_K = (
            torch.cat([s.columns[column] for s in own]) for column in (Column.VALUE, Column.RETURN)
        )
        if len(return_K) > 1:
            row[f"explained_variance/{critic}"] = float(
                explained_variance(value_K, return_K, torch.ones_like(return_K))
            )
    return row


def time_metrics(clock: Timeline, tokens: int) -> dict[str, float]:
    """Return the seconds of each part of a step, and tokens per second."""
    parts = clock.seconds()
    total = sum(parts.values())
    row = {f"time/{name}": seconds for name, seconds in parts.items()}
    return row | {"time/step": total, "time/tokens_per_second": tokens / max(total, 1e-9)}
