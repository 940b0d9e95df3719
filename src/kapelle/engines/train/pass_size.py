"""How many tokens a pass of an update has where `training.microbatch_tokens: auto` leaves it open.

On a CPU it is a number that its cache likes, the same on every machine, so that runs repeat to the bit. A GPU is the better
used the larger a pass is, up to what fits in its memory.

For its backward pass a block keeps of every token about what its linear layers read and write, in the compute type, and the
stream before its two halves, in float32. The backward pass of one block takes about as much again. With gradient
checkpointing a block keeps the stream alone, and one block at a time is computed again. Experts are left out: a token
visits few of them. Masks of attention, logits and what a step needs for itself are left to the share of the memory that is
not taken; where that is too little, the update is taken again in smaller passes.
"""

from __future__ import annotations

from kapelle.models.adapters import Layers

CPU_TOKENS = 4096
"""Tokens of a pass on a CPU."""
FEWEST, MOST = 1024, 1 << 16
"""Tokens of a pass on a GPU, at least and at most."""
SHARE = 0.8
"""Of the free memory, what passes may take."""
STREAM, HEAD = 8, 16
"""Bytes for each feature of a hidden state, in each block and beside the blocks: the last ones and their gradients."""


def token_bytes(layers: Layers, hidden: int, size: int, *, recompute: bool) -> int:
    """Return the bytes that a token takes in a pass, forward and backward, by a compute type of `size` bytes."""
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
    """Return the tokens of a pass in so many bytes, each taking `of_token`: a power of two, so that little changes it."""
    fitting = int(SHARE * free) // max(1, of_token)
    return max(FEWEST, min(MOST, 1 << max(0, fitting.bit_length() - 1)))
