"""Choose the number of tokens in a pass of an update for `training.microbatch_tokens: auto`.

On a CPU it is a fixed number that suits its cache, so that runs are exactly repeatable. A larger pass uses a GPU better,
up to the limit of its memory.

For its backward pass a block keeps approximately the inputs and outputs of its linear layers for every token, in the
compute type, and the residual stream before its two halves, in float32. The backward pass of one block takes about the same
amount in addition. With gradient checkpointing a block keeps only the stream, and one block at a time is recomputed.
Experts are excluded, because a token uses few of them. The remaining share of the memory is for attention masks, logits and
optimiser steps; if that is too little, the update is repeated in smaller passes.
"""

from __future__ import annotations

from kapelle.models.adapters import Layers

CPU_TOKENS = 4096
"""Number of tokens in a pass on a CPU."""
FEWEST, MOST = 1024, 1 << 16
"""Minimum and maximum number of tokens in a pass on a GPU."""
SHARE = 0.8
"""Share of the free memory for passes."""
STREAM, HEAD = 8, 16
"""Bytes per feature of a hidden state, in each block and outside the blocks (the last hidden states and their gradients)."""


def token_bytes(layers: Layers, hidden: int, size: int, *, recompute: bool) -> int:
    """Return the bytes per token of a forward and backward pass with a compute type of `size` bytes."""
    blocks: dict[str, int] = {}
    for path, features in layers.linear.items():
        parts = path.split(".")
        number = next((part for part in parts if part.isdigit()), None)
        if number is not None and "experts" not in parts:
            blocks[number] = blocks.get(number, 0) + size * sum(features)
    whole = sum(blocks.values()) + STREAM * hidden * len(blocks)
    largest = max(blocks.values(), default=0) + STREAM * hidden
    kept = STREAM // 2 * hidden * len(blocks) + largest if recompute else whole
    return kept + largest + HEAD * hidden


def chosen_tokens(free: int, of_token: int) -> int:
    """Return the number of tokens for a pass in `free` bytes with `of_token` bytes per token: a power of two, for stability."""
    fitting = int(SHARE * free) // max(1, of_token)
    return max(FEWEST, min(MOST, 1 << max(0, fitting.bit_length() - 1)))
