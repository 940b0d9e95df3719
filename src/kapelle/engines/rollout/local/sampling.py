"""Sample one token per row from logits, reproducibly for each row.

The random number of a row depends only on the seed and the position of the row. The sampled tokens of a request are
therefore independent of the other rows of its batch.

In tensor shapes, R is the number of rows, V the size of the vocabulary, N the number of tokens of a prompt and its
completion, and T the number of tokens of the completion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kapelle.engines.rollout.protocol import Likeliest
from kapelle.functional.masking import allowed_limits
from kapelle.models.fast.attention import plan_sequences
from kapelle.models.language_model import LanguageModel
from kapelle.models.token_masks import Bits
from kapelle.types import Sampling

_WORD = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling settings of all rows as tensors, and flags that state which settings are in use.

    The flags are plain Python values, because reading a tensor waits for the GPU. The method `of` builds the settings
    without waiting for the GPU. If the settings are built from tensors directly, the tensors are read once.
    """

    temperature_R: Tensor
    top_p_R: Tensor
    top_k_R: Tensor
    seed_R: Tensor
    known: tuple[tuple[float, float, int], ...] | None = None
    """The temperature, top-p and top-k of the rows. A setting at its default has no effect, so listing additional
    combinations only costs time."""
    tempers: bool = field(init=False)
    """Whether any row has a temperature other than 1."""
    cuts_p: bool = field(init=False)
    cuts_k: bool = field(init=False)
    greedy: bool = field(init=False)
    """Whether any row selects its most likely token."""
    most_k: int = field(init=False)
    """The largest top-k of all rows."""
    all_k: bool = field(init=False)
    """Whether every row has a top-k."""
    all_p: bool = field(init=False)
    """Whether every row has a top-p below 1."""

    def __post_init__(self) -> None:
        known = self.known
        if known is None:
            columns = self.temperature_R.tolist(), self.top_p_R.tolist(), self.top_k_R.tolist()
            known = tuple(zip(*columns, strict=True))
            object.__setattr__(self, "known", known)
        object.__setattr__(self, "tempers", any(temperature != 1 for temperature, _, _ in known))
        object.__setattr__(self, "cuts_p", any(top_p < 1 for _, top_p, _ in known))
        object.__setattr__(self, "cuts_k", any(top_k > 0 for _, _, top_k in known))
        object.__setattr__(self, "greedy", any(temperature <= 0 for temperature, _, _ in known))
        object.__setattr__(self, "most_k", max((top_k for _, _, top_k in known), default=0))
        object.__setattr__(self, "all_k", all(top_k > 0 for _, _, top_k in known))
        object.__setattr__(self, "all_p", all(top_p < 1 for _, top_p, _ in known))

    @classmethod
    def of(cls, samplings: Sequence[Sampling], seeds: Sequence[int], device: torch.device) -> SamplingRows:
        """Return the settings of rows with these sampling settings and seeds, as tensors on a device."""
        columns = (
            torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float32),
            torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float32),
            torch.tensor([sampling.top_k for sampling in samplings], dtype=torch.int64),
        )
        # Compare the numbers as float32, the type of the tensors.
        known = tuple(zip(*(column.tolist() for column in columns), strict=True))
        temperature_R, top_p_R, top_k_R = (column.to(device) for column in columns)
        return cls(
            temperature_R, top_p_R, top_k_R, torch.tensor(seeds, dtype=torch.int64, device=device), known
        )


def uniform(seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Return one float64 random number in [0, 1) per row, computed with SplitMix64 (Steele et al. 2014) from seed and position."""
    z = torch.add(seed_R, position_R + 1, alpha=_WORD)
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift an int64 tensor right and fill with zeros, as for an unsigned integer."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


RANKED = 4096
"""The maximum number of tokens that are sorted to find the top-p set. From a larger set, some tokens are excluded
before sorting."""


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The allowed tokens of the rows that have a constraint."""

    row_C: Tensor
    """The indices of the rows that have a constraint, in ascending order."""
    bits_CW: Tensor
    """The allowed tokens of the rows that have a constraint, as bit masks (see `TokenMasks`)."""

    @classmethod
    def of(cls, rows: Sequence[int], bits_CW: Bits, device: torch.device) -> AllowedTokens:
        """Return the allowed tokens of these rows as tensors on a device."""
        return cls(torch.tensor(rows, device=device), torch.from_numpy(bits_CW).to(device))

    def cut(self, logits_RV: Tensor) -> Tensor:
        """Return logits in which the constrained rows keep only their allowed tokens. Other rows are unchanged."""
        most_CV = allowed_limits(self.bits_CW, 0, logits_RV.shape[1], logits_RV.dtype)
        if len(self.row_C) == len(logits_RV):  # all rows, in order
            return torch.minimum(logits_RV, most_CV)
        own_CV = logits_RV[self.row_C]
        return logits_RV.index_copy(0, self.row_C, torch.minimum(own_CV, most_CV, out=own_CV))


def processed_logits(logits_RV: Tensor, rows: SamplingRows, allowed: AllowedTokens | None = None) -> Tensor:
    """Return the logits of the sampling distributions, of shape (R, V), after masks, temperature, top-k and top-p.

    Masks, temperature, top-k and top-p are applied in this order. Tokens are ranked by log-prob, and tokens of equal
    log-prob by token id. Top-p keeps a token while the tokens ranked above it have a total probability below p. A
    greedy row (temperature 0) keeps the distribution of temperature 1. A setting that no row uses costs nothing, and a
    row that does not use a setting is not changed by it.
    """
    if allowed is not None:
        logits_RV = allowed.cut(logits_RV)
    if rows.tempers:
        temperature_R = torch.where(rows.temperature_R > 0, rows.temperature_R, 1.0)
        logits_RV = logits_RV / temperature_R[:, None]
    vocabulary = logits_RV.shape[1]
    if rows.cuts_k:
        logp_RV, top_k_R1 = torch.log_softmax(logits_RV, dim=-1), rows.top_k_R[:, None]
        most = min(rows.most_k, vocabulary)
        # One more candidate shows whether the cut separates tokens of equal log-prob.
        ranked_RC = logp_RV.topk(min(most + 1, vocabulary)).values
        cut_RV = _without(logp_RV, *_last_of(ranked_RC, top_k_R1.clamp(1, most)))
        logits_RV = cut_RV if rows.all_k else torch.where(top_k_R1 > 0, cut_RV, logits_RV)
    if rows.cuts_p:
        logp_RV, top_p_R1 = torch.log_softmax(logits_RV, dim=-1), rows.top_p_R[:, None]
        most = min(rows.most_k if rows.cuts_k and rows.all_k else vocabulary, vocabulary)
        if most <= RANKED:
            last = _last_of_nucleus(logp_RV.topk(most).values, top_p_R1)
        elif logp_RV.device.type == "cpu":
            each = [last_of_nucleus_by_pivots(*row) for row in zip(logp_RV, top_p_R1, strict=True)]
            least_R1, ties_R1, tied_R1 = (torch.cat(column) for column in zip(*each, strict=True))
            last = least_R1, ties_R1, tied_R1
        else:
            last = last_of_nucleus_by_bisection(logp_RV, top_p_R1)
        cut_RV = _without(logp_RV, *last)
        logits_RV = cut_RV if rows.all_p else torch.where(top_p_R1 < 1, cut_RV, logits_RV)
    return logits_RV


Last = tuple[Tensor, Tensor, Tensor]
"""The cutoff of a ranking, as three tensors of shape (R, 1): the log-prob of the last kept token, the number of kept
tokens that have exactly this log-prob, and whether more tokens than that may have this log-prob."""


def _last_of(ranked_RC: Tensor, count_R1: Tensor) -> Last:
    """Return the cutoff after the first `count_R1` tokens of a ranking, given the C largest log-probs in descending order."""
    least_R1 = ranked_RC.gather(1, count_R1 - 1)
    next_R1 = ranked_RC.gather(1, count_R1.clamp(max=ranked_RC.shape[1] - 1))
    above_R1 = (ranked_RC > least_R1).sum(-1, keepdim=True)
    return least_R1, count_R1 - above_R1, (next_R1 == least_R1) & (count_R1 < ranked_RC.shape[1])


def _last_of_nucleus(ranked_RC: Tensor, top_p_R1: Tensor, held: float = 0.0) -> Last:
    """Return the cutoff after the smallest set of most likely tokens that has probability p.

    The argument `held` is the probability of the tokens that are ranked above `ranked_RC`.
    """
    mass_RC = ranked_RC.float().exp()
    before_RC = mass_RC.cumsum(-1, dtype=torch.float64) - mass_RC + held
    return _last_of(ranked_RC, (before_RC < top_p_R1).sum(-1, keepdim=True).clamp_(min=1))


def last_of_nucleus_by_pivots(logp_V: Tensor, top_p_1: Tensor) -> Last:
    """Return the top-p cutoff of one row with a large vocabulary (R = 1) on a CPU, where reading tensor values is cheap.

    As in quickselect, a pivot divides the tokens into two parts. The probability of the upper part determines which
    part contains the last kept token. The division is repeated until few tokens remain.
    """
    left_C, held, top_p = logp_V, 0.0, float(top_p_1)
    while len(left_C) > RANKED:
        low, high = left_C.aminmax()
        if not low < high:  # equal values cannot be divided, and NaN compares false
            break
        pivot = (low + high) / 2
        above_C = left_C > (pivot if pivot < high else low)
        upper_C = left_C[above_C]
        more = float(upper_C.float().exp().sum(dtype=torch.float64))
        if held + more >= top_p:
            left_C = upper_C
        else:
            left_C, held = left_C[~above_C], held + more
    return _last_of_nucleus(left_C.sort(descending=True).values[None], top_p_1[None], held)


def last_of_nucleus_by_bisection(logp_RV: Tensor, top_p_R1: Tensor) -> Last:
    """Return the top-p cutoff without ranking the tokens, using a fixed number of sums and without waiting for a GPU.

    Positive float32 numbers have the same order as their bit patterns. A bisection of 31 steps therefore finds the
    smallest distance from log-prob 0 within which the tokens have probability p. This distance is the distance of an
    actual token, because the probability only changes at tokens.
    """
    far_RV = logp_RV.float().abs()
    mass_RV = (-far_RV).exp()

    def held(within_RV: Tensor) -> Tensor:
        return torch.where(within_RV, mass_RV, 0.0).sum(-1, keepdim=True, dtype=torch.float64)

    low_R1 = torch.zeros_like(top_p_R1, dtype=torch.int32)
    high_R1 = torch.full_like(top_p_R1, torch.inf, dtype=torch.float32).view(torch.int32)
    for _ in range(31):
        middle_R1 = low_R1 + ((high_R1 - low_R1) >> 1)
        enough_R1 = held(far_RV <= middle_R1.view(torch.float32)) >= top_p_R1
        low_R1 = torch.where(enough_R1, low_R1, middle_R1 + 1)
        high_R1 = torch.where(enough_R1, middle_R1, high_R1)
    least_R1 = high_R1.view(torch.float32)
    missing_R1 = top_p_R1 - held(far_RV < least_R1)
    ties_R1 = (missing_R1 / (-least_R1).exp().double()).ceil().clamp_(1, logp_RV.shape[1])
    return -least_R1.to(logp_RV.dtype), ties_R1, torch.ones_like(ties_R1, dtype=torch.bool)


def _without(logp_RV: Tensor, least_R1: Tensor, ties_R1: Tensor, tied_R1: Tensor) -> Tensor:
    """Remove the tokens after the cutoff and renormalise the log-probs. The tensor `logp_RV` is overwritten."""
    out_RV = logp_RV < least_R1
    # Ranking equal tokens needs a count along the whole vocabulary, which on a CPU is done only in the rows that need it.
    rows = tied_R1.flatten().nonzero().flatten() if logp_RV.device.type == "cpu" else slice(None)
    equal_RV = logp_RV[rows] == least_R1[rows]
    out_RV[rows] |= equal_RV & (equal_RV.cumsum(-1, dtype=torch.int32) > ties_R1[rows])
    return torch.log_softmax(logp_RV.masked_fill_(out_RV, -torch.inf), dim=-1)


FAINT = -80.0
"""The offset from the maximum logit of a row below which a logit has no probability mass (10^-35 of the maximum's
mass)."""


def _shares(below_RV: Tensor, cut: bool) -> Tensor:
    """Return the weight of every token relative to the most likely token, computed in place.

    Set `cut` to True if some logits may be −∞. The exponential on a CPU is three to four times slower for −∞ and on
    underflow. Such logits are therefore replaced by `FAINT`, and their weight is set to 0.
    """
    if not cut or below_RV.device.type != "cpu":
        return below_RV.exp_()
    return torch.threshold_(below_RV.clamp_(min=FAINT).exp_(), 1.1 * math.exp(FAINT), 0.0)


BLOCK = 512
"""The number of tokens in a block of a large vocabulary. A vocabulary of at most eight blocks is not divided into
blocks."""


def _drawn(mass_RV: Tensor, uniform_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token at a fraction in [0, 1) of each row's total mass, and the total mass of each row in float64.

    Both results have shape (R, 1). In a large vocabulary, the fraction first selects a block and then a token in this
    block, so that only block sums and the tokens of one block are summed in float64.
    """
    size = mass_RV.shape[1]
    if size <= 8 * BLOCK:
        upto_RV = mass_RV.cumsum(-1, dtype=torch.float64)
        whole_R1 = upto_RV[:, -1:]
        token_R1 = torch.searchsorted(upto_RV, uniform_R1 * whole_R1, right=True)
        return token_R1.clamp_(max=size - 1), whole_R1
    full = size // BLOCK * BLOCK
    sums_RB = torch.cat(
        [mass_RV[:, :full].unflatten(1, (-1, BLOCK)).sum(-1), mass_RV[:, full:].sum(-1, keepdim=True)], 1
    ).double()
    upto_RB = sums_RB.cumsum(-1)
    whole_R1 = upto_RB[:, -1:]
    point_R1 = uniform_R1 * whole_R1
    block_R1 = torch.searchsorted(upto_RB, point_R1, right=True).clamp_(max=sums_RB.shape[1] - 1)
    sum_R1 = sums_RB.gather(1, block_R1)
    share_R1 = 1 - (upto_RB.gather(1, block_R1) - point_R1) / sum_R1
    place_RC = block_R1 * BLOCK + torch.arange(BLOCK, device=mass_RV.device)
    own_RC = mass_RV.gather(1, place_RC.clamp(max=size - 1)).masked_fill(place_RC >= size, 0.0)
    upto_RC = own_RC.cumsum(-1, dtype=torch.float64)
    inside_R1 = share_R1.clamp(0.0, 1 - 2.0**-53) * upto_RC[:, -1:]
    token_R1 = block_R1 * BLOCK + torch.searchsorted(upto_RC, inside_R1, right=True)
    return token_R1.clamp_(max=size - 1), whole_R1


def sample(
    logits_RV: Tensor, rows: SamplingRows, position_R: Tensor, allowed: AllowedTokens | None = None
) -> tuple[Tensor, Tensor]:
    """Return one sampled token per row and the log-prob of this token under the sampling distribution, both of shape (R,)."""
    logits_RV = processed_logits(logits_RV, rows, allowed)
    top_R1 = logits_RV.amax(-1, keepdim=True)
    cut = allowed is not None or rows.cuts_k or rows.cuts_p
    token_R1, whole_R1 = _drawn(_shares(logits_RV - top_R1, cut), uniform(rows.seed_R, position_R)[:, None])
    if rows.greedy:
        token_R1 = torch.where(rows.temperature_R[:, None] <= 0, logits_RV.argmax(-1, keepdim=True), token_R1)
    logp_R1 = (logits_RV.gather(1, token_R1) - top_R1).double() - whole_R1.log()
    return token_R1.squeeze(1), logp_R1.squeeze(1).to(logits_RV.dtype)


def adjusted(
    logits_V: Tensor, sampling: Sampling, prompt: Sequence[int], ids: Sequence[int], ends: Sequence[int]
) -> Tensor:
    """Return the logits of one row after the tokens `ids` of its completion, with the adjustments that the caller requested.

    The adjustments are applied before the temperature, and `min_p` is converted accordingly. The argument `ends`
    contains the tokens that end a turn.
    """
    change = sampling.adjusted
    if change is None:
        return logits_V
    logits_V = logits_V.clone()
    if len(ids) < change.min_tokens and sampling.constraint is None:
        # An end token of the tokeniser may have no logit.
        logits_V[[end for end in ends if end < len(logits_V)]] = -torch.inf
    for token, bias in change.logit_bias:
        logits_V[token] += bias
    if change.repetition_penalty != 1:
        read_N = torch.tensor(sorted({*prompt, *ids}), device=logits_V.device)
        own_N = logits_V[read_N]
        factor = change.repetition_penalty
        logits_V[read_N] = torch.where(own_N > 0, own_N / factor, own_N * factor)
    if ids and (change.presence_penalty or change.frequency_penalty):
        read_N, count_N = torch.tensor(ids, device=logits_V.device).unique(return_counts=True)
        logits_V[read_N] -= change.presence_penalty + change.frequency_penalty * count_N
    if change.min_p > 0 and sampling.temperature > 0:
        least = logits_V.max() + sampling.temperature * math.log(change.min_p)
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    return logits_V


@torch.no_grad()
def likeliest(
    model: LanguageModel,
    adapter: str | None,
    prompt: Sequence[int],
    ids: Sequence[int],
    sampling: Sampling,
    count: int,
) -> list[Likeliest]:
    """Return the `count` most likely tokens at the position of each token id, under the sampling distribution at that position.

    Tokens with probability 0 are left out of the result. The function runs one forward pass over the whole text after
    sampling. The sampling itself stores only the log-prob of the sampled token, for speed.
    """
    tokens_N = torch.tensor([*prompt, *ids], device=model.device)
    positions_N = torch.arange(len(tokens_N), device=model.device)
    with model.computing([(adapter, 0, len(tokens_N))]):
        hidden_ND = model.hidden(tokens_N, positions_N, plan_sequences([len(tokens_N)], model.device))
        logits_TV = model.logits(hidden_ND[len(prompt) - 1 : -1])
    rows = SamplingRows.of([sampling] * len(ids), [0] * len(ids), model.device)
    allowed = None
    if sampling.constraint is not None:
        bits_TW = model.masks.of(sampling.constraint, tuple(ids))
        allowed = AllowedTokens.of(range(len(ids)), bits_TW, model.device)
        logits_TV = allowed.cut(logits_TV)
    if sampling.adjusted is not None:
        ends = sorted(model.end_ids)
        each = (adjusted(row_V, sampling, prompt, ids[:k], ends) for k, row_V in enumerate(logits_TV))
        logits_TV = torch.stack(list(each))
    best = torch.log_softmax(processed_logits(logits_TV, rows, allowed), dim=-1).topk(
        min(count, logits_TV.shape[1]), dim=-1
    )
    return [
        tuple((token, logp) for token, logp in zip(tokens, logps, strict=True) if logp > -torch.inf)
        for tokens, logps in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
