"""Rows in flight through the lean forward pass: flat prompts, each distinct one read once, our own cache.

Shapes: R rows, Q distinct prompts (per adapter), N their new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from kapelle.engines.decode import Job, route_of
from kapelle.models.fused import FusedPass
from kapelle.models.kv_cache import KVCache, PromptBlock
from kapelle.models.language_model import LanguageModel
from kapelle.models.lean import Attend, LeanModel
from kapelle.models.lora_bank import Route
from kapelle.models.prefixes import Prefixes

CHUNK = 1024
"""Prompt tokens that are read in one pass, or one prompt: what a pass touches stays in the processor's cache."""


class LeanRows:
    """See `decode.Rows`."""

    def __init__(
        self,
        model: LanguageModel,
        lean: LeanModel,
        fused: FusedPass | None,
        prefixes: Prefixes,
        jobs: Sequence[Job],
    ) -> None:
        self._model = model
        self._lean = lean
        self._fused = fused
        self._prefixes = prefixes
        self._keys = [(job.adapter, job.prompt) for job in jobs]
        self._route = route_of([job.adapter for job in jobs])

    def read_prompts(self) -> Tensor:
        """Read what is new of every distinct prompt once and return logits `_RV` of each row's first token."""
        prompts = list(dict.fromkeys(self._keys))
        block = PromptBlock.empty(
            self._lean, [len(prompt) for _, prompt in prompts], self._model.device, self._model.dtype
        )
        known = []
        for number, (adapter, prompt) in enumerate(prompts):
            kv = self._prefixes.find(adapter, prompt)
            known.append(0 if kv is None else kv.shape[3])
            if kv is not None:
                block.put(number, kv)
        logits_QV = torch.cat([self._read(block, prompts, known, chunk) for chunk in _chunks(prompts, known)])
        number_of = {prompt: number for number, prompt in enumerate(prompts)}
        prompt_R = torch.tensor([number_of[key] for key in self._keys], device=self._model.device)
        self._cache = KVCache.seated(block, prompt_R)
        return logits_QV[prompt_R]

    def _read(
        self,
        block: PromptBlock,
        prompts: Sequence[tuple[str | None, tuple[int, ...]]],
        known: Sequence[int],
        chunk: range,
    ) -> Tensor:
        """Read the new tokens of a few prompts and return logits `_QV` of what follows them."""
        device = self._model.device
        new = [len(prompts[q][1]) - known[q] for q in chunk]
        tokens_N = torch.tensor([token for q in chunk for token in prompts[q][1][known[q] :]], device=device)
        position_N = torch.cat([torch.arange(known[q], len(prompts[q][1]), device=device) for q in chunk])
        last_Q = torch.tensor(new, device=device).cumsum(0) - 1
        attend = block.attention(list(_alike(chunk.start, new)))
        route = route_of([prompts[q][0] for q, n in zip(chunk, new, strict=True) for _ in range(n)])

        hidden_QD = self._hidden(tokens_N, position_N, route, attend, last_Q)
        with self._model.computing(route_of([prompts[q][0] for q in chunk])):
            return self._model.logits(hidden_QD)

    def read(self, token_R: Tensor) -> Tensor:
        """Read one more token of each row and return logits `_RV` of the next."""
        position_R = self._cache.extend()
        hidden_RD = self._hidden(token_R, position_R, self._route, self._cache.attend, None)
        with self._model.computing(self._route):
            return self._model.logits(hidden_RD)

    def _hidden(
        self, tokens_N: Tensor, positions_N: Tensor, route: Route, attend: Attend, last_Q: Tensor | None
    ) -> Tensor:
        if self._fused is not None:
            return self._fused.hidden(tokens_N, positions_N, route, attend, last_Q)

        def scaled(layer: int, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor) -> Tensor:
            return attend(layer, q_NHE * self._lean.scale, k_NJE, v_NJE)

        with self._model.computing(route):
            hidden_ND = self._lean.hidden(tokens_N, positions_N, scaled)
        return hidden_ND if last_Q is None else hidden_ND[last_Q]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices alone."""
        self._cache = self._cache.kept(torch.tensor(rows, device=self._model.device))
        self._keys = [self._keys[row] for row in rows]
        self._route = route_of([adapter for adapter, _ in self._keys])

    def leave(self, rows: Sequence[int], said: Sequence[Sequence[int]]) -> None:
        """Let later prompts go on from what these rows read: their prompts and all but the last they said."""
        texts = [
            (self._keys[row][0], (*self._keys[row][1], *ids[:-1]))
            for row, ids in zip(rows, said, strict=True)
        ]
        self._prefixes.put(self._cache, rows, texts)


def _chunks(prompts: Sequence[tuple[str | None, tuple[int, ...]]], known: Sequence[int]) -> Iterator[range]:
    """Split prompts into runs of at most `CHUNK` new tokens, or one prompt."""
    first, filled = 0, 0
    for number, (_, prompt) in enumerate(prompts):
        new = len(prompt) - known[number]
        if number > first and filled + new > CHUNK:
            yield range(first, number)
            first, filled = number, 0
        filled += new
    yield range(first, len(prompts))


def _alike(first: int, lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Return runs of equal lengths: first prompt, prompt after the last, length."""
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        yield first, first + count, length
        first += count
