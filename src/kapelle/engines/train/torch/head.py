"""Log-probs of target tokens from hidden states, with bounded memory for large vocabularies.

Shapes: K target tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from kapelle.engines.train.batch import Batch, Part
from kapelle.engines.train.torch.large_head import statistics_in_pieces
from kapelle.functional.divergences import TokenStatistics, entropy_from_logits, token_logprobs
from kapelle.models.language_model import LanguageModel

LOGIT_BUDGET = 1 << 21
"""Most logits that are kept for the backward pass; beyond it they are computed in pieces and forgotten."""


class Entropy(Enum):
    """Whether the entropy of each token's distribution is computed, and whether a loss learns from it."""

    LEFT_OUT = "left out"
    MEASURED = "measured"
    LEARNED = "learned"


def token_statistics(
    model: LanguageModel, hidden_KD: Tensor, batch: Batch, part: Part, entropy: Entropy
) -> TokenStatistics:
    """Return log-probs (and entropies, else zeros) of a part's target tokens, of the tempered distributions."""
    here = part.place
    columns = (hidden_KD[here], batch.token_K[here], batch.temperature_K[here])
    head = model.head
    if len(columns[0]) * len(head.weight_VD) <= LOGIT_BUDGET:
        return _at_once(model, *columns, entropy)
    return TokenStatistics(
        *statistics_in_pieces(
            head,
            *columns,
            entropy=entropy is not Entropy.LEFT_OUT,
            learned=entropy is Entropy.LEARNED,
        )
    )


def _at_once(
    model: LanguageModel, hidden_KD: Tensor, token_K: Tensor, temperature_K: Tensor, entropy: Entropy
) -> TokenStatistics:
    logits_KV = model.logits(hidden_KD) / temperature_K[:, None]
    logp_K = token_logprobs(logits_KV, token_K)
    if entropy is Entropy.LEFT_OUT:
        return TokenStatistics(logp_K, torch.zeros_like(logp_K))
    if entropy is Entropy.LEARNED:
        return TokenStatistics(logp_K, entropy_from_logits(logits_KV))
    with torch.no_grad():
        return TokenStatistics(logp_K, torch.special.entr(logits_KV.softmax(-1)).sum(-1))
