"""Rows in flight without any cache: every step reads all texts again, by the pass that training uses.

The slowest way, and right for every model: it is taken where a model's own cache gives other logits than its texts do.

Shapes: R rows, N flat tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kapelle.engines.rollout.local.rows import Job, route_of
from kapelle.models.fast.plan import plan_sequences
from kapelle.models.language_model import LanguageModel

MOST = 1 << 14
"""Most tokens of one pass, if no text is longer."""


class RereadRows:
    """See `rows.Rows`."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._texts: list[tuple[str | None, list[int]]] = []

    @property
    def open(self) -> bool:
        """True: rows do not know of one another."""
        return True

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Read every prompt and return logits `_RV` of its first new token."""
        joining = [(job.adapter, list(job.prompt)) for job in jobs]
        self._texts += joining
        return self._logits(joining)

    def read(self, token_R: Tensor) -> Tensor:
        """Read one more token of each row and return logits `_RV` of the next."""
        for (_, text), token in zip(self._texts, token_R.tolist(), strict=True):
            text.append(token)
        return self._logits(self._texts)

    def leave(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Drop rows."""
        gone = set(rows)
        self._texts = [text for row, text in enumerate(self._texts) if row not in gone]

    def _logits(self, texts: Sequence[tuple[str | None, list[int]]]) -> Tensor:
        return torch.cat(
            [self._pass(texts[first:last]) for first, last in _spans([len(t) for _, t in texts])]
        )

    def _pass(self, texts: Sequence[tuple[str | None, list[int]]]) -> Tensor:
        device = self._model.device
        lengths = [len(text) for _, text in texts]
        tokens_N = torch.tensor([token for _, text in texts for token in text], device=device)
        positions_N = torch.cat([torch.arange(length, device=device) for length in lengths])
        ends = list(accumulate(lengths))
        route = [
            (adapter, ends[last - 1] - sum(lengths[first:last]), ends[last - 1])
            for adapter, first, last in route_of([adapter for adapter, _ in texts])
        ]
        with self._model.computing(route):
            hidden_ND = self._model.hidden(tokens_N, positions_N, plan_sequences(lengths, device))
            return self._model.logits(hidden_ND[torch.tensor(ends, device=device) - 1])


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Split texts into runs of at most `MOST` tokens, or one text."""
    first, filled = 0, 0
    for number, length in enumerate(lengths):
        if number > first and filled + length > MOST:
            yield first, number
            first, filled = number, 0
        filled += length
    yield first, len(lengths)
