"""Computes log-probs and losses of examples of several adapters in common forward and backward passes.

The losses are those of Tinker's documentation (read in 2026-11): sums over tokens, without any normalisation. Gradients add
up in the parameters of each adapter until its next optimiser step.

In tensor shapes, N is the number of tokens of one example, F of flat tokens of a pass, K of target tokens at each
position, V the size of the vocabulary, D the hidden size and T the number of most likely tokens that are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kapelle.functional.policy_losses import cispo, clipped_surrogate, token_log_ratio
from kapelle.models.fast.attention import plan_sequences
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import route_of

LOGITS = 1 << 22
"""The maximum number of logits that are in memory at a time. The backward pass computes the logits again."""


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of tokens with the targets at each position, and the columns that the loss reads."""

    adapter: str | None
    """The adapter that reads the tokens, or None for the bare base model."""
    tokens: tuple[int, ...]
    targets_NK: Tensor
    loss: str | None = None
    """The name of the loss, or None if there is only a forward pass."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """The other inputs of the loss by name, each of shape (N, K)."""
    config: Mapping[str, float] = field(default_factory=dict)
    """The settings of the loss."""
    backward: bool = False
    """Whether the gradient of the loss is added to that of the adapter."""
    top: int = 0
    """The number of most likely tokens (T) to return at each position."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The results of one example: log-probs in nats, of shape (N, K), the sum of the loss, and the most likely tokens."""

    logp_NK: Tensor
    loss: float
    top_NT: Tensor | None = None
    top_logp_NT: Tensor | None = None


Columns = Mapping[str, Tensor]
Settings = Mapping[str, float]


def cross_entropy(logp: Tensor, columns: Columns, _config: Settings) -> Tensor:
    """Return −w · log π."""
    return -columns.get("weights", torch.ones_like(logp)) * logp


def importance_sampling(logp: Tensor, columns: Columns, _config: Settings) -> Tensor:
    """Return −(π / q) · A, where q is the sampler's probability of the token."""
    return -token_log_ratio(logp, columns["logprobs"]).exp() * columns["advantages"]


def ppo(logp: Tensor, columns: Columns, config: Settings) -> Tensor:
    """Return PPO's clipped surrogate, with the ratio clipped to [clip_low_threshold, clip_high_threshold]."""
    low, high = _clip(config)
    ratio = token_log_ratio(logp, columns["logprobs"])
    return clipped_surrogate(ratio, columns["advantages"], clip_low=1 - low, clip_high=high - 1).loss


def clipped_weights(logp: Tensor, columns: Columns, config: Settings) -> Tensor:
    """Return CISPO's loss, in which the clipped ratio weights the gradient of each token."""
    low, high = _clip(config)
    ratio = token_log_ratio(logp, columns["logprobs"])
    return cispo(logp, ratio, columns["advantages"], clip_low=1 - low, clip_high=high - 1).loss


def dro(logp: Tensor, columns: Columns, config: Settings) -> Tensor:
    """Return −(log π · A − ½ β (log π − log q)²) (arXiv:2405.19107)."""
    distance = logp - columns["logprobs"]
    return 0.5 * config.get("beta", 0.05) * distance.square() - logp * columns["advantages"]


def _clip(config: Settings) -> tuple[float, float]:
    return config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)


_CLIP = ("clip_low_threshold", "clip_high_threshold")
LOSSES: Mapping[
    str, tuple[Callable[[Tensor, Columns, Settings], Tensor], tuple[str, ...], tuple[str, ...]]
] = {
    "cross_entropy": (cross_entropy, (), ()),
    "importance_sampling": (importance_sampling, ("logprobs", "advantages"), ()),
    "ppo": (ppo, ("logprobs", "advantages"), _CLIP),
    "cispo": (clipped_weights, ("logprobs", "advantages"), _CLIP),
    "dro": (dro, ("logprobs", "advantages"), ("beta",)),
}
"""Mapping from the name of a loss to its function of one token, the columns that it requires, and its settings. The column
`weights` multiplies the other losses, too, if it is given."""


def packs(examples: Sequence[Example], most: int) -> Iterator[list[int]]:
    """Yield the indices of the examples of each pass, which has at most `most` tokens unless one example is longer.

    The examples of all adapters are mixed, and ordered by adapter. Examples with a gradient form other passes than
    those without.
    """
    order = sorted(
        range(len(examples)), key=lambda k: (not examples[k].backward, examples[k].adapter or "", k)
    )
    chosen: list[int] = []
    for k in order:
        size = sum(len(examples[j].tokens) for j in (*chosen, k))
        if chosen and (size > most or examples[chosen[0]].backward != examples[k].backward):
            yield chosen
            chosen = []
        chosen.append(k)
    if chosen:
        yield chosen


def score(model: LanguageModel, examples: Sequence[Example]) -> list[Scored]:
    """Run one pass over examples ordered by adapter, add the gradients of their losses, and return the results.

    Either all examples have a gradient, or none has one.
    """
    device, backward = model.device, examples[0].backward
    lengths = [len(each.tokens) for each in examples]
    width = max(each.targets_NK.shape[1] for each in examples)
    tokens_F = torch.tensor([token for each in examples for token in each.tokens], device=device)
    positions_F = torch.cat([torch.arange(length, device=device) for length in lengths])
    route = route_of([each.adapter for each in examples for _ in each.tokens])
    padded = [torch.nn.functional.pad(e.targets_NK, (0, width - e.targets_NK.shape[1])) for e in examples]
    targets_FK = torch.cat(padded).to(device)
    top = max(each.top for each in examples)
    with torch.set_grad_enabled(backward), model.computing(route):
        hidden_FD = model.hidden(tokens_F, positions_F, plan_sequences(lengths, device), recompute=False)
        rows = max(1, LOGITS // model.vocabulary)
        pieces = [
            checkpoint(_statistics, model, *piece, top, use_reentrant=False)
            if backward and len(hidden_FD) > rows
            else _statistics(model, *piece, top)
            for piece in zip(hidden_FD.split(rows), targets_FK.split(rows), strict=True)
        ]
        logp_FK, top_FT, top_logp_FT = (torch.cat(column) for column in zip(*pieces, strict=True))
        found, losses = [], []
        for each, logp_NK in zip(examples, logp_FK.split(lengths), strict=True):
            own_NK = logp_NK[:, : each.targets_NK.shape[1]]
            losses.append(_loss(each, own_NK))
            found.append(own_NK.detach().float().cpu())
        if backward:
            torch.stack(losses).sum().backward()
    sums = torch.stack(losses).detach().tolist()
    tops = zip(top_FT.cpu().split(lengths), top_logp_FT.float().cpu().split(lengths), strict=True)
    return [
        Scored(logp_NK, loss, ids_NT[:, : each.top], logp_NT[:, : each.top])
        for each, logp_NK, loss, (ids_NT, logp_NT) in zip(examples, found, sums, tops, strict=True)
    ]


def _statistics(
    model: LanguageModel, hidden_FD: Tensor, targets_FK: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probs of the targets, and the ids and the log-probs of the `top` most likely tokens."""
    logp_FV = model.logits(hidden_FD).log_softmax(-1)
    top_logp_FT, top_FT = logp_FV.detach().topk(top, dim=-1)
    return logp_FV.gather(1, targets_FK), top_FT, top_logp_FT


def _loss(example: Example, logp_NK: Tensor) -> Tensor:
    if example.loss is None:
        return logp_NK.new_zeros(())
    columns = {name: column.to(logp_NK.device) for name, column in example.columns.items()}
    loss_NK = LOSSES[example.loss][0](logp_NK, columns, example.config)
    if example.loss != "cross_entropy" and "weights" in columns:
        loss_NK = loss_NK * columns["weights"]
    return loss_NK.sum()
