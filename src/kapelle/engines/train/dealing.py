"""Samples dealt to ranks: about as many tokens to each, and what belongs together whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kapelle.engines.train.batch import pieces, unfold
from kapelle.engines.train.bundles import bundles_of
from kapelle.rows import Sample

FINE = 4
"""What shares a prompt is dealt in pieces of at most one `FINE`-th of a rank's share: each piece computes the prompt again."""


def deal(samples: Sequence[Sample], ranks: int) -> list[list[int]]:
    """Return the indices of each rank's samples, in order; a rank may get none.

    Bundles stay whole. Largest first, each unit goes to the rank with the fewest tokens (Graham 1969): the fullest rank has
    at most one unit more than the emptiest.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    for tokens, members in sorted(_units(samples, ranks), key=lambda unit: -unit[0]):
        rank = filled.index(min(filled))
        filled[rank] += tokens
        dealt[rank].extend(members)
    return [sorted(own) for own in dealt]


def _units(samples: Sequence[Sample], ranks: int) -> Iterator[tuple[int, list[int]]]:
    """Yield what is computed together: its tokens, and which samples it is."""
    if any(sample.bundle is not None for sample in samples):
        for bundle in bundles_of(range(len(samples)), samples):
            yield sum(len(samples[k].tokens) for k in bundle), bundle
        return
    trees = unfold(samples, share=True)
    most = sum(tree.size for tree in trees) // (FINE * ranks)
    for tree in trees:
        for piece in pieces(tree, most):
            yield piece.size, [k for branch in piece.branches for k in branch.samples]
