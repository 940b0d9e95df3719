"""Memory of an update: the tokens of one pass, and the memory that the pass keeps, term by term as in the code.

kapelle's own forward pass (`models/fast/flat.py`) keeps these features per token and block for its backward pass:

    first half    x (D, float32); with norms of heads also queries and keys before them ((H + J)·E, float32) and a number per head
    attention     its queries, keys and values, and its weights (below)
    output        the result of attention (H·E), if the output projection has an adapter or trains
    second half   x (D, float32), gate and up (2·F)
    adapters      A·x of every adapted layer (the rank)

Once per pass it keeps the embeddings, the angles of positions (2·E, float32), and the last norm's input and output. Features for which
no type is given have the compute type. On a CPU, attention of at most 512 keys keeps a weight for every query head, query and visible key (32
queries at a time). Otherwise torch's fused attention keeps queries, keys, values, outputs and one number per query.

With gradient checkpointing a block keeps x (D, float32), and one block at a time is recomputed.

The peak is one of two moments. In the output head, the last hidden states exist beside everything that is kept. In the backward pass of
the last block's second half, the norm h (D), silu(gate) and its product with up (2·F) are recomputed, beside the gradients of F, of
h, and three of x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kapelle.cluster.planning.planned_run import NOTHING, PlannedRun, Shape
from kapelle.cluster.planning.workload import PlannedTurn

MOST_KEYS = 512
"""`models/fast/attention.py`: maximum keys for products on a CPU."""
STEP = 32
"""`models/fast/attention.py`: queries of one product."""
LOGIT_BUDGET = 1 << 21
"""`engines/train/torch/large_head.py`: maximum logits that are kept for the backward pass."""
ROWS, PIECE, DEVICE_ROWS, DEVICE_PIECE = 512, 1 << 20, 2048, 1 << 25
"""`engines/train/torch/large_head.py`: tokens of a piece and its logits, on a CPU and on a GPU."""

ENOUGH = 3
"""Passes of one learner that include all kinds of passes."""


def update_moments(run: PlannedRun, base: str) -> Iterator[Mapping[str, int]]:
    """Yield the memory by kind of an update's passes over a base, without weights and optimiser."""
    shape = run.shapes[base]
    full = base in run.team.trained_bases
    found = passes(run, base)
    whole = 4 * sum(run.trained_numbers(base))
    head = 4 * shape.head if full else 0
    for number, work in enumerate(found):
        how = Compute(
            run.size(base),
            4 if full else run.size(base),
            run.cpu(base),
            full,
            any(run.adapters[name].output for name in run.learners(base) if name in run.adapters),
            run.checkpointing,
            run.algorithm.update.entropy,
        )
        before = whole if number or not full or run.algorithm.update.minibatches > 1 else 0
        yield {
            "activations": activations(shape, work, how),
            "logits": logits(shape, work, how),
            "gradients": before + head,
        }
        block = 4 * shape.block // shape.depth if full else 0
        yield {
            "activations": block_backward(shape, work, how),
            "logits": 0,
            "gradients": before + head + block,
        }
    if full and found:
        second = head if run.shares_weights else head * (1 + shape.tied)
        yield {"activations": 0, "logits": 0, "gradients": whole + second}


def passes(run: PlannedRun, base: str) -> list[Pass]:
    """Return the passes of one optimiser step over a base's share of a step's answers."""
    most, tasks = run.pass_tokens(base), -(-run.own_tasks // run.algorithm.update.minibatches)
    trees = []
    for tree in _trees(run, base):
        enough = ENOUGH + ENOUGH * most // tree.size  # tasks are equal, so passes repeat
        trees += [tree] * min(tasks, enough)
    if not run.shapes[base].flat:  # prompts are not shared
        trees = [
            replace(tree, stem=0, branches=(tree.stem + branch,), targets=(count,))
            for tree in trees
            for branch, count in zip(tree.branches, tree.targets, strict=True)
        ]
    found = list(passes_of(trees, most))
    # The first pass, and the largest of the later passes, which begin with the first pass's gradients.
    return [*found[:1], *sorted(found[1:], key=lambda work: work.tokens)[-1:]]


def _trees(run: PlannedRun, base: str) -> Iterator[SharedPrefix]:
    """Yield the sequences of one task's episodes, learner by learner."""
    team, group = run.team, run.work.group
    for name in sorted({turn.policy for turn in run.work.turns}):
        policy = team.policies[name]
        if policy.base != base or not policy.trained or policy.endpoint is not None:
            continue
        own = run.adapters.get(name, NOTHING)
        for chain in _chains([turn for turn in run.work.turns if turn.policy == name]):
            yield replace(_tree(chain, group), low=own.low)
    for name, critic in team.critics.items():
        if critic.base != base or not critic.trained:
            continue
        own = run.adapters.get(name, NOTHING)
        for turn in run.work.turns:
            if team.critic_of.get(turn.agent) == name:
                tree = _tree([turn], group)
                yield replace(tree, low=own.low, critic=True)


def _chains(turns: Sequence[PlannedTurn]) -> list[list[PlannedTurn]]:
    """Return groups of answers in which each prompt continues the previous answer; each group is one sequence."""
    chains: list[list[PlannedTurn]] = []
    last: dict[str, list[PlannedTurn]] = {}
    for each in turns:
        if each.continues and each.agent in last:
            last[each.agent].append(each)
        else:
            last[each.agent] = [each]
            chains.append(last[each.agent])
    return chains


def _tree(chain: Sequence[PlannedTurn], group: int) -> SharedPrefix:
    """Return the sequences of a group's answers, which share the first prompt of an episode."""
    first, last = chain[0], chain[-1]
    length, targets = last.prompt + last.answer - 1, sum(turn.answer for turn in chain)
    if first.moment == 0 and group > 1:
        return SharedPrefix(first.prompt, (length - first.prompt,) * group, (targets,) * group)
    return SharedPrefix(0, (length,) * group, (targets,) * group)


# Passes by their number of tokens, as in `engines/train/batch.py`.


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Answers of one learner with a shared beginning."""

    stem: int
    """Shared tokens; 0 for a single branch."""
    branches: tuple[int, ...]
    """Tokens of each branch after the stem."""
    targets: tuple[int, ...]
    """Target tokens of each branch."""
    low: int = 0
    """Features of the low-rank products of a token in one block: the adapter's rank times its layers there."""
    critic: bool = False
    """Whether the learner predicts values."""

    @property
    def size(self) -> int:
        """Number of computed tokens."""
        return self.stem + sum(self.branches)


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """A contiguous span of tokens in attention."""

    queries: int
    keys: int
    """Its own tokens and the tokens before them."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass."""

    trees: tuple[SharedPrefix, ...]

    @property
    def tokens(self) -> int:
        """N."""
        return sum(tree.size for tree in self.trees)

    @property
    def targets(self) -> int:
        """K of policies."""
        return sum(sum(tree.targets) for tree in self.trees if not tree.critic)

    @property
    def low(self) -> int:
        """Features of low-rank products in one block, of all tokens."""
        return sum(tree.size * tree.low for tree in self.trees)

    def spans(self) -> Iterator[PlannedSpan]:
        """Yield its spans of tokens: stems, and branches that attend to them."""
        for tree in self.trees:
            if tree.stem:
                yield PlannedSpan(tree.stem, tree.stem)
            for branch in tree.branches:
                yield PlannedSpan(branch, tree.stem + branch)


def passes_of(trees: Sequence[SharedPrefix], max_tokens: int) -> Iterator[Pass]:
    """Yield the passes of at most `max_tokens` tokens (at least one branch) in which trees are computed."""
    waiting: list[SharedPrefix] = []
    filled = 0
    for tree in trees:
        for piece in _pieces(tree, max_tokens):
            if waiting and filled + piece.size > max_tokens:
                yield Pass(tuple(waiting))
                waiting, filled = [], 0
            waiting.append(piece)
            filled += piece.size
    if waiting:
        yield Pass(tuple(waiting))


def _pieces(tree: SharedPrefix, max_tokens: int) -> Iterator[SharedPrefix]:
    first, filled = 0, tree.stem
    for number, branch in enumerate(tree.branches):
        if number > first and filled + branch > max_tokens:
            yield _part(tree, first, number)
            first, filled = number, tree.stem
        filled += branch
    yield _part(tree, first, len(tree.branches))


def _part(tree: SharedPrefix, first: int, last: int) -> SharedPrefix:
    branches, targets = tree.branches[first:last], tree.targets[first:last]
    return SharedPrefix(tree.stem, branches, targets, tree.low, tree.critic)


# The memory of a pass.


@dataclass(frozen=True, slots=True)
class Compute:
    """How a base computes."""

    size: int
    """Bytes of the compute type."""
    stored: int
    """Bytes of a weight in memory."""
    cpu: bool
    full: bool
    """Whether the base's weights train."""
    adapted_output: bool
    """Whether the output projection of attention has an adapter."""
    checkpointing: bool
    entropy: bool = False
    """Whether the loss includes entropy."""


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
    return count * features + b * work.low + attention(shape, work, how)


def attention(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the bytes that attention of one block keeps."""
    spans = list(work.spans())
    alike = len(set(spans)) == 1 and spans[0].queries == spans[0].keys
    # If tokens keep their order, the output projection keeps the attention result itself.
    shared = alike and (how.full or how.adapted_output)
    return sum(_span(shape, span, how, shared=shared) for span in spans)


def _span(shape: Shape, span: PlannedSpan, how: Compute, *, shared: bool) -> int:
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
    if not how.cpu and (masked or how.size == 4):  # each query head has its own keys and values
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
    """Return the bytes of activations at the moment of the output head, with the last hidden states but without logits."""
    hidden = 4 * shape.hidden * (work.tokens + work.targets)
    return kept(shape, work, how) + hidden


def block_backward(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the bytes of activations and their gradients in the backward pass of the last block."""
    half = how.size != 4
    per_token = how.size * (3 * shape.inner + shape.hidden * (1 + half)) + 3 * 4 * shape.hidden
    recomputed = kept_by_block(shape, work, how) - 4 * work.tokens * shape.hidden if how.checkpointing else 0
    freed = 4 * work.tokens * shape.hidden  # the last norm's input
    return kept(shape, work, how) - freed + recomputed + work.tokens * per_token


def logits(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the maximum bytes of the output head without its weights' gradient.

    Up to 2²¹ logits are computed at once, and exist four times: scaled by temperature, for the log-prob, as softmax, and for its entropy. If the
    loss includes entropy, autograd keeps seven. More logits are computed in pieces (`large_head.py`): a piece exists twice in float32
    and once in half precision, beside a gradient per hidden state. A trained head holds a third copy of a piece.
    """
    count, half = work.targets, how.size != 4
    if count * shape.vocabulary <= LOGIT_BUDGET:
        return count * shape.vocabulary * 4 * (7 if how.entropy else 4)
    rows = min(ROWS if how.cpu else DEVICE_ROWS, count)
    words = min(shape.vocabulary, max(1, (PIECE if how.cpu else DEVICE_PIECE) // rows))
    piece, vector = rows * words, count * shape.hidden * 4
    weights = words * shape.hidden * how.size * (how.stored != how.size)
    rounded = (count + rows) * shape.hidden * how.size * half
    if how.full:
        return piece * (3 * 4 + 2 * how.size * half) + vector + weights * (1 + half) + rounded
    pieces = piece * (2 * 4 + how.size * half) + (1 + how.entropy) * vector
    return max(pieces + weights + rounded, (2 + 2 * how.entropy) * vector + rounded)
