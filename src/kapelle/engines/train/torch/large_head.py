"""Compute log-probs and entropies of target tokens from hidden states, with bounded memory for large vocabularies.

For a large vocabulary, logits are computed in pieces, and the gradient is computed in the same pass.

The loss is unknown while the output head runs, but the loss only scales the gradient of a token. The following
equations give the gradients with respect to the hidden state h, where l are the logits, p the probabilities, y the
target, H the entropy and w_v = ∂l_v/∂h:

    ∂ log p_y / ∂h = (1 − p_y) w_y − Σ_{v≠y} p_v w_v        ∂H / ∂h = −Σ_v p_v (l_v − Σ_u p_u l_u) w_v

A frozen head therefore computes both rows of size D together with the logits, and the backward pass scales these rows.
The computation is attention of h to the rows of W and, as in arXiv:2205.14135, the vocabulary is read in pieces with a
running maximum. The target is excluded from the sums: the gradient of a nearly certain token is a small number, which
must not be computed as the difference of two large numbers in half precision.

On CUDA, one kernel computes what lies between the two products of a piece (`fold`).

The gradient of a trained head is a sum over tokens, each scaled by the loss, so computing it requires the loss. For a
trained head, the backward pass therefore recomputes the logits of each piece, and the forward pass computes no
gradient.

In tensor shapes, K is the number of target tokens, D the hidden size, V the size of the vocabulary, and C the number of
vocabulary entries of one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from kapelle.engines.train.batch import AllowedTargets, Batch
from kapelle.functional.divergences import TokenStatistics, entropy_from_logits, token_logprobs
from kapelle.models.fast import kernels
from kapelle.models.language_model import LanguageModel, OutputHead
from kapelle.models.lora_bank import computes_in

LOGIT_BUDGET = 1 << 21
"""The maximum number of logits that are stored for the backward pass. If there are more logits, they are computed in
pieces."""

ROWS, PIECE = 512, 1 << 20
"""The maximum numbers of tokens and of logits in a piece on a CPU. These values fit the cache of a CPU."""

DEVICE_ROWS, DEVICE_PIECE = 2048, 1 << 25
"""The maximum numbers of tokens and of logits in a piece on a GPU. These values are large enough to use a GPU well."""

FORBIDDEN = -1e4
"""The value that replaces lower log-probs when a log-prob is multiplied by its probability. Such a probability is 0 in
every type, and 0 · (−∞) would be NaN."""


class Entropy(Enum):
    """Whether the entropy of each token's distribution is computed, and whether the entropy has a gradient."""

    LEFT_OUT = "left out"
    MEASURED = "measured"
    LEARNED = "learned"


def token_statistics(
    model: LanguageModel, hidden_KD: Tensor, batch: Batch, here: slice, entropy: Entropy
) -> TokenStatistics:
    """Return the log-probs of some target tokens under the tempered distributions, and the entropies.

    If entropies are left out, zeros are returned in their place.
    """
    columns = (hidden_KD[here], batch.token_K[here], batch.temperature_K[here])
    allowed = None if batch.allowed is None else batch.allowed.among(here)
    head = model.head
    if model.float_head:
        columns = (columns[0].float(), *columns[1:])
    if len(columns[0]) * len(head.weight_VD) <= LOGIT_BUDGET:
        hidden_KD, token_K, temperature_K = columns
        logits_KV = model.logits(hidden_KD) / temperature_K[:, None]
        if allowed is not None:
            logits_KV = allowed.cut(logits_KV)
        logp_K = token_logprobs(logits_KV, token_K)
        if entropy is Entropy.LEFT_OUT:
            return TokenStatistics(logp_K, torch.zeros_like(logp_K))
        if entropy is Entropy.LEARNED:
            return TokenStatistics(logp_K, entropy_from_logits(logits_KV))
        with torch.no_grad():
            return TokenStatistics(logp_K, torch.special.entr(logits_KV.softmax(-1)).sum(-1))
    with torch.autocast(hidden_KD.device.type, enabled=False) if model.float_head else nullcontext():
        return TokenStatistics(
            *statistics_in_pieces(
                head,
                *columns,
                allowed,
                entropy=entropy is not Entropy.LEFT_OUT,
                learned=entropy is Entropy.LEARNED,
            )
        )


class Wanted(NamedTuple):
    """The results of a pass that are requested in addition to log-probs."""

    entropy: bool
    gradient: bool
    """Whether gradients of log-probs with respect to hidden states are computed."""
    entropy_gradient: bool


def statistics_in_pieces(
    head: OutputHead,
    hidden_KD: Tensor,
    token_K: Tensor,
    temperature_K: Tensor,
    allowed: AllowedTargets | None = None,
    *,
    entropy: bool,
    learned: bool,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs and entropies of softmax(logits / temperature), in nats, both of shape (K,) and at least float32.

    With `allowed`, the distribution is the constrained distribution. Without `entropy`, the entropies are zeros.

    At most one piece of the logits is in memory at a time. Entropies have a gradient if `learned` is True.
    """
    answer: tuple[Tensor, Tensor] = _Pieces.apply(  # type: ignore[no-untyped-call]
        hidden_KD,
        head.weight_VD,
        head.bias_V,
        head,
        (token_K, temperature_K),
        allowed,
        (entropy, learned, torch.is_grad_enabled()),
    )
    return answer


@dataclass(slots=True)
class _Piece:
    """The logits of some tokens over some vocabulary entries."""

    rows: slice
    entries: slice
    weight_CD: Tensor
    """The weights of the vocabulary entries in the compute type."""
    logits_KC: Tensor
    """The logits divided by the temperature."""
    slope_KC: Tensor | None
    """The derivative of the soft cap, or None if the derivative is 1."""
    target_K1: Tensor
    """The position of each token's target among the vocabulary entries, if the target is one of these entries."""
    here_K1: Tensor
    """Whether the target of each token is among the vocabulary entries."""


@dataclass(slots=True)
class _Problem:
    """An output head with hidden states and targets in the compute type."""

    head: OutputHead
    hidden_KD: Tensor
    token_K: Tensor
    temperature_K: Tensor
    allowed: AllowedTargets | None

    @property
    def dtype(self) -> torch.dtype:
        """The type in which sums are computed, which is at least float32."""
        return torch.promote_types(self.hidden_KD.dtype, torch.float32)

    def products(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield the products of hidden states and weights, before the temperature, with their rows, entries and weights.

        The outer loop is over vocabulary entries, so that each weight is read and converted once.
        """
        tokens, vocabulary = len(self.token_K), len(self.head.weight_VD)
        cpu = self.hidden_KD.device.type == "cpu"
        rows = max(1, min(ROWS if cpu else DEVICE_ROWS, tokens))
        budget = PIECE if cpu else DEVICE_PIECE
        width = max(1, budget // rows)
        for first in range(0, vocabulary, width):
            chosen = slice(first, min(first + width, vocabulary))
            weight_CD = self.head.weight_VD[chosen].to(self.hidden_KD.dtype)
            bias_C = None if self.head.bias_V is None else self.head.bias_V[chosen].to(self.hidden_KD.dtype)
            for start in range(0, tokens, rows):
                some = slice(start, start + rows)
                yield some, chosen, weight_CD, linear(self.hidden_KD[some], weight_CD, bias_C)

    def pieces(self) -> Iterator[_Piece]:
        """Yield all pieces."""
        for some, chosen, weight_CD, product_KC in self.products():
            logits_KC = self.head.finish(product_KC)
            slope_KC = self.head.slope(logits_KC)
            logits_KC.div_(self.temperature_K[some, None])
            if self.allowed is not None:
                self.allowed.cut(logits_KC, chosen.start, some)
            place_K1 = self.token_K[some, None] - chosen.start
            here_K1 = (place_K1 >= 0) & (place_K1 < len(weight_CD))
            target_K1 = place_K1.clamp_(0, len(weight_CD) - 1)
            yield _Piece(some, chosen, weight_CD, logits_KC, slope_KC, target_K1, here_K1)


class _Sums:
    """Sums over all vocabulary entries so far, except for the target, relative to the largest logit so far."""

    def __init__(self, problem: _Problem, wanted: Wanted) -> None:
        count, size = problem.hidden_KD.shape
        new = problem.hidden_KD.new_zeros
        self._wanted, dtype = wanted, problem.dtype
        self.peak_K = new(count, dtype=dtype).fill_(torch.finfo(dtype).min / 4)  # finite: ∞ − ∞ is NaN
        self.target_K = new(count, dtype=dtype)
        self.others_K = new(count, dtype=dtype)
        """The sum Σ exp(l_v − peak)."""
        self.moment_K = new(count if wanted.entropy else 0, dtype=dtype)
        """The sum Σ exp(l_v − peak) (l_v − peak)."""
        self.pull_KD = new(count if wanted.gradient else 0, size, dtype=dtype)
        """The sum Σ exp(l_v − peak) w_v, in units of scale / temperature."""
        self.turn_KD = new(count if wanted.entropy_gradient else 0, size, dtype=dtype)
        """The sum Σ exp(l_v − peak) (l_v − peak) w_v, in units of scale / temperature."""
        self.own_slope_K = new(count, dtype=dtype).fill_(1.0)
        """The derivative of the soft cap at the target."""

    def add_all(self, problem: _Problem) -> None:
        """Add all pieces, each by one kernel between two products if the head has no soft cap."""
        if self._wanted.entropy_gradient or problem.head.softcap is not None or not _folds(problem.hidden_KD):
            for piece in problem.pieces():
                self.add(piece)
            return
        for rows, entries, weight_CD, product_KC in problem.products():
            if problem.allowed is not None:
                problem.allowed.cut(product_KC, entries.start, rows)
            sums = [each[rows] for each in (self.peak_K, self.target_K, self.others_K, self.moment_K)]
            shrink_K = torch.empty_like(sums[0])
            FOLD(
                product_KC, problem.temperature_K[rows], problem.token_K[rows], entries.start, problem.head.scale,
                sums, shrink_K, self._wanted.entropy,
            )  # fmt: skip
            if self._wanted.gradient:
                pull_KD = self.pull_KD[rows].mul_(shrink_K[:, None])
                _add_product(pull_KD, product_KC, weight_CD)

    def add(self, piece: _Piece) -> None:
        """Add a piece to the sums. The logits of the piece are overwritten."""
        rows, wanted = piece.rows, self._wanted
        # A new maximum rescales every sum so far.
        before_K = self.peak_K[rows].clone()
        self.peak_K[rows] = torch.maximum(before_K, piece.logits_KC.amax(dim=-1))
        fall_K = before_K - self.peak_K[rows]
        shrink_K = fall_K.exp()
        if wanted.entropy:
            self.moment_K[rows] = (self.moment_K[rows] + fall_K * self.others_K[rows]) * shrink_K
        if wanted.entropy_gradient:
            self.turn_KD[rows].addcmul_(self.pull_KD[rows], fall_K[:, None]).mul_(shrink_K[:, None])
        self.others_K[rows] *= shrink_K
        if wanted.gradient:
            self.pull_KD[rows] *= shrink_K[:, None]
        self._pick(self.target_K, piece, piece.logits_KC)
        if piece.slope_KC is not None:
            self._pick(self.own_slope_K, piece, piece.slope_KC)
        below_KC = piece.logits_KC.sub_(self.peak_K[rows, None])
        share_KC = below_KC.exp() if wanted.entropy else below_KC.exp_()
        own_K1 = share_KC.gather(1, piece.target_K1).masked_fill_(piece.here_K1, 0.0)
        share_KC.scatter_(1, piece.target_K1, own_K1)
        self.others_K[rows] += share_KC.sum(dim=-1)
        if wanted.gradient:
            _add_towards(self.pull_KD[rows], share_KC, piece)
        if wanted.entropy:
            below_KC.clamp_(min=FORBIDDEN).mul_(share_KC)
            self.moment_K[rows] += below_KC.sum(dim=-1)
        if wanted.entropy_gradient:
            _add_towards(self.turn_KD[rows], below_KC, piece)

    @staticmethod
    def _pick(column_K: Tensor, piece: _Piece, values_KC: Tensor) -> None:
        """Store the values of those targets that are in this piece."""
        found_K = values_KC.gather(1, piece.target_K1)[:, 0]
        column_K[piece.rows] = torch.where(piece.here_K1[:, 0], found_K, column_K[piece.rows])


def _add_towards(sum_KD: Tensor, share_KC: Tensor, piece: _Piece) -> None:
    """Add Σ share_v w_v over the vocabulary entries of the piece to `sum_KD`."""
    if piece.slope_KC is not None:
        share_KC = share_KC * piece.slope_KC
    _add_product(sum_KD, share_KC.to(piece.weight_CD.dtype), piece.weight_CD)


def _add_product(sum_AB: Tensor, left_AC: Tensor, right_CB: Tensor, *, overwrite: bool = False) -> None:
    """Add a matrix product to a sum, or overwrite the sum. Half-precision products are rounded before the addition."""
    if sum_AB.dtype == left_AC.dtype:
        sum_AB.addmm_(left_AC, right_CB, beta=0 if overwrite else 1)
    elif overwrite:
        sum_AB.copy_(left_AC @ right_CB)
    else:
        sum_AB += left_AC @ right_CB


def _plain_fold(
    product_KC: Tensor,
    temperature_K: Tensor,
    token_K: Tensor,
    first: int,
    scale: float,
    sums: Sequence[Tensor],
    shrink_K: Tensor,
    entropy: bool,
) -> None:
    """Replace the products of a piece by exp(logit − peak), which is 0 for the target, and add the piece to the sums.

    The sums are those of `_Sums`: peak, target, others and moment. The factor by which the peak has scaled earlier sums
    is written to `shrink_K`.
    """
    peak_K, target_K, others_K, moment_K = sums
    logits_KC = product_KC.float().mul_(scale).div_(temperature_K[:, None])
    place_K = token_K - first
    row_k = ((place_K >= 0) & (place_K < logits_KC.shape[1])).nonzero()[:, 0]
    target_K[row_k] = logits_KC[row_k, place_K[row_k]]
    before_K = peak_K.clone()
    torch.maximum(before_K, logits_KC.amax(dim=-1), out=peak_K)
    fall_K = before_K - peak_K
    torch.exp(fall_K, out=shrink_K)
    below_KC = logits_KC.sub_(peak_K[:, None])
    share_KC = below_KC.exp()
    share_KC[row_k, place_K[row_k]] = 0.0
    if entropy:
        moment_K.addcmul_(fall_K, others_K).mul_(shrink_K)
        moment_K.add_(below_KC.clamp_(min=FORBIDDEN).mul_(share_KC).sum(dim=-1))
    others_K.mul_(shrink_K).add_(share_KC.sum(dim=-1))
    product_KC.copy_(share_KC)


FOLD = kernels.operation(
    "fold(Tensor(a!) product, Tensor temperature, Tensor token, int first, float scale, Tensor(b!)[] sums, "
    "Tensor(c!) shrink, bool entropy) -> ()",
    _plain_fold,
    "kapelle.models.fast.layer_kernels",
)


def _folds(hidden_KD: Tensor) -> bool:
    """Return whether one kernel computes what lies between the two products of a piece here, and passes its test."""
    device, dtype = hidden_KD.device, hidden_KD.dtype
    return kernels.runs_operations(device, dtype) and kernels.holds(
        "Triton's softmax of an output head", (device, dtype), lambda: trial(device, dtype)
    )


def trial(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the sums over two pieces of a vocabulary, as a kernel and plain, one of them with forbidden entries."""
    token_K = torch.arange(37, device=device) * 150
    temperature_K = torch.linspace(0.5, 1.5, 37, device=device)
    found: list[list[Tensor]] = []
    for operation in (FOLD, _plain_fold):
        sums = [*torch.zeros(4, 37, device=device)]
        sums[0].fill_(-1e30)
        found.append([*sums])
        for number, entropy in enumerate((False, True)):
            product_KC = kernels.drawn(37, 2500, seed=number, device=device, dtype=dtype)
            if entropy:
                product_KC[:, ::3] = -torch.inf
            shrink_K = torch.zeros(37, device=device)
            operation(product_KC, temperature_K, token_K, 2500 * number, 0.5, sums, shrink_K, entropy)
            found[-1] += (product_KC, shrink_K)
    for one, other in zip(*found, strict=True):
        finite = other.isfinite()  # the logits of forbidden targets are not
        yield one.where(finite, 0), other.where(finite, 0)


class _Results(NamedTuple):
    logp_K: Tensor
    entropy_K: Tensor
    logp_slope_KD: Tensor | None
    """The gradient of the log-prob with respect to the hidden state."""
    entropy_slope_KD: Tensor | None
    """The gradient of the entropy with respect to the hidden state."""


def _results(problem: _Problem, sums: _Sums, wanted: Wanted) -> _Results:
    """Return the statistics and their gradients from the sums over the vocabulary."""
    below_K = sums.target_K - sums.peak_K
    own_K = below_K.exp()
    total_K = sums.others_K + own_K
    log_total_K = torch.where(below_K == 0, sums.others_K.log1p(), total_K.log())
    logp_K = below_K - log_total_K
    if not wanted.entropy:
        entropy_K, own_moment_K = torch.zeros_like(logp_K), own_K
    else:
        own_moment_K = below_K.clamp(min=FORBIDDEN) * own_K
        entropy_K = log_total_K - (sums.moment_K + own_moment_K) / total_K
    if not wanted.gradient:
        return _Results(logp_K, entropy_K, None, None)
    head = problem.head
    own_KD = head.weight_VD.index_select(0, problem.token_K).to(problem.hidden_KD.dtype).to(own_K.dtype)
    own_KD *= sums.own_slope_K[:, None]
    unit_K1 = (head.scale / (problem.temperature_K * total_K))[:, None]
    entropy_slope_KD = None
    if wanted.entropy_gradient:
        mean_K1 = ((sums.moment_K + own_moment_K) / total_K)[:, None]
        pulled_KD = torch.addcmul(sums.pull_KD, own_KD, own_K[:, None]).mul_(mean_K1)
        turned_KD = sums.turn_KD.addcmul_(own_KD, own_moment_K[:, None])
        entropy_slope_KD = pulled_KD.sub_(turned_KD).mul_(unit_K1)
    logp_slope_KD = own_KD.mul_(sums.others_K[:, None]).sub_(sums.pull_KD).mul_(unit_K1)
    return _Results(logp_K, entropy_K, logp_slope_KD, entropy_slope_KD)


class _Pieces(torch.autograd.Function):
    """The autograd function that computes log-probs and entropies in pieces (see the module docstring)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: OutputHead,
        targets: tuple[Tensor, Tensor],
        allowed: AllowedTargets | None,
        flags: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor]:
        entropy, learned, grad = flags
        ctx.head_learns = grad and any(ctx.needs_input_grad[1:3])
        made = grad and ctx.needs_input_grad[0] and not ctx.head_learns
        wanted = Wanted(entropy, made, made and entropy and learned)
        ctx.compute, ctx.learned, ctx.hidden_dtype = (
            computes_in(hidden_KD),
            entropy and learned,
            hidden_KD.dtype,
        )
        ctx.scale, ctx.softcap, ctx.allowed = head.scale, head.softcap, allowed
        with torch.autocast(hidden_KD.device.type, enabled=False):
            problem = _Problem(head, hidden_KD.to(ctx.compute), *targets, allowed)
            sums = _Sums(problem, wanted)
            sums.add_all(problem)
            results = _results(problem, sums, wanted)
        if ctx.head_learns:
            ctx.save_for_backward(
                hidden_KD, weight_VD, bias_V, *targets, results.logp_K - sums.target_K, results.entropy_K
            )
        else:
            ctx.save_for_backward(results.logp_slope_KD, results.entropy_slope_KD)
        if not ctx.learned:
            ctx.mark_non_differentiable(results.entropy_K)
        return results.logp_K, results.entropy_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        logp_grad_K, entropy_grad_K = given
        if ctx.head_learns:
            with torch.autocast(logp_grad_K.device.type, enabled=False):
                return (*_gradients(ctx, logp_grad_K, entropy_grad_K), None, None, None, None)
        logp_slope_KD, entropy_slope_KD = ctx.saved_tensors
        grad_KD = logp_slope_KD * logp_grad_K[:, None]
        if entropy_slope_KD is not None:
            grad_KD.addcmul_(entropy_slope_KD, entropy_grad_K[:, None])
        return grad_KD.to(ctx.hidden_dtype), None, None, None, None, None, None


def _gradients(ctx: Any, logp_grad_K: Tensor, entropy_grad_K: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden states, weight and bias, using recomputed logits."""
    hidden_KD, weight_VD, bias_V, token_K, temperature_K, minus_total_K, entropy_K = ctx.saved_tensors
    head = OutputHead(weight_VD, bias_V, ctx.scale, ctx.softcap)
    problem = _Problem(head, hidden_KD.to(ctx.compute), token_K, temperature_K, ctx.allowed)
    of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
    hidden_grad_KD = torch.zeros_like(hidden_KD, dtype=problem.dtype) if of_hidden else None
    weight_grad_VD = None
    if of_weight:  # the first tokens overwrite every entry
        weight_grad_VD = torch.empty_like(weight_VD) if len(token_K) else torch.zeros_like(weight_VD)
    bias_grad_V = torch.zeros_like(bias_V) if of_bias else None
    unit_K1 = (head.scale / temperature_K)[:, None]
    for piece in problem.pieces():
        rows = piece.rows
        grad_K1 = logp_grad_K[rows, None]
        log_share_KC = piece.logits_KC.add_(minus_total_K[rows, None])
        grad_KC = log_share_KC.exp()
        if ctx.learned:
            log_share_KC.clamp_(min=FORBIDDEN).add_(entropy_K[rows, None])
            grad_KC.mul_(log_share_KC.mul_(-entropy_grad_K[rows, None]).sub_(grad_K1))
        else:
            grad_KC.mul_(-grad_K1)
        grad_KC.scatter_add_(1, piece.target_K1, grad_K1.masked_fill(~piece.here_K1, 0.0))
        grad_KC.mul_(unit_K1[rows])
        if piece.slope_KC is not None:
            grad_KC.mul_(piece.slope_KC)
        half_KC = grad_KC.to(ctx.compute)
        if hidden_grad_KD is not None:
            _add_product(hidden_grad_KD[rows], half_KC, piece.weight_CD)
        if weight_grad_VD is not None:
            target_CD = weight_grad_VD[piece.entries]
            _add_product(target_CD, half_KC.T, problem.hidden_KD[rows], overwrite=rows.start == 0)
        if bias_grad_V is not None:
            bias_grad_V[piece.entries] += grad_KC.sum(dim=0)
    if hidden_grad_KD is not None:
        hidden_grad_KD = hidden_grad_KD.to(hidden_KD.dtype)
    return hidden_grad_KD, weight_grad_VD, bias_grad_V
