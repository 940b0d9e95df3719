"""Keys and values of finished rows, kept for prompts that continue them.

An agent's next prompt is its last prompt, the ids that it sampled, and the messages since. Keys and values of the
first two exist already when the row ends. They are kept as the rows left them, many rows in one piece, and
copied only when a prompt needs them. The least recently used piece is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kapelle.models.fast.kv_cache import KVCache

Text = tuple[str | None, tuple[int, ...]]
"""An adapter (None for the bare base) and the token ids that it read."""


@dataclass(slots=True)
class _Piece:
    cache: KVCache
    texts: Sequence[Text]


class Prefixes:
    """Keys and values of texts, found by the beginning of a longer text."""

    def __init__(self, most: int) -> None:
        """Hold at most `most` token places; 0 keeps nothing."""
        self._most = most
        self._pieces: OrderedDict[int, _Piece] = OrderedDict()
        self._where: dict[tuple[str | None, int], tuple[int, int]] = {}
        """(adapter, hash of a text) → (piece, row); built on the first lookup."""
        self._made = 0
        self._indexed = 0

    @property
    def places(self) -> int:
        """Token places that are held."""
        return sum(piece.cache.places for piece in self._pieces.values())

    def put(self, cache: KVCache, rows: Sequence[int], texts: Sequence[Text]) -> None:
        """Keep rows (ascending) of a cache that have read these texts; as many as there is room for."""
        room = self._most // cache.places_of_a_row
        if not rows or not room:
            return
        kept = cache.kept(torch.tensor(rows[:room], device=cache.device))
        while self._pieces and self.places + kept.places > self._most:
            dropped, _ = self._pieces.popitem(last=False)
            self._where = {text: place for text, place in self._where.items() if place[0] != dropped}
        self._pieces[self._made] = _Piece(kept, texts[:room])
        self._made += 1

    def find(self, adapter: str | None, prompt: Sequence[int]) -> Tensor | None:
        """Return keys and values `(L, 2, J, n, E)` of the longest text that a prompt continues."""
        self._index()
        if not self._where:
            return None
        found: tuple[int, int] | None = None
        for length, digest in enumerate(_digests(prompt[:-1]), 1):
            place = self._where.get((adapter, digest))
            if place is not None and self._pieces[place[0]].texts[place[1]][1] == prompt[:length]:
                found = place
        if found is None:
            return None
        piece, row = self._pieces[found[0]], found[1]
        self._pieces.move_to_end(found[0])
        return piece.cache.row(row, len(piece.texts[row][1]))

    def forget(self, adapter: str | None) -> None:
        """Drop what an adapter has read; everything for the bare base, which all adapters use."""
        pieces = self._pieces.values()
        self._pieces, self._where = OrderedDict(), {}
        for piece in pieces if adapter is not None else ():
            rows = [row for row, (owner, _) in enumerate(piece.texts) if owner != adapter]
            self.put(piece.cache, rows, [piece.texts[row] for row in rows])

    def _index(self) -> None:
        for number in range(self._indexed, self._made):
            for row, (adapter, ids) in enumerate(
                self._pieces[number].texts if number in self._pieces else ()
            ):
                *_, digest = _digests(ids)
                self._where[adapter, digest] = (number, row)
        self._indexed = self._made


def _digests(ids: Sequence[int]) -> Iterator[int]:
    """Return a hash of every beginning of a text, shortest first."""
    return accumulate(ids, lambda digest, token: hash((digest, token)))
