"""The optimiser of a learner, by `optimizer.name`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kapelle.errors import CheckpointError
from kapelle.settings.schema import OptimizerConfig

OF_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
"""Classes of `bitsandbytes.optim` by name: moments of one byte (2110.02861), and paged ones, which may lie in the machine's memory."""


def build_optimizer(
    parameters: Sequence[nn.Parameter], settings: OptimizerConfig, lr: float
) -> torch.optim.Optimizer:
    """Return AdamW in torch's or another library's form; `setup` has checked that the library is there."""
    given: dict[str, Any] = {
        "lr": lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        return torch.optim.AdamW(list(parameters), **given, fused=True)
    import bitsandbytes

    made: torch.optim.Optimizer = getattr(bitsandbytes.optim, OF_BITSANDBYTES[settings.name])(
        list(parameters), **given
    )
    return made


def check_kind(learner: str, settings: OptimizerConfig, entries: Iterable[Mapping[str, object]]) -> None:
    """Raise CheckpointError when saved moments are those of another optimiser than the settings name."""
    for entry in entries:
        if ("exp_avg" in entry) != (settings.name == "adamw"):
            raise CheckpointError(
                f"The optimiser's state of '{learner}' ({', '.join(sorted(entry))}) is not that of `optimizer.name: "
                f"{settings.name}`. Set `optimizer.name` as it was when the checkpoint was written."
            )
