"""Compute the memory of sampling in this process, with one term for each tensor in `engines/rollout/local` and `models/fast`.

KV cache         Each token position takes 2 · blocks · J · E numbers in the compute type. While prompts are read, each distinct prompt
                 takes as many positions as the longest prompt that joins the batch at the same time. Afterwards, a prompt with at
                 least two sequences is stored once, in blocks of 64 positions. The sampled tokens of a sequence take full blocks of 64
                 positions and a tail that grows by 16. When a tail fills a block, or when there is no room for a block, the data is
                 copied and temporarily exists twice. Sequences of earlier turns are kept for prompts that continue them, up to
                 `engine.kept_tokens` positions.
logits           The logits of all sequences and their exponentials are stored in float32. For a vocabulary of up to 4,096 tokens,
                 they are also stored with their sums in float64. If a temperature is not 1, the logits are stored once more. While
                 prompts are read, the logits of distinct prompts are stored twice, and those of sequences once.
reading          The activations of one pass over at most 1,024 prompt tokens (16,384 on a GPU), or over one longer prompt.
merged weights   Copies of the matrices of small models that include the adapter (`fused.py`). For other models, a GPU stores rounded
                 copies of weights in float32 (`models/weights.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kapelle.cluster.planning.planned_run import PlannedRun, Shape
from kapelle.cluster.planning.workload import PlannedTurn

TAIL, BLOCK, SHARED = 16, 64, 2
"""Number of positions by which tails grow, number of positions of a block, and number of sequences that share a prompt
(`models/fast/kv_cache.py`)."""
PRODUCTS = 512
"""Maximum number of keys for which attention on a CPU stores weights (`models/fast/attention.py`)."""
CHUNK, GPU_CHUNK = 1024, 1 << 14
"""Number of prompt tokens of a pass, on a CPU and on a GPU (`engines/rollout/local/decode_strategies.py`)."""
UNDIVIDED = 4096
"""Maximum size of a vocabulary that is summed without dividing it into parts (`engines/rollout/local/sampling.py`)."""
LARGEST, LARGE = 1 << 26, 1 << 17
"""Maximum number of weights of all copies, and number of weights above which a matrix is stored only in packed form
(`models/fast/fused.py`)."""


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Sequences of one base model that are sampled together."""

    rows: int
    prompts: int
    """Number of distinct prompts."""
    prompt: int
    """Number of tokens of the longest prompt."""
    answer: int
    """Maximum number of tokens that are sampled per sequence."""
    tempered: bool
    """Whether the temperature of any sequence is not 1."""
    adapters: int = 1
    """Number of distinct adapters, where the base model without an adapter counts as one."""


def sampling_moments(run: PlannedRun, base: str, tasks: int, group: int) -> Iterator[Mapping[str, int]]:
    """Yield the memory by kind, without weights, of sampling with a base model at each moment of its episodes."""
    shape, size, cpu = run.shapes[base], run.size(base), run.cpu(base)
    policies = {
        name for name, policy in run.team.policies.items() if policy.base == base and not policy.endpoint
    }
    copies = making = 0
    if merges(shape, len(policies)):
        used = {run.team.policies[name].lora and name for name in policies}
        copies, making = merged(shape, len(used), size, cpu=cpu), making_merged(shape, size, cpu=cpu)
    elif shape.flat and not cpu and size < 4 and base in run.team.trained_bases:
        copies = size * (shape.block + shape.head)
    each, kept = place_bytes(shape, size), 0
    bound = int(run.kv_gib * 1.25 * (1 << 30))  # memory grows by quarters
    for rows in rows_of(run, policies, tasks, group):
        prompts = rows.prompts * rows.prompt
        end, most = places(rows, flat=shape.flat)
        logits, all_logits = step_logits(shape, rows), rows.rows * shape.vocabulary * 4
        read = reading(shape, rows, size, fused=bool(copies), cpu=cpu)
        before, kept = kept, min(run.kept_tokens, kept + end) if shape.flat else 0
        for held, active, scores in (
            (prompts + before, read, 0),
            (prompts + before, making, 0),
            (prompts + before, 0, logits),
            (end + before, 0, logits),
            (most + before, 0, all_logits),
            (end + kept, 0, all_logits),
        ):
            yield {
                "KV cache": min(each * held, bound) if bound else each * held,
                "merged weights": copies,
                "activations": active,
                "logits": scores,
            }


def rows_of(run: PlannedRun, policies: set[str], tasks: int, group: int) -> Iterator[PlannedRows]:
    """Yield the sequences of each moment of the episodes that these policies sample."""
    by_moment: dict[int, list[PlannedTurn]] = {}
    for turn in run.work.turns:
        if turn.policy in policies:
            by_moment.setdefault(turn.moment, []).append(turn)
    for moment, together in sorted(by_moment.items()):
        rows = len(together) * tasks * group
        prompts = rows if moment else len(together) * tasks
        yield PlannedRows(
            min(run.max_rows, rows),
            min(run.max_rows, prompts),
            max(turn.prompt for turn in together),
            max(turn.answer for turn in together),
            any(turn.tempered for turn in together),
            len({turn.policy for turn in together}),
        )


def places(work: PlannedRows, *, flat: bool = True) -> tuple[int, int]:
    """Return the number of positions in the KV cache at the end, and the maximum while tails are converted to blocks.

    Without the `flat` pass, the cache of `transformers` stores the prompt of every sequence and one position for each token.
    """
    if not flat:
        end = work.rows * (work.prompt + work.answer - 1)
        return end, end
    shares = work.rows >= SHARED * work.prompts
    shared = work.prompts * -(-work.prompt // BLOCK) * BLOCK if shares else 0
    blocks, tail = (0, 0) if shares else divmod(work.prompt, BLOCK)
    used = held = blocks
    room, left = tail, work.answer - 1
    most = shared + work.prompts * work.prompt + work.rows * (BLOCK * held + room)
    while left > 0:
        if tail >= BLOCK:
            used, tail = used + 1, tail - BLOCK
            wider = held if used <= held else max(used, held + held // 4)
            moving = BLOCK * (held + wider * (wider > held)) + 2 * room
            most, held = max(most, shared + work.rows * moving), wider
        wanted = TAIL * -(-(tail + TAIL // 2) // TAIL)
        most = max(most, shared + work.rows * (BLOCK * held + room + wanted))
        step = min(left, wanted - tail)
        room, tail, left = wanted, tail + step, left - step
    end = shared + work.rows * (BLOCK * held + room)
    return end, max(most, end)


def place_bytes(shape: Shape, size: int) -> int:
    """Return the number of bytes of one token in the KV cache."""
    return 2 * shape.depth * shape.key_heads * shape.head_size * size


def step_logits(shape: Shape, work: PlannedRows) -> int:
    """Return the maximum number of bytes of the logits in a sampling step."""
    sums = 8 + 8 if shape.vocabulary <= UNDIVIDED else 0
    sampled = work.rows * (4 + 4 + sums + 4 * work.tempered)
    read = 4 * (max(2 * work.prompts, work.prompts + work.rows))
    return shape.vocabulary * max(sampled, read)


def reading(shape: Shape, work: PlannedRows, size: int, *, fused: bool, cpu: bool) -> int:
    """Return the maximum number of bytes of activations in one pass over prompts.

    The peak is either in the second half of a block, where two products of gate and up projection exist in addition to the results of
    the first half, or in attention, which on a CPU stores the weights of up to 512 keys. The forward pass of `transformers` reads all
    sequences in one pass.
    """
    tokens = work.prompt * max(1, min(work.prompts, (CHUNK if cpu else GPU_CHUNK) // work.prompt))
    if not shape.flat:
        tokens = work.prompt * work.rows
    queries, keys = shape.heads * shape.head_size, shape.key_heads * shape.head_size
    stream, h, gates = 4 * shape.hidden, size * shape.hidden, 2 * size * shape.inner
    heads = size * (queries + 2 * keys)
    weights = size * shape.heads * (work.prompt + 32) // 2 if cpu and work.prompt <= PRODUCTS else 0
    attended = size * 2 * (queries + keys) + weights
    if fused:
        second = stream + 2 * h + heads + size * queries + 2 * gates + 4 * shape.head_size
        second += gates * (work.adapters > 1)  # the products of each adapter's rows
        first = stream + h + heads + gates + attended + 4 * shape.head_size
    else:
        second = 3 * stream + 2 * h + 2 * gates + size * queries + 8 * shape.head_size
        first = stream + 2 * heads + size * queries + attended + 8 * shape.head_size
    return tokens * max(first, second)


def merges(shape: Shape, adapters: int) -> bool:
    """Return whether sampling merges adapters into copies of the matrices, if there are `adapters` policies on a base model."""
    return shape.flat and shape.block * max(adapters, 1) + shape.head <= LARGEST


def merged(shape: Shape, adapters: int, size: int, *, cpu: bool) -> int:
    """Return the number of bytes of the merged matrices of `adapters` adapters and of the output head.

    On a CPU, a float32 matrix with fewer than 131,072 weights is stored both unpacked and packed.
    """
    turned = (shape.heads + 2 * shape.key_heads) * shape.head_size
    sides = (
        (turned, shape.hidden),
        (shape.heads * shape.head_size, shape.hidden),
        (2 * shape.inner, shape.hidden),
        (shape.inner, shape.hidden),
    )
    each = sum(_matrix(wide * out, size, cpu=cpu) for wide, out in sides)
    return adapters * shape.depth * each + _matrix(shape.head, size, cpu=cpu)


def making_merged(shape: Shape, size: int, *, cpu: bool) -> int:
    """Return the additional number of bytes while the output head is copied.

    The head is scaled in float32 and then rounded.
    """
    return shape.head * 4 * (2 if size == 4 else 3) - _matrix(shape.head, size, cpu=cpu)


def _matrix(weights: int, size: int, *, cpu: bool) -> int:
    twice = cpu and weights < LARGE and size == 4
    return weights * size * (1 + twice)
