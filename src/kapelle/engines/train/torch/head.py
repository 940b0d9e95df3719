"""Log-probs of target tokens from hidden states, with bounded memory for large vocabularies.

Shapes: K target tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kapelle.engines.train.batch import Batch, Part
from kapelle.functional.divergences import TokenStatistics, entropy_from_logits, token_logprobs
from kapelle.models.language_model import LanguageModel

LOGIT_BUDGET = 1 << 24
"""Most logits in memory at once; beyond it the head is recomputed chunk by chunk in the backward pass."""


class Entropy(Enum):
    """Whether the entropy of each token's distribution is computed, and whether a loss learns from it."""

    LEFT_OUT = "left out"
    MEASURED = "measured"
    LEARNED = "learned"


def token_statistics(
    model: LanguageModel, hidden_KD: Tensor, batch: Batch, part: Part, entropy: Entropy
) -> TokenStatistics:
    """Return log-probs (and entropies, else zeros) of a part's target tokens, in chunks of the vocabulary's size."""

    def head(h_KD: Tensor, token_K: Tensor, temperature_K: Tensor) -> tuple[Tensor, Tensor]:
        logits_KV = model.logits(h_KD) / temperature_K[:, None]
        logp_K = token_logprobs(logits_KV, token_K)
        if entropy is Entropy.LEFT_OUT:
            return logp_K, torch.zeros_like(logp_K)
        if entropy is Entropy.LEARNED:
            return logp_K, entropy_from_logits(logits_KV)
        with torch.no_grad():
            return logp_K, torch.special.entr(logits_KV.softmax(-1)).sum(-1)

    here = part.place
    columns = (hidden_KD[here], batch.token_K[here], batch.temperature_K[here])
    rows = max(1, LOGIT_BUDGET // model.model.get_input_embeddings().weight.shape[0])
    if columns[0].shape[0] <= rows:
        return TokenStatistics(*head(*columns))
    chunks = [
        checkpoint(head, *chunk, use_reentrant=False)
        for chunk in zip(*(column.split(rows) for column in columns), strict=True)
    ]
    return TokenStatistics(torch.cat([logp for logp, _ in chunks]), torch.cat([e for _, e in chunks]))
