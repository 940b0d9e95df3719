"""Memory of an update's pass, term by term as the code keeps it.

Per token of a pass and block, kapelle's own pass (`models/fast/blocks.py`) keeps for its backward pass

    first half    x (D, float32); where heads are normed queries and keys before that ((H + J)·E, float32) and a number
                  per head
    attention     its queries, keys and values as they lie in its products, and its weights (below)
    output        what attention gathered (H·E), if the output projection has an adapter or trains
    second half   x (D, float32), gate and up (2·F)
    adapters      A·x of every adapted layer (the rank), and under dropout a byte per feature in

and once per pass the embeddings, the angles of positions (2·E, float32) and the last norm's input and output. Features without a
type are in the compute type. Attention of at most 512 keys on a CPU keeps a weight for every query head, query and visible
key (32 queries at a time); else torch's fused attention keeps queries, keys, values, outputs and one number per query.

With gradient checkpointing a block keeps x (D, float32); one block at a time is computed again.

The peak is one of two moments: in the output head, where the last hidden states still lie beside everything that is kept;
or in the backward pass of the last block's second half, which makes the norm h (D), silu(gate) and its product with up (2·F)
again, and holds the gradients of F, of h, and three of x.
"""

from __future__ import annotations

from dataclasses import dataclass

from kapelle.planning.passes import Pass, Span
from kapelle.planning.shape import Shape

MOST_KEYS = 512
"""`models/fast/attention.py`: most keys for products on a CPU."""
STEP = 32
"""`models/fast/attention.py`: queries of one product."""
LOGIT_BUDGET = 1 << 21
"""`engines/train/torch/large_head.py`: most logits that are kept for the backward pass."""
ROWS, PIECE, DEVICE_PIECE = 512, 1 << 20, 1 << 24
"""`engines/train/torch/large_head.py`: tokens of a piece, and its logits on a CPU and on a GPU."""


@dataclass(frozen=True, slots=True)
class Compute:
    """How a base computes."""

    size: int
    """Bytes of the compute type."""
    held: int
    """Bytes of a weight as it is held."""
    cpu: bool
    full: bool
    """Whether its own weights train."""
    adapted_output: bool
    """Whether the output projection of attention has an adapter in the pass."""
    checkpointing: bool
    entropy: bool = False
    """Whether the loss learns from entropy."""


def kept_by_block(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the bytes that one block keeps for its backward pass."""
    count, b = work.tokens, how.size
    all_heads = shape.heads + shape.key_heads
    features = 2 * 4 * shape.hidden + 2 * 4  # x and a norm's length, in both halves
    if shape.normed:
        features += 4 * all_heads * (shape.head_size + 1)
    if how.full or how.adapted_output:
        features += b * shape.heads * shape.head_size
    features += 2 * b * shape.inner
    return count * features + b * work.low + work.masked + attention(shape, work, how)


def attention(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the bytes that attention of one block keeps."""
    spans = list(work.spans())
    alike = len(set(spans)) == 1 and spans[0].queries == spans[0].keys
    # Where tokens keep their order, what attention returns is what the output projection keeps.
    shared = alike and (how.full or how.adapted_output)
    return sum(_span(shape, span, how, shared=shared) for span in spans)


def _span(shape: Shape, span: Span, how: Compute, *, shared: bool) -> int:
    queries, keys = shape.heads * shape.head_size, shape.key_heads * shape.head_size
    vectors = how.size * (span.queries * queries + 2 * span.keys * keys)
    if how.cpu and span.keys <= MOST_KEYS:
        before = span.keys - span.queries
        weights = sum(
            min(STEP, span.queries - first) * (before + min(first + STEP, span.queries))
            for first in range(0, span.queries, STEP)
        )
        return vectors + how.size * shape.heads * weights
    masked = span.keys > span.queries
    if not how.cpu and (masked or how.size == 4):  # each query head has keys and values of its own
        vectors += how.size * 2 * span.keys * (queries - keys)
    mask = how.size * span.queries * span.keys if masked else 0
    outputs = 0 if shared else span.queries * how.size * queries
    return vectors + outputs + mask + 4 * span.queries * shape.heads


def kept(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the bytes that a whole forward pass keeps, up to the last norm's input."""
    stream = 4 * work.tokens * shape.hidden
    once = stream + 2 * 4 * work.tokens * shape.head_size
    if how.full:
        once += stream  # the last norm's gradient needs what it normalised
    casts = shape.depth * shape.heads * shape.head_size * shape.hidden * how.size
    once += casts if how.full and how.size != 4 else 0
    blocks = shape.depth * stream if how.checkpointing else shape.depth * kept_by_block(shape, work, how)
    return once + blocks


def activations(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the most bytes of activations in a pass beside the output head's, forward and backward.

    With the last hidden states, for the moment of the head; see `block_backward` for the other.
    """
    hidden = 4 * shape.hidden * (work.tokens + work.targets)
    return kept(shape, work, how) + hidden


def block_backward(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the bytes of activations and their gradients in the backward pass of the last block."""
    half = how.size != 4
    per_token = how.size * (3 * shape.inner + shape.hidden * (1 + half)) + 3 * 4 * shape.hidden
    again = kept_by_block(shape, work, how) - 4 * work.tokens * shape.hidden if how.checkpointing else 0
    freed = 4 * work.tokens * shape.hidden  # the last norm's input
    return kept(shape, work, how) - freed + again + work.tokens * per_token


def logits(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the most bytes of the output head beside its weights' gradient.

    Up to 2²¹ logits are computed at once: with the temperature, for the log-prob, their softmax and its entropy, or for
    learned entropy as many as autograd keeps. More come in pieces (`large_head.py`): two of a piece in float32 and one in
    half precision, and a gradient per hidden state; a head that trains holds three, and computes that gradient later.
    """
    count, half = work.targets, how.size != 4
    if count * shape.vocabulary <= LOGIT_BUDGET:
        return count * shape.vocabulary * 4 * (7 if how.entropy else 4)
    rows = min(ROWS, count)
    words = min(shape.vocabulary, max(1, (PIECE if how.cpu else DEVICE_PIECE) // rows))
    piece, vector = rows * words, count * shape.hidden * 4
    weights = words * shape.hidden * how.size * (how.held != how.size)
    rounded = (count + rows) * shape.hidden * how.size * half
    if how.full:
        return piece * (3 * 4 + 2 * how.size * half) + vector + weights * (1 + half) + rounded
    pieces = piece * (2 * 4 + how.size * half) + (1 + how.entropy) * vector
    return max(pieces + weights + rounded, (2 + 2 * how.entropy) * vector + rounded)
