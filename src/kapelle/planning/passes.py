"""Which tokens an update computes in one pass, by their number alone: `engines/train/batch.py` without the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tree:
    """Answers of one learner that share the beginning of their text."""

    stem: int
    """Tokens that all share; 0 where there is one branch."""
    branches: tuple[int, ...]
    """Tokens of each branch after the stem."""
    targets: tuple[int, ...]
    """Target tokens of each branch."""
    low: int = 0
    """Features of the low-rank products of a token in one block: the adapter's rank times its layers there."""
    masked: int = 0
    """Features in that pass through dropout, of the adapter's layers in one block."""
    critic: bool = False
    """Whether values are predicted instead of words."""

    @property
    def size(self) -> int:
        """Tokens that are computed."""
        return self.stem + sum(self.branches)


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens in attention."""

    queries: int
    keys: int
    """Its own tokens and those before them."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass."""

    trees: tuple[Tree, ...]

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

    @property
    def masked(self) -> int:
        """Features under dropout in one block, of all tokens."""
        return sum(tree.size * tree.masked for tree in self.trees)

    def spans(self) -> Iterator[Span]:
        """Yield its runs of tokens: stems, and branches that look back at them."""
        for tree in self.trees:
            if tree.stem:
                yield Span(tree.stem, tree.stem)
            for branch in tree.branches:
                yield Span(branch, tree.stem + branch)


def passes_of(trees: Sequence[Tree], max_tokens: int) -> Iterator[Pass]:
    """Yield the passes of at most `max_tokens` tokens (at least one branch) in which trees are computed."""
    waiting: list[Tree] = []
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


def _pieces(tree: Tree, max_tokens: int) -> Iterator[Tree]:
    first, filled = 0, tree.stem
    for number, branch in enumerate(tree.branches):
        if number > first and filled + branch > max_tokens:
            yield _part(tree, first, number)
            first, filled = number, tree.stem
        filled += branch
    yield _part(tree, first, len(tree.branches))


def _part(tree: Tree, first: int, last: int) -> Tree:
    branches, targets = tree.branches[first:last], tree.targets[first:last]
    return Tree(tree.stem, branches, targets, tree.low, tree.masked, tree.critic)
