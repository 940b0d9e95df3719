"""Rows in flight through any `transformers` causal LM: prompts padded on the left, the library's own cache.

Shapes: R rows, P prompt positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kapelle.engines.decode import Job, route_of
from kapelle.models.language_model import LanguageModel


class PaddedRows:
    """See `decode.Rows`."""

    def __init__(self, model: LanguageModel, jobs: Sequence[Job]) -> None:
        from transformers import DynamicCache

        self._model = model
        self._adapters = [job.adapter for job in jobs]
        self._cache = DynamicCache()
        longest = max(len(job.prompt) for job in jobs)
        pad = [longest - len(job.prompt) for job in jobs]
        rows = [(0,) * p + job.prompt for p, job in zip(pad, jobs, strict=True)]
        self._prompt_RP = torch.tensor(rows, device=model.device)
        self._pad_R = torch.tensor(pad, device=model.device)
        self._mask_RP = (torch.arange(longest, device=model.device)[None] >= self._pad_R[:, None]).long()

    def read_prompts(self) -> Tensor:
        """Read every prompt and return logits `_RV` of its first new token."""
        return self._forward(self._prompt_RP)

    def read(self, token_R: Tensor) -> Tensor:
        """Read one more token of each row and return logits `_RV` of the next."""
        self._mask_RP = torch.cat([self._mask_RP, self._mask_RP.new_ones(len(token_R), 1)], dim=1)
        return self._forward(token_R[:, None])

    def leave(self, rows: Sequence[int], said: Sequence[Sequence[int]]) -> None:
        """Keep nothing for later prompts: the library's cache has no rows that go on."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices alone."""
        kept_R = torch.tensor(rows, device=self._pad_R.device)
        self._cache.batch_select_indices(kept_R)
        self._mask_RP, self._pad_R = self._mask_RP[kept_R], self._pad_R[kept_R]
        self._adapters = [self._adapters[row] for row in rows]

    def _forward(self, tokens_RP: Tensor) -> Tensor:
        length = self._mask_RP.shape[1]
        place_P = torch.arange(length - tokens_RP.shape[1], length, device=tokens_RP.device)
        with self._model.computing(route_of(self._adapters)):
            output = self._model.model.base_model(
                input_ids=tokens_RP,
                position_ids=(place_P[None] - self._pad_R[:, None]).clamp(min=0),
                attention_mask=self._mask_RP,
                past_key_values=self._cache,
                use_cache=True,
            )
            return self._model.logits(output.last_hidden_state[:, -1])
