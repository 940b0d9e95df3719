"""Compute the memory of an update: the tokens of each pass, and the memory of the pass, with one term for each tensor in the code.

kapelle's own forward pass (`models/fast/flat.py`) stores these features per token and block for the backward pass:

    first half    The input x (D, float32). If heads are normalised, also the queries and keys before the norm ((H + J)·E, float32) and
                  one number per head.
    attention     The queries, keys and values, and the attention weights (see below).
    output        The result of attention (H·E), if the output projection has an adapter or is trained.
    second half   The input x (D, float32), and the results of gate and up projection (2·F).
    adapters      The product A·x of every adapted layer (one number per rank).

Each pass also stores the embeddings, the angles of the positions (2·E, float32), and the input and output of the last norm. Features
without a given data type have the compute type. On a CPU, attention with at most 512 keys stores a weight for every query head, query
and visible key (32 queries at a time). In other cases, torch's fused attention stores queries, keys, values, outputs and one number
per query.

With gradient checkpointing, each block stores only x (D, float32), and one block at a time is recomputed.

The peak is at one of two moments. When the output head is computed, the last hidden states exist in addition to everything that is
stored. In the backward pass of the second half of the last block, the norm h (D), silu(gate) and its product with up (2·F) are
recomputed, and the gradients of F, of h and three gradients of x exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kapelle.cluster.planning.planned_run import NOTHING, PlannedRun, Shape
from kapelle.cluster.planning.workload import PlannedTurn

MOST_KEYS = 512
"""Maximum number of keys for which attention on a CPU uses matrix products (`models/fast/attention.py`)."""
STEP = 32
"""Number of queries of one matrix product (`models/fast/attention.py`)."""
LOGIT_BUDGET = 1 << 21
"""Maximum number of logits that are stored for the backward pass (`engines/train/torch/large_head.py`)."""
ROWS, PIECE, DEVICE_ROWS, DEVICE_PIECE = 512, 1 << 20, 2048, 1 << 25
"""Number of tokens and of logits of a piece, on a CPU and on a GPU (`engines/train/torch/large_head.py`)."""

ENOUGH = 3
"""Number of passes of one learner that are sufficient to include all kinds of passes."""


def update_moments(run: PlannedRun, base: str) -> Iterator[Mapping[str, int]]:
    """Yield the memory by kind of an update's passes over a base model, without weights and optimiser states."""
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
    """Return the passes of one optimiser step over a base model's share of the completions of a step."""
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
    """Yield the sequences of the episodes of one task for each learner."""
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
    """Return groups of completions in which each prompt continues the previous completion. Each group is one sequence."""
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
    """Return the sequences of the completions of a group, which share the first prompt of an episode."""
    first, last = chain[0], chain[-1]
    length, targets = last.prompt + last.answer - 1, sum(turn.answer for turn in chain)
    if first.moment == 0 and group > 1:
        return SharedPrefix(first.prompt, (length - first.prompt,) * group, (targets,) * group)
    return SharedPrefix(0, (length,) * group, (targets,) * group)


# Passes by their number of tokens, as in `engines/train/batch.py`.


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Sequences of one learner that share their first tokens."""

    stem: int
    """Number of shared tokens, or 0 if there is only one branch."""
    branches: tuple[int, ...]
    """Number of tokens of each branch after the stem."""
    targets: tuple[int, ...]
    """Number of target tokens of each branch."""
    low: int = 0
    """Number of features of the low-rank products of a token in one block: the rank of the adapter times the number of adapted layers in
    the block."""
    critic: bool = False
    """Whether the learner predicts values (a critic)."""

    @property
    def size(self) -> int:
        """Number of tokens that are computed."""
        return self.stem + sum(self.branches)


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """A contiguous span of tokens in attention."""

    queries: int
    keys: int
    """Number of keys: the span's own tokens and the tokens before them."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass, which computes several sequences."""

    trees: tuple[SharedPrefix, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of the pass, N."""
        return sum(tree.size for tree in self.trees)

    @property
    def targets(self) -> int:
        """Number of target tokens of policies, K."""
        return sum(sum(tree.targets) for tree in self.trees if not tree.critic)

    @property
    def low(self) -> int:
        """Number of features of the low-rank products of all tokens in one block."""
        return sum(tree.size * tree.low for tree in self.trees)

    def spans(self) -> Iterator[PlannedSpan]:
        """Yield the spans of tokens of the pass: the stems, and the branches that attend to them."""
        for tree in self.trees:
            if tree.stem:
                yield PlannedSpan(tree.stem, tree.stem)
            for branch in tree.branches:
                yield PlannedSpan(branch, tree.stem + branch)


def passes_of(trees: Sequence[SharedPrefix], max_tokens: int) -> Iterator[Pass]:
    """Yield the passes in which sequences are computed.

    Each pass has at most `max_tokens` tokens, but at least one branch.
    """
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
    """The data types and options with which a base model computes."""

    size: int
    """Number of bytes per number in the compute type."""
    stored: int
    """Number of bytes of a weight in memory."""
    cpu: bool
    full: bool
    """Whether the weights of the base model are trained."""
    adapted_output: bool
    """Whether the output projection of attention has an adapter."""
    checkpointing: bool
    entropy: bool = False
    """Whether the loss includes the entropy."""


def kept_by_block(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the number of bytes that one block stores for its backward pass."""
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
    """Return the number of bytes that the attention of one block stores."""
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
    """Return the number of bytes that a complete forward pass stores, up to the input of the last norm."""
    stream = 4 * work.tokens * shape.hidden
    once = stream + 2 * 4 * work.tokens * shape.head_size
    if how.full:
        once += stream  # the last norm's gradient needs what it normalised
    casts = shape.depth * shape.heads * shape.head_size * shape.hidden * how.size
    once += casts if how.full and how.size != 4 else 0
    blocks = shape.depth * stream if how.checkpointing else shape.depth * kept_by_block(shape, work, how)
    return once + blocks


def activations(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the number of bytes of activations when the output head is computed, with the last hidden states but without logits."""
    hidden = 4 * shape.hidden * (work.tokens + work.targets)
    return kept(shape, work, how) + hidden


def block_backward(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the number of bytes of activations and of their gradients in the backward pass of the last block."""
    half = how.size != 4
    per_token = how.size * (3 * shape.inner + shape.hidden * (1 + half)) + 3 * 4 * shape.hidden
    recomputed = kept_by_block(shape, work, how) - 4 * work.tokens * shape.hidden if how.checkpointing else 0
    freed = 4 * work.tokens * shape.hidden  # the last norm's input
    return kept(shape, work, how) - freed + recomputed + work.tokens * per_token


def logits(shape: Shape, work: Pass, how: Compute) -> int:
    """Return the maximum number of bytes of the output head, without the gradient of its weights.

    Up to 2²¹ logits are computed at once, and four tensors of this size exist: the logits scaled by the temperature, a tensor for the
    log-prob, the softmax, and a tensor for its entropy. If the loss includes the entropy, autograd stores seven such tensors. More
    logits are computed in pieces (`large_head.py`): each piece exists twice in float32 and once in half precision, in addition to a
    gradient per hidden state. A trained head stores a third copy of each piece.
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
