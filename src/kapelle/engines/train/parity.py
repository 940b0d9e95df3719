"""Whether trainer and sampler agree on weights and distribution, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kapelle.engines.train.arbitration import Finding
from kapelle.engines.train.sums import book
from kapelle.errors import ParityError

PARITY = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Default bound on |trainer − sampler| log-prob (nats) by compute type; half precision as measured."""


def check_parity(
    gaps: Sequence[Tensor],
    bound: float,
    totals: dict[str, list[float]],
    arbitrate: Callable[[float, float], Finding],
) -> None:
    """Record the largest and the mean gap; without gaps nothing happens.

    Where one is above the bound, `arbitrate(bound, worst)` compares both sides with float64: ParityError if rounding
    does not explain it, else the number of such tokens is recorded too.
    """
    if not gaps:
        return
    gap = torch.cat([each.to(gaps[0].device) for each in gaps])
    worst = float(gap.max())
    if not worst <= bound:
        found = arbitrate(bound, worst)
        if found.refused is not None:
            raise ParityError(
                f"Trainer and sampler log-probs differ by {worst:.3g} nats (bound {bound:.3g}): {found.describe()}. See "
                "docs/troubleshooting.md; `training.parity_tolerance` sets the bound, also when a run is resumed."
            )
        totals["parity/rounded"] = [found.tokens + totals.get("parity/rounded", [0.0])[0], 1.0]
    totals["parity/max"] = [max(worst, totals.get("parity/max", [0.0])[0]), 1.0]
    book(totals, "parity/mean", float(gap.sum()), float(gap.numel()))
