"""Choose the number of tokens in a forward and backward pass of an update for `training.microbatch_tokens: auto`.

On a CPU, the number is fixed and suits the CPU's cache, so that runs are exactly repeatable. On a GPU, larger passes
are more efficient, up to the limit of the GPU's memory.

For its backward pass, a block stores approximately the inputs and outputs of its linear layers for every token, in the
compute type, and the residual stream before its two halves, in float32. The backward pass of one block takes about the
same amount of memory in addition. With gradient checkpointing, a block stores only the residual stream, and one block
at a time is recomputed. Experts are excluded from the estimate, because a token uses few of them. The remaining memory
is used for attention masks, logits and optimiser steps. If this memory is too small, the update is repeated in smaller
passes.
"""

from __future__ import annotations

from kapelle.models.adapters import Layers

CPU_TOKENS = 4096
"""The number of tokens in a pass on a CPU."""
FEWEST, MOST = 1024, 1 << 16
"""The minimum and the maximum number of tokens in a pass on a GPU."""
SHARE = 0.8
"""The fraction of the free memory that passes may use."""
STREAM, HEAD = 8, 16
"""The number of bytes per feature of a hidden state in each block, and outside the blocks (for the last hidden states
and their gradients)."""


def token_bytes(layers: Layers, hidden: int, size: int, *, recompute: bool) -> int:
    """Return the number of bytes per token of a forward and backward pass, given a compute type of `size` bytes."""
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
    """Return the number of tokens in a pass that uses at most `free` bytes, as a power of two for stability.

    The argument `of_token` is the number of bytes per token.
    """
    fitting = int(SHARE * free) // max(1, of_token)
    return max(FEWEST, min(MOST, 1 << max(0, fitting.bit_length() - 1)))
