"""What a model might have said instead: the likeliest tokens in each place of a completion.

One pass over the whole text, after it was sampled: sampling itself keeps the log-prob of the sampled token alone and stays
as fast as it is.

Shapes: N tokens of prompt and completion, T of the completion, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kapelle.engines.rollout.local.sampling import SamplingRows, distribution
from kapelle.engines.rollout.protocol import Likeliest
from kapelle.models.fast.plan import plan_sequences
from kapelle.models.language_model import LanguageModel
from kapelle.types import Sampling


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

    Tokens that this distribution leaves out are not among them.
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
    best = distribution(logits_TV, rows).topk(min(count, logits_TV.shape[1]), dim=-1)
    return [
        tuple((token, logp) for token, logp in zip(tokens, logps, strict=True) if logp > -torch.inf)
        for tokens, logps in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
