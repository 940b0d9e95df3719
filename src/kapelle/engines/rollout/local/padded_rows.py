"""Rows in flight through a `transformers` causal LM: prompts padded on the left, the library's own cache.

Whether that gives a model's own logits is tried before rows are played (ways.py).

Shapes: R rows, P prompt positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kapelle.engines.rollout.local.rows import Job, route_of
from kapelle.models.language_model import LanguageModel

if TYPE_CHECKING:
    from transformers import Cache

CacheOf = Callable[[LanguageModel], "Cache"]


def plain_cache(_model: LanguageModel) -> Cache:
    """Return an empty cache of keys and values, all of them of every layer."""
    from transformers import DynamicCache

    return DynamicCache()


def cache_by_layer(model: LanguageModel) -> Cache:
    """Return an empty cache with what each layer keeps: keys and values, those of a window, or a state."""
    from transformers import DynamicCache

    return DynamicCache(config=model.model.config)


class PaddedRows:
    """See `rows.Rows`."""

    def __init__(self, model: LanguageModel, cache_of: CacheOf = plain_cache) -> None:
        """Read with the cache that `cache_of` makes."""
        self._model = model
        self._cache_of = cache_of
        accepted = inspect.signature(model.body.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
        self._adapters: list[str | None] = []

    @property
    def open(self) -> bool:
        """True if no row is in flight: the library's cache takes prompts all together or not at all."""
        return not self._adapters

    def join(self, jobs: Sequence[Job]) -> Tensor:
        """Read every prompt and return logits `_RV` of its first new token."""
        assert self.open, "rows join only when no others are in flight"
        self._adapters = [job.adapter for job in jobs]
        self._cache = self._cache_of(self._model)
        longest = max(len(job.prompt) for job in jobs)
        pad = [longest - len(job.prompt) for job in jobs]
        rows = [(0,) * p + job.prompt for p, job in zip(pad, jobs, strict=True)]
        self._pad_R = torch.tensor(pad, device=self._model.device)
        self._mask_RP = (
            torch.arange(longest, device=self._model.device)[None] >= self._pad_R[:, None]
        ).long()
        return self._forward(torch.tensor(rows, device=self._model.device))

    def read(self, token_R: Tensor) -> Tensor:
        """Read one more token of each row and return logits `_RV` of the next."""
        self._mask_RP = torch.cat([self._mask_RP, self._mask_RP.new_ones(len(token_R), 1)], dim=1)
        return self._forward(token_R[:, None])

    def leave(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Drop rows; nothing is kept for later prompts, because the library's cache cannot continue single rows."""
        gone = set(rows)
        staying = [row for row in range(len(self._adapters)) if row not in gone]
        self._adapters = [self._adapters[row] for row in staying]
        kept_R = torch.tensor(staying, dtype=torch.long, device=self._pad_R.device)
        self._cache.reorder_cache(cast("torch.LongTensor", kept_R))
        self._mask_RP, self._pad_R = self._mask_RP[kept_R], self._pad_R[kept_R]

    def _forward(self, tokens_RP: Tensor) -> Tensor:
        length = self._mask_RP.shape[1]
        place_P = torch.arange(length - tokens_RP.shape[1], length, device=tokens_RP.device)
        with self._model.computing(route_of(self._adapters)):
            output = self._model.body(
                input_ids=tokens_RP,
                position_ids=(place_P[None] - self._pad_R[:, None]).clamp(min=0),
                attention_mask=self._mask_RP,
                use_cache=True,
                **{self._cache_name: self._cache},
            )
            return self._model.logits(output.last_hidden_state[:, -1])
