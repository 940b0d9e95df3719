"""Sums that an update collects before they are divided by their global weight.

Shapes: K target tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from kapelle.algorithm import Loss, Targets
from kapelle.functional.divergences import TokenStatistics
from kapelle.functional.policy_losses import token_log_ratio
from kapelle.rows import Column

TAIL = 2.0
"""A token is in the tail if the new weights make it more than this many times more, or less, likely."""


def add_metric(totals: dict[str, list[float]], name: str, total: float, weight: float) -> None:
    """Add to the (sum, weight) of a metric."""
    entry = totals.setdefault(name, [0.0, 0.0])
    entry[0] += total
    entry[1] += weight


def means(totals: Mapping[str, list[float]]) -> dict[str, float]:
    """Return each metric's mean, and for ratios the effective sample size: (Σρ)² / (n·Σρ²), 1 when all are equal."""
    row = {name: total / weight if weight else 0.0 for name, (total, weight) in totals.items()}
    for name in [name for name in row if name.startswith("ratio_square/")]:
        policy = name.removeprefix("ratio_square/")
        square, mean = row.pop(name), row.pop(f"ratio_mean/{policy}")
        row[f"effective_samples/{policy}"] = mean * mean / square if square else 0.0
    return row


@dataclass(slots=True)
class UpdateSums:
    """Sums of one optimiser step, by learner."""

    weight: dict[str, float] = field(default_factory=dict)
    sums: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    """Learners with a loss that is not finite: nothing that they accumulated counts."""
    gaps: list[tuple[str, Tensor]] = field(default_factory=list)
    """Learners and |trainer − sampler| log-prob of their target tokens."""

    def add(self, learner: str, loss: Loss) -> None:
        """Add a batch's loss and metrics."""
        self.weight[learner] = self.weight.get(learner, 0.0) + float(loss.weight)
        sums = self.sums.setdefault(learner, {})
        for name, (total, weight) in {"loss": (loss.total.detach(), loss.weight), **loss.metrics}.items():
            add_metric(sums, f"{name}/{learner}", float(total), float(weight))

    def merge(self, other: UpdateSums) -> None:
        """Add what another process has accumulated."""
        for name, weight in other.weight.items():
            self.weight[name] = self.weight.get(name, 0.0) + weight
        for name, metrics in other.sums.items():
            for metric, (total, weight) in metrics.items():
                add_metric(self.sums.setdefault(name, {}), metric, total, weight)
        self.bad |= other.bad
        self.gaps.extend(other.gaps)

    def add_statistics(self, policy: str, statistics: TokenStatistics, targets: Targets) -> None:
        """Add the statistics that every policy has, whatever its loss: entropy, and ratios to the sampler."""
        sums, mask_K = self.sums.setdefault(policy, {}), targets.mask_K
        tokens = float(mask_K.sum())
        add_metric(sums, f"entropy/{policy}", float((statistics.entropy_K.detach() * mask_K).sum()), tokens)
        if Column.BEHAVIOUR not in targets.columns:
            return
        ratio_K = token_log_ratio(statistics.logp_K.detach(), targets[Column.BEHAVIOUR]).exp()
        tail_K = (ratio_K > TAIL) | (ratio_K < 1 / TAIL)
        for name, value_K in {"tail": tail_K, "mean": ratio_K, "square": ratio_K.square()}.items():
            add_metric(sums, f"ratio_{name}/{policy}", float((value_K * mask_K).sum()), tokens)
