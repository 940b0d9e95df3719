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
from kapelle.models.widening import in_float32
from kapelle.types import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

Name = Literal["flat", "cache", "reread"]

PROMPTS = (9, 5, 7)
"""Tokens of the prompts with which caches are tried."""
STEPS = 4
"""Tokens that follow; the second row leaves in the middle."""


BOUND = 1e-4
"""Greatest difference in float32, as a share of the norm of a row's logits."""


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
    """Return whether rows give the logits that their texts give, read anew.

    Both are computed in float32, where a small mistake differs from rounding, and read in turn: what a model keeps of its rows beside their cache is overwritten, as training would.
    """
    try:
        with in_float32(model):
            gaps = _gaps((rows_of(), RereadRows(model)), model)
    except Exception:  # noqa: BLE001 - caches of others may raise anything at what they were not made for
        return False
    return all(float(gap_S.max()) <= BOUND for gap_S in gaps)


def _gaps(ways: tuple[Rows, Rows], model: LanguageModel) -> list[Tensor]:
    """Return |one − other| logits of each row's steps in the trial, `_S`, as a share of the norm of the other."""
    words = int(model.model.get_input_embeddings().weight.shape[0])
    count = sum(PROMPTS) + STEPS * len(PROMPTS)
    drawn = torch.randint(words, (count,), generator=torch.Generator().manual_seed(0))
    prompts: Sequence[Tensor] = drawn[: sum(PROMPTS)].split(PROMPTS)
    jobs = [Job(None, tuple(prompt.tolist()), Sampling(), 0) for prompt in prompts]
    staying = list(range(len(jobs)))
    gaps: dict[int, list[Tensor]] = {row: [] for row in staying}

    def compare(one_RV: Tensor, other_RV: Tensor) -> None:
        for row, gap in zip(staying, (one_RV - other_RV).norm(dim=1) / other_RV.norm(dim=1), strict=True):
            gaps[row].append(gap)

    compare(*(rows.join(jobs) for rows in ways))
    for step, token_R in enumerate(drawn[sum(PROMPTS) :].view(STEPS, -1).to(model.device)):
        if step == STEPS // 2:
            staying = [0, 2]
            for rows in ways:
                rows.leave([1], [()])
        compare(*(rows.read(token_R[staying]) for rows in ways))
    return [torch.stack(steps) for steps in gaps.values()]
