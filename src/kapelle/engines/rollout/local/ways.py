"""How a model decodes: by the flat pass, through its own cache, or without one. Tried out, not trusted.

`flat`    a pass that kapelle has written for the architecture (models/fast)
`cache`   the model's own forward pass and cache, prompts padded on the left
`reread`  every token reads its whole text again

Of the last two, a cache is taken if the logits that it leads to are those of the whole texts: prompts of different
lengths are read together, some tokens follow, a row leaves. State-space models, whose state has to pass over padding, and
caches that cannot drop a row show what they do with that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from kapelle.engines.rollout.local.padded_rows import CacheOf, PaddedRows, cache_by_layer, plain_cache
from kapelle.engines.rollout.local.reread_rows import RereadRows
from kapelle.engines.rollout.local.rows import Job, Rows
from kapelle.models.language_model import LanguageModel
from kapelle.types import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

Name = Literal["flat", "cache", "reread"]

PROMPTS = (9, 5, 7)
"""Tokens of the prompts with which caches are tried."""
STEPS = 4
"""Tokens that follow; the second row leaves in the middle."""


class Way(NamedTuple):
    """How a model decodes."""

    name: Name
    cache_of: CacheOf | None = None
    """What makes the cache of `cache`."""

    def rows(self, model: LanguageModel) -> Rows:
        """Return rows that read this way; for `flat`, see `decode.Decoder`."""
        assert self.name != "flat", "the decoder has what flat rows need"
        return RereadRows(model) if self.cache_of is None else PaddedRows(model, self.cache_of)


def way_of(model: LanguageModel) -> Way:
    """Return the fastest way in which a model decodes rightly; tries its cache, without adapters."""
    if model.flat is not None:
        return Way("flat")
    for cache_of in (plain_cache, cache_by_layer):
        if _right(model, lambda cache_of=cache_of: PaddedRows(model, cache_of)):  # type: ignore[misc]
            return Way("cache", cache_of)
    return Way("reread")


@torch.inference_mode()
def _right(model: LanguageModel, rows_of: Callable[[], Rows]) -> bool:
    """Return whether rows give the logits that their texts give, read anew."""
    try:
        found = _logits(model, rows_of())
    except Exception:  # noqa: BLE001 - caches of others may raise anything at what they were not made for
        return False
    expected = _logits(model, RereadRows(model))
    gaps = [(a - b).abs() for a, b in zip(found, expected, strict=True)]
    if model.dtype == torch.float32 and model.model.dtype == torch.float32:
        return all(
            float(gap.max()) <= 1e-4 * float(b.abs().max()) for gap, b in zip(gaps, expected, strict=True)
        )
    # Half precision may send a token to another expert, but not most of them.
    return all(
        float(gap.median()) <= 0.03 * float(b.abs().median()) for gap, b in zip(gaps, expected, strict=True)
    )


def _logits(model: LanguageModel, rows: Rows) -> list[Tensor]:
    """Return the logits `_RV` of every step of the trial."""
    words = int(model.model.get_input_embeddings().weight.shape[0])
    drawn = torch.randint(
        words, (sum(PROMPTS) + STEPS * len(PROMPTS),), generator=torch.Generator().manual_seed(0)
    )
    prompts: Sequence[Tensor] = drawn[: sum(PROMPTS)].split(PROMPTS)
    jobs = [Job(None, tuple(prompt.tolist()), Sampling(), 0) for prompt in prompts]
    found = [rows.join(jobs)]
    for step, token_R in enumerate(drawn[sum(PROMPTS) :].view(STEPS, -1).to(model.device)):
        if step == STEPS // 2:
            rows.leave([1], [()])
        found.append(rows.read(token_R if step < STEPS // 2 else token_R[[0, 2]]))
    return found
