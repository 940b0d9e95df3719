"""From logits to one token per row, reproducible row by row.

A row's random number depends on its own seed and position only, so that a request's tokens do not depend on the other
rows of its batch.

Shapes: R rows, V vocabulary; N tokens of a prompt and its completion, T of the completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from kapelle.engines.rollout.protocol import Likeliest
from kapelle.models.fast.attention import plan_sequences
from kapelle.models.language_model import LanguageModel
from kapelle.types import Sampling

_WORD = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling settings of each row, as tensors, and which kinds occur: checked once, because each check waits for a GPU."""

    temperature_R: Tensor
    top_p_R: Tensor
    top_k_R: Tensor
    seed_R: Tensor
    tempers: bool = field(init=False)
    """Whether any temperature is not 1."""
    cuts_p: bool = field(init=False)
    cuts_k: bool = field(init=False)
    greedy: bool = field(init=False)
    """Whether any row takes its most likely token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tempers", bool((self.temperature_R != 1).any()))
        object.__setattr__(self, "cuts_p", bool((self.top_p_R < 1).any()))
        object.__setattr__(self, "cuts_k", bool((self.top_k_R > 0).any()))
        object.__setattr__(self, "greedy", bool((self.temperature_R <= 0).any()))

    @classmethod
    def of(cls, samplings: Sequence[Sampling], seeds: Sequence[int], device: torch.device) -> Self:
        """Return the settings of rows."""
        return cls(
            torch.tensor([sampling.temperature for sampling in samplings], device=device),
            torch.tensor([sampling.top_p for sampling in samplings], device=device),
            torch.tensor([sampling.top_k for sampling in samplings], device=device),
            torch.tensor(seeds, device=device),
        )

    def keep(self, rows: Tensor) -> SamplingRows:
        """Return the settings of the rows at these indices."""
        return SamplingRows(
            self.temperature_R[rows], self.top_p_R[rows], self.top_k_R[rows], self.seed_R[rows]
        )

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> SamplingRows:
        """Return the settings of all rows of several parts, in order."""
        columns = zip(*((p.temperature_R, p.top_p_R, p.top_k_R, p.seed_R) for p in parts), strict=True)
        return SamplingRows(*(torch.cat(column) for column in columns))


def uniform(seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Return one float64 in [0, 1) per row: SplitMix64 (Steele et al. 2014) of seed and position."""
    z = torch.add(seed_R, position_R + 1, alpha=_WORD)
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right without copying the sign bit, as if int64 were unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def processed_logits(logits_RV: Tensor, rows: SamplingRows) -> Tensor:
    """Return the logits `_RV` of the distributions that are sampled from: tempered, then cut to top-k, then to top-p.

    A greedy row (temperature 0) keeps its untempered distribution. What no row asks for costs nothing.
    """
    if rows.tempers:
        temperature_R = torch.where(rows.temperature_R > 0, rows.temperature_R, 1.0)
        logits_RV = logits_RV / temperature_R[:, None]
    if rows.cuts_k:
        logp_RV, top_k_R1 = torch.log_softmax(logits_RV, dim=-1), rows.top_k_R[:, None]
        order_RV = logp_RV.argsort(dim=-1, descending=True, stable=True)
        place_1V = torch.arange(logp_RV.shape[1], device=logp_RV.device)[None]
        logits_RV = _without(logp_RV, order_RV, (top_k_R1 > 0) & (place_1V >= top_k_R1))
    if rows.cuts_p:
        logp_RV, top_p_R1 = torch.log_softmax(logits_RV, dim=-1), rows.top_p_R[:, None]
        ranked_RV, order_RV = logp_RV.sort(dim=-1, descending=True, stable=True)
        before_RV = ranked_RV.exp().cumsum(-1) - ranked_RV.exp()
        # A row without the limit keeps its tail, where rounding lets the sum reach 1 before the end.
        logits_RV = _without(logp_RV, order_RV, (top_p_R1 < 1) & (before_RV >= top_p_R1))
    return logits_RV


def _without(logp_RV: Tensor, order_RV: Tensor, ranked_out_RV: Tensor) -> Tensor:
    """Return log-probs without the places of the ranking marked in `ranked_out_RV`, normalised again."""
    out_RV = ranked_out_RV.scatter(1, order_RV, ranked_out_RV)
    return torch.log_softmax(logp_RV.masked_fill(out_RV, -torch.inf), dim=-1)


def sample(logits_RV: Tensor, rows: SamplingRows, position_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return one token `_R` per row and its log-prob `_R` under the distribution it was drawn from."""
    logits_RV = processed_logits(logits_RV, rows)
    top_R1 = logits_RV.amax(-1, keepdim=True)
    mass_RV = (logits_RV - top_R1).exp_().cumsum(-1, dtype=torch.float64)
    point_R1 = uniform(rows.seed_R, position_R)[:, None] * mass_RV[:, -1:]
    token_R1 = torch.searchsorted(mass_RV, point_R1, right=True).clamp_(max=logits_RV.shape[1] - 1)
    if rows.greedy:
        token_R1 = torch.where(rows.temperature_R[:, None] <= 0, logits_RV.argmax(-1, keepdim=True), token_R1)
    logp_R1 = (logits_RV.gather(1, token_R1) - top_R1).double() - mass_RV[:, -1:].log()
    return token_R1.squeeze(1), logp_R1.squeeze(1).to(logits_RV.dtype)


@torch.no_grad()
def likeliest(
    model: LanguageModel,
    adapter: str | None,
    prompt: Sequence[int],
    ids: Sequence[int],
    sampling: Sampling,
    count: int,
) -> list[Likeliest]:
    """Return the `count` likeliest tokens in the place of each id, under the distribution that it was sampled from.

    Tokens that this distribution leaves out are not among them. One pass over the whole text, after it was sampled:
    sampling itself keeps the log-prob of the sampled token alone and stays as fast as it is.
    """
    tokens_N = torch.tensor([*prompt, *ids], device=model.device)
    positions_N = torch.arange(len(tokens_N), device=model.device)
    with model.computing([(adapter, 0, len(tokens_N))]):
        hidden_ND = model.hidden(tokens_N, positions_N, plan_sequences([len(tokens_N)], model.device))
        logits_TV = model.logits(hidden_ND[len(prompt) - 1 : -1])
    rows = SamplingRows(
        torch.full((len(ids),), sampling.temperature, device=model.device),
        torch.full((len(ids),), sampling.top_p, device=model.device),
        torch.full((len(ids),), sampling.top_k, device=model.device),
        torch.zeros(len(ids), device=model.device),
    )
    best = torch.log_softmax(processed_logits(logits_TV, rows), dim=-1).topk(
        min(count, logits_TV.shape[1]), dim=-1
    )
    return [
        tuple((token, logp) for token, logp in zip(tokens, logps, strict=True) if logp > -torch.inf)
        for tokens, logps in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
