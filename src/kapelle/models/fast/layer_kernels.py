"""The operations between the matrix products of a layer as Triton kernels, each of which reads and writes every token once.

The operations and their plain implementations are defined in elementwise.py. Sums are computed in float32, and results
are deterministic.

The operation `fold` of an output head is defined in large_head.py.

In tensor shapes, N is the number of flat tokens, K of target tokens, C of vocabulary entries, H of query heads, J of key heads, and T of heads of either kind; D is
the hidden size, F the inner size and E the head size. P is the number of programs that sum a part of a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kapelle.models.fast.triton_products import on

TOKENS = 32
"""The number of tokens whose gradient of a norm's weight one program sums."""

HEADS = 8
"""The number of heads of a token that one program computes."""

ELEMENTS = 2048
"""The number of elements of a gate that one program computes."""


def norm(x_ND: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the normalised x and the inverse root mean square, of shape (N, 1)."""
    h_ND, inverse_N1 = torch.empty_like(x_ND, dtype=dtype), x_ND.new_empty(len(x_ND), 1)
    _norm(x_ND, None, None, inverse_N1, weight_D, h_ND, eps, known=False)
    return h_ND, inverse_N1


def add_norm(
    x_ND: Tensor, y_ND: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + y in the type of x, the normalised sum, and the inverse root mean square of the sum."""
    sum_ND, h_ND = torch.empty_like(x_ND), torch.empty_like(x_ND, dtype=dtype)
    inverse_N1 = x_ND.new_empty(len(x_ND), 1)
    _norm(x_ND, y_ND, sum_ND, inverse_N1, weight_D, h_ND, eps, known=False)
    return sum_ND, h_ND, inverse_N1


def norm_again(x_ND: Tensor, inverse_N1: Tensor, weight_D: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the normalised x, given its inverse root mean square."""
    h_ND = torch.empty_like(x_ND, dtype=dtype)
    _norm(x_ND, None, None, inverse_N1, weight_D, h_ND, 0.0, known=True)
    return h_ND


def _norm(
    x_ND: Tensor,
    y_ND: Tensor | None,
    sum_ND: Tensor | None,
    inverse_N1: Tensor,
    weight_D: Tensor,
    h_ND: Tensor,
    eps: float,
    *,
    known: bool,
) -> None:
    width = x_ND.shape[1]
    if len(x_ND):
        with on(x_ND.device):
            _norm_kernel[(len(x_ND),)](
                x_ND, x_ND if y_ND is None else y_ND, h_ND if sum_ND is None else sum_ND, inverse_N1, weight_D, h_ND,
                width, eps, y_ND is not None, known, *_block(width)[:1], num_warps=_block(width)[1],
            )  # fmt: skip


def norm_back(
    x_ND: Tensor,
    weight_D: Tensor,
    inverse_N1: Tensor,
    dh_ND: Tensor,
    more_ND: Tensor | None,
    dtype: torch.dtype,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of a norm's input plus `more_ND`, the same in another type, and the gradient of the weight."""
    rows, width = x_ND.shape
    block, warps = _block(width)
    dx_ND, narrow_ND = torch.empty_like(x_ND), x_ND.new_empty(0, dtype=dtype)
    if dtype != x_ND.dtype:
        narrow_ND = torch.empty_like(x_ND, dtype=dtype)
    each = TOKENS if learns else 1
    part_PD = x_ND.new_empty(triton.cdiv(rows, each) if learns else 0, width)
    if rows:
        with on(x_ND.device):
            _norm_back_kernel[(triton.cdiv(rows, each),)](
                x_ND, weight_D, inverse_N1, dh_ND, x_ND if more_ND is None else more_ND, dx_ND, narrow_ND, part_PD,
                rows, width, more_ND is not None, dtype != x_ND.dtype, learns, each, block, num_warps=warps,
            )  # fmt: skip
    return dx_ND, narrow_ND, part_PD.sum(0) if learns else part_PD


def turn(
    q_NHE: Tensor,
    k_NJE: Tensor,
    q_weight_E: Tensor | None,
    k_weight_E: Tensor | None,
    cos_N1E: Tensor,
    sin_N1E: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, normalised if there are weights, and rotated by their positions."""
    outs = torch.empty_like(q_NHE), torch.empty_like(k_NJE)
    _turn(_turn_kernel, (q_NHE, k_NJE), (q_weight_E, k_weight_E), cos_N1E, sin_N1E, eps, (*outs, cos_N1E), ())
    return outs


def turn_back(
    dq_NHE: Tensor,
    dk_NJE: Tensor,
    q_NHE: Tensor,
    k_NJE: Tensor,
    q_weight_E: Tensor | None,
    k_weight_E: Tensor | None,
    cos_N1E: Tensor,
    sin_N1E: Tensor,
    eps: float,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries and keys, and those of the weights of their norms, which are empty if they do not learn."""
    outs = torch.empty_like(q_NHE), torch.empty_like(k_NJE)
    queries, keys = (triton.cdiv(each.shape[1], HEADS) for each in outs)
    part_NPE = cos_N1E.new_empty(
        len(q_NHE) if learns else 0, queries + keys, q_NHE.shape[2], dtype=torch.float32
    )
    given = dq_NHE.contiguous(), dk_NJE.contiguous(), q_NHE, k_NJE
    _turn(
        _turn_back_kernel,
        given,
        (q_weight_E, k_weight_E),
        cos_N1E,
        sin_N1E,
        eps,
        (*outs, part_NPE),
        (learns,),
    )
    if not learns:
        return *outs, part_NPE, torch.empty_like(part_NPE)
    return *outs, part_NPE[:, :queries].sum((0, 1)), part_NPE[:, queries:].sum((0, 1))


def _turn(
    kernel: triton.JITFunction,
    given: tuple[Tensor, ...],
    weights: tuple[Tensor | None, Tensor | None],
    cos_N1E: Tensor,
    sin_N1E: Tensor,
    eps: float,
    outs: tuple[Tensor, Tensor, Tensor],
    flags: tuple[bool, ...],
) -> None:
    rows, heads, size = given[0].shape
    queries, keys = triton.cdiv(heads, HEADS), triton.cdiv(given[1].shape[1], HEADS)
    if rows:
        with on(cos_N1E.device):
            kernel[(rows, queries + keys)](
                *given, *(cos_N1E if weight is None else weight for weight in weights), cos_N1E, sin_N1E, *outs,
                heads, given[1].shape[1], size // 2, eps, queries,
                weights[0] is not None, *flags, HEADS, triton.next_power_of_2(size // 2),
            )  # fmt: skip


def gate(gate_NF: Tensor, up_NF: Tensor, gelu: bool) -> Tensor:
    """Return act(gate) · up."""
    out_NF = torch.empty_like(gate_NF)
    if out_NF.numel():
        with on(gate_NF.device):
            _gate_kernel[(triton.cdiv(out_NF.numel(), ELEMENTS),)](
                gate_NF, up_NF, out_NF, out_NF.numel(), gelu, ELEMENTS, num_warps=8,
            )  # fmt: skip
    return out_NF


def gate_back(dinner_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up projection."""
    dgate_NF, dup_NF = torch.empty_like(gate_NF), torch.empty_like(up_NF)
    if dup_NF.numel():
        with on(gate_NF.device):
            _gate_back_kernel[(triton.cdiv(dup_NF.numel(), ELEMENTS),)](
                dinner_NF, gate_NF, up_NF, dgate_NF, dup_NF, dup_NF.numel(), gelu, ELEMENTS, num_warps=8,
            )  # fmt: skip
    return dgate_NF, dup_NF


def fold(
    product_KC: Tensor,
    temperature_K: Tensor,
    token_K: Tensor,
    first: int,
    scale: float,
    sums: Sequence[Tensor],
    shrink_K: Tensor,
    entropy: bool,
) -> None:
    """Replace the products of a piece of the vocabulary by their exponentials, and add them to running sums."""
    if len(product_KC):
        with on(product_KC.device):
            _fold_kernel[(len(product_KC),)](
                product_KC, temperature_K, token_K, *sums, shrink_K,
                first, product_KC.shape[1], product_KC.stride(0), scale, entropy, ELEMENTS, num_warps=8,
            )  # fmt: skip


def _block(width: int) -> tuple[int, int]:
    """Return the number of features that a program loads for a row, and its number of warps."""
    block = triton.next_power_of_2(width)
    return block, 4 if block <= 2048 else 8 if block <= 8192 else 16


@triton.jit
def _norm_kernel(
    x_ND, y_ND, sum_ND, inverse_N1, weight_D, h_ND,
    width, eps, ADDS: tl.constexpr, KNOWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise one row, after the addition of a row of y if `ADDS` is True. The inverse is given if `KNOWN` is True."""
    row = tl.program_id(0).to(tl.int64)
    place_D = tl.arange(0, BLOCK)
    real_D = place_D < width
    x_D = tl.load(x_ND + row * width + place_D, mask=real_D, other=0.0).to(tl.float32)
    if ADDS:
        x_D += tl.load(y_ND + row * width + place_D, mask=real_D, other=0.0).to(tl.float32)
        tl.store(sum_ND + row * width + place_D, x_D.to(sum_ND.dtype.element_ty), mask=real_D)
    if KNOWN:
        inverse = tl.load(inverse_N1 + row).to(tl.float32)
    else:
        inverse = 1 / tl.sqrt(tl.sum(x_D * x_D, 0) / width + eps)
        tl.store(inverse_N1 + row, inverse.to(inverse_N1.dtype.element_ty))
    weight = tl.load(weight_D + place_D, mask=real_D, other=0.0).to(tl.float32)
    tl.store(h_ND + row * width + place_D, (x_D * inverse * weight).to(h_ND.dtype.element_ty), mask=real_D)


@triton.jit
def _norm_back_kernel(
    x_ND, weight_D, inverse_N1, dh_ND, more_ND, dx_ND, narrow_ND, part_PD,
    rows, width, ADDS: tl.constexpr, NARROWS: tl.constexpr, LEARNS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `EACH` rows of a norm's input, and the sum of their gradients of the weight."""
    place_D = tl.arange(0, BLOCK)
    real_D = place_D < width
    weight = tl.load(weight_D + place_D, mask=real_D, other=0.0).to(tl.float32)
    part_D = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * EACH
    for row in range(first, tl.minimum(first + EACH, rows)):
        x_D = tl.load(x_ND + row * width + place_D, mask=real_D, other=0.0).to(tl.float32)
        dh_D = tl.load(dh_ND + row * width + place_D, mask=real_D, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_N1 + row).to(tl.float32)
        if LEARNS:
            part_D += dh_D * x_D * inverse
        dh_D *= weight
        pull = tl.sum(dh_D * x_D, 0) * inverse * inverse * inverse / width
        dx_D = dh_D * inverse - x_D * pull
        if ADDS:
            dx_D += tl.load(more_ND + row * width + place_D, mask=real_D, other=0.0).to(tl.float32)
        tl.store(dx_ND + row * width + place_D, dx_D.to(dx_ND.dtype.element_ty), mask=real_D)
        if NARROWS:
            tl.store(narrow_ND + row * width + place_D, dx_D.to(narrow_ND.dtype.element_ty), mask=real_D)
    if LEARNS:
        tl.store(part_PD + tl.program_id(0) * width + place_D, part_D, mask=real_D)


@triton.jit
def _turn_kernel(
    q_NHE, k_NJE, q_weight_E, k_weight_E, cos_N1E, sin_N1E, q_out_NHE, k_out_NJE, _unused,
    heads, key_heads, half, eps, queries, NORMED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate some heads of one token."""
    if tl.program_id(1) < queries:
        _turn_heads(
            q_NHE,
            q_weight_E,
            cos_N1E,
            sin_N1E,
            q_out_NHE,
            tl.program_id(1),
            heads,
            half,
            eps,
            NORMED,
            HEADS,
            HALF,
        )
    else:
        _turn_heads(
            k_NJE, k_weight_E, cos_N1E, sin_N1E, k_out_NJE, tl.program_id(1) - queries, key_heads, half, eps,
            NORMED, HEADS, HALF,
        )  # fmt: skip


@triton.jit
def _turn_heads(
    x_NTE, weight_E, cos_N1E, sin_N1E, out_NTE,
    block, heads, half, eps, NORMED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    place_Te, real_Te, place_e, real_e, angle_e = _places(block, heads, half, HEADS, HALF)
    one_Te = tl.load(x_NTE + place_Te, mask=real_Te, other=0.0).to(tl.float32)
    other_Te = tl.load(x_NTE + place_Te + half, mask=real_Te, other=0.0).to(tl.float32)
    if NORMED:
        inverse_T1 = 1 / tl.sqrt(tl.sum(one_Te * one_Te + other_Te * other_Te, 1) / (2 * half) + eps)[:, None]
        one_Te *= inverse_T1 * tl.load(weight_E + place_e, mask=real_e, other=0.0).to(tl.float32)[None, :]
        other_Te *= (
            inverse_T1 * tl.load(weight_E + place_e + half, mask=real_e, other=0.0).to(tl.float32)[None, :]
        )
    cos_e, sin_e, cos_other_e, sin_other_e = _angles(cos_N1E, sin_N1E, angle_e, half, real_e)
    kind = out_NTE.dtype.element_ty
    tl.store(out_NTE + place_Te, (one_Te * cos_e - other_Te * sin_e).to(kind), mask=real_Te)
    tl.store(
        out_NTE + place_Te + half, (other_Te * cos_other_e + one_Te * sin_other_e).to(kind), mask=real_Te
    )


@triton.jit
def _turn_back_kernel(
    dq_NHE, dk_NJE, q_NHE, k_NJE, q_weight_E, k_weight_E, cos_N1E, sin_N1E, q_out_NHE, k_out_NJE, part_NPE,
    heads, key_heads, half, eps, queries,
    NORMED: tl.constexpr, LEARNS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of some heads of one token, and the sum of their gradients of the weight of the norm."""
    if tl.program_id(1) < queries:
        _turn_heads_back(
            dq_NHE, q_NHE, q_weight_E, cos_N1E, sin_N1E, q_out_NHE, part_NPE, tl.program_id(1), heads, half, eps,
            NORMED, LEARNS, HEADS, HALF,
        )  # fmt: skip
    else:
        _turn_heads_back(
            dk_NJE, k_NJE, k_weight_E, cos_N1E, sin_N1E, k_out_NJE, part_NPE, tl.program_id(1) - queries, key_heads,
            half, eps, NORMED, LEARNS, HEADS, HALF,
        )  # fmt: skip


@triton.jit
def _turn_heads_back(
    given_NTE, x_NTE, weight_E, cos_N1E, sin_N1E, out_NTE, part_NPE,
    block, heads, half, eps, NORMED: tl.constexpr, LEARNS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    place_Te, real_Te, place_e, real_e, angle_e = _places(block, heads, half, HEADS, HALF)
    first_Te = tl.load(given_NTE + place_Te, mask=real_Te, other=0.0).to(tl.float32)
    second_Te = tl.load(given_NTE + place_Te + half, mask=real_Te, other=0.0).to(tl.float32)
    cos_e, sin_e, cos_other_e, sin_other_e = _angles(cos_N1E, sin_N1E, angle_e, half, real_e)
    # As the plain operations do: a turn by the opposite angle.
    done_Te = first_Te * cos_e + second_Te * sin_e
    dother_Te = second_Te * cos_other_e - first_Te * sin_other_e
    if NORMED:
        one_Te = tl.load(x_NTE + place_Te, mask=real_Te, other=0.0).to(tl.float32)
        other_Te = tl.load(x_NTE + place_Te + half, mask=real_Te, other=0.0).to(tl.float32)
        inverse_T1 = 1 / tl.sqrt(tl.sum(one_Te * one_Te + other_Te * other_Te, 1) / (2 * half) + eps)[:, None]
        if LEARNS:
            program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
            part_E = part_NPE + program * 2 * half
            tl.store(part_E + place_e, tl.sum(done_Te * one_Te * inverse_T1, 0), mask=real_e)
            tl.store(part_E + place_e + half, tl.sum(dother_Te * other_Te * inverse_T1, 0), mask=real_e)
        done_Te *= tl.load(weight_E + place_e, mask=real_e, other=0.0).to(tl.float32)[None, :]
        dother_Te *= tl.load(weight_E + place_e + half, mask=real_e, other=0.0).to(tl.float32)[None, :]
        pull_T1 = tl.sum(done_Te * one_Te + dother_Te * other_Te, 1)[:, None] / (2 * half)
        pull_T1 *= inverse_T1 * inverse_T1 * inverse_T1
        done_Te = done_Te * inverse_T1 - one_Te * pull_T1
        dother_Te = dother_Te * inverse_T1 - other_Te * pull_T1
    kind = out_NTE.dtype.element_ty
    tl.store(out_NTE + place_Te, done_Te.to(kind), mask=real_Te)
    tl.store(out_NTE + place_Te + half, dother_Te.to(kind), mask=real_Te)


@triton.jit
def _places(block, heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Return where the first halves of some heads of a token lie, those of their weight and angles, and what is real."""
    token = tl.program_id(0).to(tl.int64)
    head_T = block * HEADS + tl.arange(0, HEADS)
    place_e = tl.arange(0, HALF)
    real_e = place_e < half
    place_Te = ((token * heads + head_T) * 2 * half)[:, None] + place_e[None, :]
    return place_Te, (head_T < heads)[:, None] & real_e[None, :], place_e, real_e, token * 2 * half + place_e


@triton.jit
def _angles(cos_N1E, sin_N1E, angle_e, half, real_e):
    cos_e = tl.load(cos_N1E + angle_e, mask=real_e, other=0.0).to(tl.float32)[None, :]
    sin_e = tl.load(sin_N1E + angle_e, mask=real_e, other=0.0).to(tl.float32)[None, :]
    cos_other_e = tl.load(cos_N1E + angle_e + half, mask=real_e, other=0.0).to(tl.float32)[None, :]
    sin_other_e = tl.load(sin_N1E + angle_e + half, mask=real_e, other=0.0).to(tl.float32)[None, :]
    return cos_e, sin_e, cos_other_e, sin_other_e


@triton.jit
def _gate_kernel(gate_NF, up_NF, out_NF, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    gate = tl.load(gate_NF + place, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_NF + place, mask=real, other=0.0).to(tl.float32)
    lit, _ = _activation(gate, GELU)
    tl.store(out_NF + place, (lit * up).to(out_NF.dtype.element_ty), mask=real)


@triton.jit
def _gate_back_kernel(
    dinner_NF, gate_NF, up_NF, dgate_NF, dup_NF,
    size, GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    dinner = tl.load(dinner_NF + place, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(gate_NF + place, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_NF + place, mask=real, other=0.0).to(tl.float32)
    lit, slope = _activation(gate, GELU)
    tl.store(dgate_NF + place, (dinner * up * slope).to(dgate_NF.dtype.element_ty), mask=real)
    tl.store(dup_NF + place, (dinner * lit).to(dup_NF.dtype.element_ty), mask=real)


@triton.jit
def _activation(x, GELU: tl.constexpr):
    """Return SiLU, or the tanh approximation of GELU, and its derivative."""
    if GELU:
        # x · sigmoid(2 y) is x · (1 + tanh y) / 2.
        inner = 1.5957691216057308 * x * (1 + 0.044715 * x * x)
        share = 1 / (1 + tl.exp(-inner))
        slope = 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
    else:
        share = 1 / (1 + tl.exp(-x))
        slope = 1.0
    return x * share, share + x * share * (1 - share) * slope


@triton.jit
def _fold_kernel(
    product_KC, temperature_K, token_K, peak_K, target_K, others_K, moment_K, shrink_K,
    first, width, row_size, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one target's running sums in two passes over the vocabulary entries of a piece."""
    row = tl.program_id(0).to(tl.int64)
    product_C = product_KC + row * row_size
    factor = scale / tl.load(temperature_K + row).to(tl.float32)
    here = tl.load(token_K + row) - first
    before = tl.load(peak_K + row)
    peak_C, own_C = tl.zeros((BLOCK,), dtype=tl.float32) + before, tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        place_C = start + tl.arange(0, BLOCK)
        x_C = tl.load(product_C + place_C, mask=place_C < width, other=float("-inf")).to(tl.float32) * factor
        peak_C = tl.maximum(peak_C, x_C)
        own_C += tl.where((place_C == here) & (place_C < width), x_C, 0.0)
    peak, own = tl.max(peak_C, 0), tl.sum(own_C, 0)
    fall = before - peak
    shrink = tl.exp(fall)
    others_C, moment_C = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        place_C = start + tl.arange(0, BLOCK)
        x_C = (
            tl.load(product_C + place_C, mask=place_C < width, other=float("-inf")).to(tl.float32) * factor
            - peak
        )
        share_C = tl.where(place_C == here, 0.0, tl.exp(x_C))
        others_C += share_C
        if ENTROPY:
            moment_C += share_C * tl.maximum(x_C, -1e4)
        tl.store(product_C + place_C, share_C.to(product_KC.dtype.element_ty), mask=place_C < width)
    others = tl.load(others_K + row)
    if ENTROPY:
        moment = (tl.load(moment_K + row) + fall * others) * shrink
        tl.store(moment_K + row, moment + tl.sum(moment_C, 0))
    tl.store(others_K + row, others * shrink + tl.sum(others_C, 0))
    tl.store(target_K + row, own, mask=(here >= 0) & (here < width))
    tl.store(peak_K + row, peak)
    tl.store(shrink_K + row, shrink)
