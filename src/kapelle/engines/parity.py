"""Whether trainer and sampler mean the same weights and the same distribution, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kapelle.engines.tally import book
from kapelle.errors import ParityError

PARITY = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Default bound on |trainer − sampler| log-prob (nats) by compute type; half precision as measured."""


def check_parity(gaps: Sequence[Tensor], bound: float, totals: dict[str, list[float]]) -> None:
    """Book the largest and the mean gap; ParityError when one is above the bound. Without gaps nothing happens."""
    if not gaps:
        return
    gap = torch.cat(list(gaps))
    worst = float(gap.max())
    if not worst <= bound:
        raise ParityError(
            f"Trainer and sampler log-probs differ by {worst:.3g} nats (bound {bound:.3g}): the tokens were "
            "sampled by other weights, or from another distribution, than the ones that are trained. "
            "See docs/troubleshooting.md, and `training.parity_tolerance` for a bound in half precision."
        )
    totals["parity/max"] = [max(worst, totals.get("parity/max", [0.0])[0]), 1.0]
    book(totals, "parity/mean", float(gap.sum()), float(gap.numel()))
