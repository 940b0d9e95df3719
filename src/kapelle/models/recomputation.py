"""Gradient checkpointing (1604.06174): a decoder block keeps its input alone, and the backward pass computes it again.

A block computed again must go to the same adapters as before, but the bank's route is that of the running pass, and the
backward pass runs after it. So each block remembers the route under which it ran, and the keys of its dropout; half precision is entered again by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from kapelle.errors import ModelError
from kapelle.models.lora_bank import LoraBank

Run = Callable[..., Any]
"""Called with a block and its arguments; returns what the block returns."""


def again(bank: LoraBank) -> Run:
    """Return what runs a block, keeps its arguments alone, and runs it again in the backward pass."""

    def run(block: Callable[..., Any], *args: Any, **named: Any) -> Any:
        route, keys_N = bank.route, bank.keys_N

        def routed(*args: Any, **named: Any) -> Any:
            with bank.on(route, keys_N):
                return block(*args, **named)

        return checkpoint(routed, *args, use_reentrant=False, **named)

    return run


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder blocks of a `transformers` model; ModelError where it does not say which they are."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not found:
        raise ModelError(
            f"{type(model).__name__} does not say what its blocks are, so that none can be computed again. Set "
            "`training.gradient_checkpointing: false`, and `training.microbatch_tokens` lower."
        )
    return found


@contextmanager
def recomputed(model: nn.Module, bank: LoraBank) -> Iterator[None]:
    """Inside, every block of a `transformers` model is computed again in the backward pass."""
    blocks, run = blocks_of(model), again(bank)
    for block in blocks:
        block.forward = partial(run, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
