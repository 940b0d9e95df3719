"""Pack samples into batches of flat tokens for forward passes, and split samples into minibatches and shards.

Every distinct token is computed once. A learner is a set of weights that is evaluated at target tokens: a policy
computes the log-probs of the target tokens, and a critic computes the values before them. The samples of a group share
their prompt, the prompts of an agent often begin alike, later turns of an agent extend earlier turns, and short answers
are often equal. The function `unfold`
finds these shared tokens, and `pack` concatenates the rest. Packing does not change any result, because a sequence
attends only to itself and its positions start at 0.

Samples that a loss compares with each other form a bundle (`Sample.bundle`). The samples of a bundle stay together in
one forward pass, in one optimiser step and on one rank.

In tensor shapes, N is the number of flat tokens, K of target tokens, and S of sequences (samples) of one learner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from kapelle.algorithm import Targets
from kapelle.functional.masking import allowed_words
from kapelle.models.fast.attention import AttentionPlan, Span, plan_spans
from kapelle.models.routing import unpacked
from kapelle.models.token_masks import TokenMasks
from kapelle.rows import Sample
from kapelle.runtime.tensors import send_together
from kapelle.types import Image, Routing


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The target tokens of one learner in a batch."""

    place: slice
    """The positions of the learner's targets among the K targets of the batch."""
    targets: Targets
    samples: tuple[int, ...]
    """The index of the sample that each of the S segments belongs to."""
    counts: tuple[int, ...]
    """The number of targets in each segment."""


@dataclass(frozen=True, slots=True)
class AllowedTargets:
    """The tokens that constraints allowed at the positions of targets. Equal masks are stored once.

    In tensor shapes, M is the number of distinct masks and W the number of words of 32 tokens each (see `TokenMasks`).
    """

    bits_MW: Tensor
    """The distinct masks. The first mask allows all tokens."""
    mask_K: Tensor
    """The index of the mask of each target."""

    def to(self, device: torch.device) -> AllowedTargets:
        """Return the allowed tokens on another device."""
        return AllowedTargets(self.bits_MW.to(device), self.mask_K.to(device))

    def among(self, place: slice) -> AllowedTargets:
        """Return the allowed tokens of the targets in a slice."""
        return replace(self, mask_K=self.mask_K[place])

    def cut(self, logits_KC: Tensor, first: int = 0, rows: slice = slice(None)) -> Tensor:
        """Set the logits of forbidden tokens to −∞ in place and return the logits.

        The first column of `logits_KC` belongs to the token id `first`. The slice `rows` selects the targets of these
        logits.
        """
        bits_KW = self.bits_MW[self.mask_K[rows]]
        return logits_KC.masked_fill_(~allowed_words(bits_KW, first, first + logits_KC.shape[1]), -torch.inf)


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one forward pass over one base model."""

    tokens_N: Tensor
    positions_N: Tensor
    plan: AttentionPlan
    spans: tuple[Span, ...]
    """The sequences and shared prefixes of the attention plan."""
    owners: tuple[tuple[str, int, int], ...]
    """The learners in the batch, as tuples of the learner, its first flat token and the flat token after its last."""
    source_K: Tensor
    """The index of the flat token whose hidden state predicts each target."""
    token_K: Tensor
    """The token id of each target, or 0 for a critic's target after the last token."""
    temperature_K: Tensor
    parts: Mapping[str, MicroBatch]
    tokens: tuple[int, ...]
    """The flat tokens as Python integers, available without reading from a device."""
    experts_NLk: Tensor | None = None
    """The recorded experts of the tokens as int16. Negative values mean that the router chooses the experts of a token.
    The attribute is None if the router always chooses."""
    images: Mapping[int, tuple[Image, ...]] = field(default_factory=dict)
    """Mapping from the index of the first flat token of a sequence to the images of the sequence."""
    allowed: AllowedTargets | None = None
    """The tokens that constraints allowed at the positions of targets, or None if there are no constraints."""


@dataclass(slots=True)
class TokenBranch:
    """Tokens after a shared prefix, which are computed once for all samples that contain them."""

    tokens: tuple[int, ...]
    samples: list[int]


@dataclass(slots=True)
class TokenTree:
    """A prefix and the branches that continue it. A tree with a single branch has an empty prefix."""

    learner: str
    prefix: tuple[int, ...]
    branches: list[TokenBranch]
    images: tuple[Image, ...] = ()
    """The images of each sample in the tree. A tree with images has no shared prefix."""
    routing: Routing | None = None
    """The recorded experts of the samples in the tree. A tree with recorded experts has no shared prefix."""

    @property
    def size(self) -> int:
        """The number of tokens that are computed for the tree."""
        return len(self.prefix) + sum(len(branch.tokens) for branch in self.branches)


def unfold(samples: Sequence[Sample], share: bool) -> list[TokenTree]:
    """Return the trees of tokens that must be computed for the samples, ordered by learner.

    Only tokens up to the last target of a sample are kept. A sample that is a prefix of another sample shares the
    branch of the other sample. With `share`, samples with the same prompt become branches of one tree, and so do
    samples whose different prompts begin with the same text, such as a system prompt or examples.
    """
    trees: list[TokenTree] = []
    # Equal tokens with different images or recorded experts are different sequences.
    kinds = {_kind(sample): (sample.images, sample.routing) for sample in samples}
    for kind, (images, routing) in sorted(kinds.items(), key=lambda each: each[0]):
        learner = kind[0]
        # The distinct sequences, each with all samples that are a prefix of it: in descending order, a sequence comes
        # directly before its prefixes.
        needed = {
            k: sample.tokens[: sample.targets[-1]]
            for k, sample in enumerate(samples)
            if _kind(sample) == kind
        }
        branches: list[TokenBranch] = []
        for k in sorted(needed, key=lambda k: (needed[k], k), reverse=True):
            if branches and branches[-1].tokens[: len(needed[k])] == needed[k]:
                branches[-1].samples.append(k)
            else:
                branches.append(TokenBranch(needed[k], [k]))
        prompts: dict[tuple[int, ...], list[TokenBranch]] = {}
        for branch in branches[::-1]:
            start = min(samples[k].targets[0] for k in branch.samples)
            prompts.setdefault(
                branch.tokens[:start] if share and not (images or routing) else branch.tokens, []
            ).append(branch)
        single = [members[0] for members in prompts.values() if len(members) == 1]
        alike = (
            _alike(single, samples)
            if share and not (images or routing)
            else [((), [each]) for each in single]
        )
        for prefix, members in [*alike, *((p, m) for p, m in prompts.items() if len(m) > 1)]:
            cut = [TokenBranch(branch.tokens[len(prefix) :], branch.samples) for branch in members]
            trees.append(TokenTree(learner, prefix, cut, images, routing))
    return trees


SHARED = 16
"""The minimum number of tokens that different prompts must have in common to be computed once."""


def _alike(
    branches: Sequence[TokenBranch], samples: Sequence[Sample]
) -> list[tuple[tuple[int, ...], list[TokenBranch]]]:
    """Return groups of sequences, each with the beginning that its prompts have in common. The sequences must be in order.

    A sequence joins the group before it if the group then saves at least as many tokens as before.
    """
    groups: list[tuple[tuple[int, ...], list[TokenBranch]]] = []
    for branch in branches:
        prompt = branch.tokens[: min(samples[k].targets[0] for k in branch.samples)]
        prefix, members = groups[-1] if groups else ((), [])
        if len(members) == 1:
            [first] = members
            prefix = first.tokens[: min(samples[k].targets[0] for k in first.samples)]
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, prompt, strict=False)))
        if common >= SHARED and common * len(members) >= len(prefix) * (len(members) - 1):
            groups[-1] = (prefix[:common], [*members, branch])
        else:
            groups.append(((), [branch]))
    return groups


def _kind(sample: Sample) -> tuple[str, tuple[str, ...], bytes]:
    routing = b"" if sample.routing is None else sample.routing.data
    return sample.learner, tuple(image.hash for image in sample.images), routing


def pack(
    samples: Sequence[Sample],
    max_tokens: int,
    device: torch.device | str = "cpu",
    share: bool = True,
    masks: TokenMasks | None = None,
) -> Iterator[Batch]:
    """Yield batches of at most `max_tokens` tokens that together contain every sample once.

    A sequence that is longer than `max_tokens` is in a separate batch. The argument `masks` computes the token masks
    for the samples' constraints.
    """
    waiting: list[TokenTree] = []
    filled = 0
    for tree in unfold(samples, share):
        for piece in pieces(tree, max_tokens):
            if waiting and filled + piece.size > max_tokens:
                yield _laid_flat(waiting, samples, device, masks)
                waiting, filled = [], 0
            waiting.append(piece)
            filled += piece.size
    if waiting:
        yield _laid_flat(waiting, samples, device, masks)


def blank(learner: str, device: torch.device | str) -> Batch:
    """Return a batch with a single token and no targets on the base model of a learner."""
    none = torch.zeros(0, dtype=torch.long, device=device)
    one = torch.zeros(1, dtype=torch.long, device=device)
    span = Span(0, 1, None)
    plan = plan_spans([span], device)
    return Batch(one, one, plan, (span,), ((learner, 0, 1),), none, none, none.float(), {}, (0,))


def pieces(tree: TokenTree, max_tokens: int) -> Iterator[TokenTree]:
    """Split a tree that is too large between its branches. Each resulting tree computes the prefix again."""
    branches: list[TokenBranch] = []
    filled = len(tree.prefix)
    for branch in tree.branches:
        if branches and filled + len(branch.tokens) > max_tokens:
            yield replace(tree, branches=branches)
            branches, filled = [], len(tree.prefix)
        branches.append(branch)
        filled += len(branch.tokens)
    yield replace(tree, branches=branches)


def _laid_flat(
    trees: Sequence[TokenTree],
    samples: Sequence[Sample],
    device: torch.device | str,
    masks: TokenMasks | None,
) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    owners: list[tuple[str, int, int]] = []
    images: dict[int, tuple[Image, ...]] = {}
    experts: dict[int, Tensor] = {}
    source: list[int] = []
    order: dict[str, list[int]] = {}
    for tree in trees:
        begin, stem = len(tokens), len(tree.prefix)
        tokens.extend(tree.prefix)
        positions.extend(range(stem))
        if stem:
            spans.append(Span(begin, stem, None))
        for branch in tree.branches:
            start = len(tokens)
            tokens.extend(branch.tokens)
            if tree.images:
                images[start] = tree.images
            if tree.routing is not None:
                experts[start] = unpacked(tree.routing)[: len(branch.tokens)]
            positions.extend(range(stem, stem + len(branch.tokens)))
            spans.append(Span(start, len(branch.tokens), (begin, stem) if stem else None))
            for k in branch.samples:
                order.setdefault(tree.learner, []).append(k)
                source.extend(
                    [begin + t - 1 if t <= stem else start + t - 1 - stem for t in samples[k].targets]
                )
        if owners and owners[-1][0] == tree.learner:
            owners[-1] = (tree.learner, owners[-1][1], len(tokens))
        else:
            owners.append((tree.learner, begin, len(tokens)))
    chosen = [samples[k] for members in order.values() for k in members]
    spans = [span for span in spans if span.length]
    here = Batch(
        tokens_N=torch.tensor(tokens),
        positions_N=torch.tensor(positions),
        plan=plan_spans(spans, device),
        spans=tuple(spans),
        owners=tuple(owners),
        source_K=torch.tensor(source),
        token_K=torch.tensor([s.tokens[t] if t < len(s.tokens) else 0 for s in chosen for t in s.targets]),
        temperature_K=torch.tensor([s.temperature for s in chosen for _ in s.targets]),
        parts=_parts_by_learner(order, samples),
        tokens=tuple(tokens),
        images=images,
        experts_NLk=_at_their_places(experts, len(tokens)),
        allowed=allowed_targets(chosen, masks),
    )
    return _sent(here, device)


def _at_their_places(experts: Mapping[int, Tensor], count: int) -> Tensor | None:
    """Return the experts of a pass over `count` tokens, of shape (N, L, k).

    The mapping `experts` contains the experts of each sequence by the index of its first token.
    """
    if not experts:
        return None
    some = next(iter(experts.values()))
    experts_NLk = some.new_full((count, *some.shape[1:]), -1)
    for first, own_TLk in experts.items():
        experts_NLk[first : first + len(own_TLk)] = own_TLk
    return experts_NLk


def allowed_targets(samples: Sequence[Sample], masks: TokenMasks | None) -> AllowedTargets | None:
    """Return the allowed tokens at the targets of the samples on the CPU, or None if no sample has a constraint."""
    constraints = [sample.constraint for sample in samples]
    if constraints.count(None) == len(constraints):
        return None
    assert masks is not None, "samples with constraints need the model's masks"
    known: dict[bytes, int] = {b"": 0}
    rows = [np.full(masks.words, -1, dtype=np.int32)]
    number: list[int] = []
    for sample in samples:
        if sample.constraint is None:
            number += [0] * len(sample.targets)
            continue
        completion = sample.tokens[sample.begin : sample.targets[-1] + 1]
        bits_TW = masks.of(sample.constraint, completion)
        for bits_W in (bits_TW[target - sample.begin] for target in sample.targets):
            found = known.setdefault(bits_W.tobytes(), len(rows))
            if found == len(rows):
                rows.append(bits_W)
            number.append(found)
    return AllowedTargets(torch.from_numpy(np.stack(rows)), torch.tensor(number))


def _parts_by_learner(
    by_learner: Mapping[str, Sequence[int]], samples: Sequence[Sample]
) -> dict[str, MicroBatch]:
    parts: dict[str, MicroBatch] = {}
    first = 0
    for learner, members in by_learner.items():
        chosen = [samples[k] for k in members]
        counts = torch.tensor([len(sample.targets) for sample in chosen])
        last = first + int(counts.sum())
        masks = [torch.ones(len(s.targets)) if s.mask is None else s.mask for s in chosen]
        columns = {name: torch.cat([sample.columns[name] for sample in chosen]) for name in chosen[0].columns}
        segment_K = torch.arange(len(chosen)).repeat_interleave(counts)
        pairs = [sample.bundle for sample in chosen if sample.bundle is not None]
        assert len(pairs) in (0, len(chosen)), "either all of a learner's samples are paired, or none is"
        observed = [float(sample.observed) for sample in chosen]
        targets = Targets(
            segment_K,
            len(chosen),
            torch.cat(masks),
            columns,
            torch.tensor(pairs) if pairs else None,
            torch.tensor(observed) if any(observed) else None,
        )
        parts[learner] = MicroBatch(slice(first, last), targets, tuple(members), tuple(counts.tolist()))
        first = last
    return parts


def _sent(batch: Batch, device: torch.device | str) -> Batch:
    """Move all tensors of a batch from the CPU to a device in one transfer."""
    if torch.device(device).type == "cpu":
        return batch
    tensors = [batch.tokens_N, batch.positions_N, batch.source_K, batch.token_K, batch.temperature_K]
    tensors += [] if batch.experts_NLk is None else [batch.experts_NLk]
    tensors += [] if batch.allowed is None else [batch.allowed.bits_MW, batch.allowed.mask_K]
    for part in batch.parts.values():
        targets = part.targets
        tensors += [targets.segment_K, targets.mask_K, *targets.columns.values()]
        tensors += [each for each in (targets.pair_S, targets.observed_S) if each is not None]
    there = dict(zip(map(id, tensors), send_together(tensors, device), strict=True))

    def sent(targets: Targets) -> Targets:
        return replace(
            targets,
            segment_K=there[id(targets.segment_K)],
            mask_K=there[id(targets.mask_K)],
            columns={name: there[id(column_K)] for name, column_K in targets.columns.items()},
            pair_S=there.get(id(targets.pair_S)),
            observed_S=there.get(id(targets.observed_S)),
        )

    return replace(
        batch,
        experts_NLk=there.get(id(batch.experts_NLk)),
        allowed=None
        if batch.allowed is None
        else AllowedTargets(there[id(batch.allowed.bits_MW)], there[id(batch.allowed.mask_K)]),
        tokens_N=there[id(batch.tokens_N)],
        positions_N=there[id(batch.positions_N)],
        source_K=there[id(batch.source_K)],
        token_K=there[id(batch.token_K)],
        temperature_K=there[id(batch.temperature_K)],
        parts={name: replace(part, targets=sent(part.targets)) for name, part in batch.parts.items()},
    )


def bundles_of(chosen: Sequence[int], samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices in `chosen` grouped by `Sample.bundle`, in order. A sample without a bundle forms a separate group."""
    found: dict[tuple[str, int | None, int], list[int]] = {}
    for k in chosen:
        sample = samples[k]
        alone = k if sample.bundle is None else -1
        found.setdefault((sample.learner, sample.bundle, alone), []).append(k)
    return list(found.values())


def passes(chosen: Sequence[int], samples: Sequence[Sample], max_tokens: int) -> list[tuple[list[int], int]]:
    """Return the samples of each forward pass together with the token limit of the pass. Bundles are not split.

    Without bundles, the result has one entry, which `pack` splits. A bundle that is longer than `max_tokens` gets its
    own pass.
    """
    if all(samples[k].bundle is None for k in chosen):
        return [(list(chosen), max_tokens)]
    pieces: list[tuple[list[int], int]] = []
    for bundle in bundles_of(chosen, samples):
        size = sum(len(samples[k].tokens) for k in bundle)
        if pieces and pieces[-1][1] + size <= max_tokens:
            pieces[-1] = (pieces[-1][0] + bundle, pieces[-1][1] + size)
        else:
            pieces.append((bundle, size))
    return pieces


def minibatches(samples: Sequence[Sample], parts: int, seeds: Mapping[str, int]) -> list[list[int]]:
    """Split the samples of each learner at random into `parts` minibatches without splitting bundles.

    Each learner is split independently, with its own seed in `seeds`. Empty minibatches are dropped.
    """
    split: list[list[int]] = [[] for _ in range(parts)]
    for learner in dict.fromkeys(sample.learner for sample in samples):
        own = bundles_of([k for k, sample in enumerate(samples) if sample.learner == learner], samples)
        if parts > 1:
            generator = torch.Generator().manual_seed(seeds[learner])
            own = [own[k] for k in torch.randperm(len(own), generator=generator).tolist()]
        for number in range(parts):
            split[number].extend(sorted(k for bundle in own[number::parts] for k in bundle))
    return [chosen for chosen in split if chosen]


SHARD_PIECES = 4
"""Samples with a common prompt are sharded in pieces of at most a rank's number of tokens divided by this number. Each
piece computes the prompt again."""


def shard_samples(samples: Sequence[Sample], ranks: int) -> list[list[int]]:
    """Return the indices of the samples of each rank, in ascending order. A rank may get no samples.

    Bundles are not split. Each unit of samples, largest first, is assigned to the rank with the fewest tokens (Graham
    1969), so the ranks with the most and the fewest tokens differ by at most one unit.
    """
    # A unit is computed together; it consists of its number of tokens and its samples.
    if any(sample.bundle is not None for sample in samples):
        bundles = bundles_of(range(len(samples)), samples)
        units = [(sum(len(samples[k].tokens) for k in bundle), bundle) for bundle in bundles]
    else:
        trees = unfold(samples, share=True)
        most = sum(tree.size for tree in trees) // (SHARD_PIECES * ranks)
        units = [
            (piece.size, [k for branch in piece.branches for k in branch.samples])
            for tree in trees
            for piece in pieces(tree, most)
        ]
    sharded: list[list[int]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    for tokens, members in sorted(units, key=lambda unit: -unit[0]):
        rank = filled.index(min(filled))
        filled[rank] += tokens
        sharded[rank].extend(members)
    return [sorted(own) for own in sharded]


_KEY_BITS = 0xFFFFFFFF


def token_keys(batch: Batch, seeds: Mapping[str, int]) -> Tensor:
    """Return the dropout keys of the flat tokens of a batch, of shape (N,) and type int32, given one seed per learner.

    The key of a token depends on the seed of its learner and on all tokens up to this token. Some splits of a step
    compute a shared prefix once, and other splits compute the prefix several times. Because keys depend only on the
    tokens, the dropout masks are the same in both cases.
    """
    tokens, owners = batch.tokens, iter(batch.owners)
    keys = [0] * len(tokens)
    learner, _, last = next(owners)
    for span in batch.spans:
        while span.start >= last:
            learner, _, last = next(owners)
        key = seeds.get(learner, 0) & _KEY_BITS
        if span.prefix is not None:
            begin, stem = span.prefix
            key = keys[begin + stem - 1]
        for place in range(span.start, span.start + span.length):
            key = (((key * 0x01000193) ^ (tokens[place] + 1)) * 0x85EBCA6B) & _KEY_BITS
            key ^= key >> 13
            keys[place] = key
    keys_N = torch.tensor(keys, dtype=torch.int64) - (1 << 31)
    (sent_N,) = send_together([keys_N.to(torch.int32)], batch.tokens_N.device)
    return sent_N
