"""The operations between the matrix products of a decoding step, in Triton.

A program computes one row of the batch, or a part of a row. Every row has its own adapter, so rows of different
adapters stand in any order, and a recorded step stays valid when rows join and leave. Sums are computed in float32 and
in a fixed order. The functions implement the operations of decode_ops.py, which describes them and their arguments.

Tests run the kernels on a CPU in Triton's interpreter (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from kapelle.models.fast.kv_cache import BLOCK
from kapelle.models.fast.paged_cache import ADAPTER, BLOCKS, COUNT, PREFIX, SHARED
from kapelle.models.fast.triton_products import on

# The interpreter multiplies with NumPy, which has no bfloat16.
INTERPRETED = triton.knobs.runtime.interpret

CHUNK = 512
"""The number of features that a program reads at once."""

RANKS = 16
"""The number of rows of a factor that a program reads at once."""

P = ParamSpec("P")


def _on_its_device(launch: Callable[P, None]) -> Callable[P, None]:
    """Start a kernel on the device of the first tensor."""

    @wraps(launch)
    def launched(*given: P.args, **named: P.kwargs) -> None:
        with on(cast("Tensor", given[0]).device):
            launch(*given, **named)

    return launched


_ADAPTER, _SHARED, _PREFIX = tl.constexpr(ADAPTER), tl.constexpr(SHARED), tl.constexpr(PREFIX)
_COUNT, _BLOCKS, _BLOCK = tl.constexpr(COUNT), tl.constexpr(BLOCKS), tl.constexpr(BLOCK)
_CHUNK, _RANKS = tl.constexpr(CHUNK), tl.constexpr(RANKS)


@_on_its_device
def join_norm(
    x_SD: Tensor, rows_SW: Tensor, y_SD: Tensor | None, bias_D: Tensor | None, low_Sr: Tensor | None,
    up_GrD: Tensor | None, post_D: Tensor | None, gain_D: Tensor, down_GqD: Tensor | None, eps: float, centred: bool,
    *, h_SD: Tensor, next_Sq: Tensor | None,
) -> None:  # fmt: skip
    """See `decode_ops.join_norm`."""
    slots, width = x_SD.shape
    scratch_SD = torch.empty_like(x_SD) if post_D is not None else x_SD
    _join_norm[(slots,)](
        x_SD, rows_SW, _given(y_SD, x_SD), _given(bias_D, x_SD), _given(low_Sr, x_SD), _given(up_GrD, x_SD),
        _given(post_D, x_SD), gain_D, _given(down_GqD, x_SD), h_SD, _given(next_Sq, x_SD), scratch_SD,
        rows_SW.stride(0), width, _size(up_GrD, 1), _size(down_GqD, 1), eps,
        y_SD is not None, bias_D is not None, up_GrD is not None, post_D is not None, down_GqD is not None, centred,
    )  # fmt: skip


@_on_its_device
def turn_heads(
    q_SO: Tensor, k_SO: Tensor, v_SO: Tensor, rows_SW: Tensor, where_1: Tensor, cos_SE: Tensor, sin_SE: Tensor,
    bias_q: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None, low_Sr: Tensor | None, up_q: Tensor | None,
    up_k: Tensor | None, up_v: Tensor | None, gain_q: Tensor | None, gain_k: Tensor | None, eps: float, centred: bool,
    layer: int, layers: int, *, out_SO: Tensor,
) -> None:  # fmt: skip
    """See `decode_ops.turn_heads`."""
    slots, size = cos_SE.shape
    heads, key_heads = q_SO.shape[1] // size, k_SO.shape[1] // size
    _turn_heads[(slots, heads + 2 * key_heads)](
        q_SO, k_SO, v_SO, rows_SW, where_1, cos_SE, sin_SE, _given(bias_q, q_SO), _given(bias_k, q_SO),
        _given(bias_v, q_SO), _given(low_Sr, q_SO), _given(up_q, q_SO), _given(up_k, q_SO), _given(up_v, q_SO),
        _given(gain_q, q_SO), _given(gain_k, q_SO), out_SO, rows_SW.stride(0), heads, key_heads, size,
        _size(up_q, 1), eps, layer, layers,
        bias_q is not None, bias_k is not None, bias_v is not None, up_q is not None, gain_q is not None, centred,
        triton.next_power_of_2(size // 2), num_warps=2,
    )  # fmt: skip


@_on_its_device
def attend(
    q_SO: Tensor, rows_SW: Tensor, where_1: Tensor, key_heads: int, window: int, cap: float, scale: float, layer: int,
    layers: int, *, part_SHPE: Tensor, log_SHP: Tensor,
) -> None:  # fmt: skip
    """See `decode_ops.attend`."""
    slots, heads, parts, size = part_SHPE.shape
    per_key = heads // key_heads
    _attend[(slots, key_heads, parts)](
        q_SO, rows_SW, where_1, part_SHPE, log_SHP, rows_SW.stride(0), heads, key_heads, per_key, size, window, cap,
        scale, layer, layers, parts, window > 0, cap > 0, max(16, triton.next_power_of_2(per_key)),
        max(16, triton.next_power_of_2(size)), _precision(q_SO), INTERPRETED,
    )  # fmt: skip


@_on_its_device
def gather(
    part_SHPE: Tensor, log_SHP: Tensor, rows_SW: Tensor, down_GrO: Tensor | None, *, out_SO: Tensor,
    low_Sr: Tensor | None,
) -> None:  # fmt: skip
    """See `decode_ops.gather`."""
    slots, heads, parts, size = part_SHPE.shape
    _gather[(slots,)](
        part_SHPE, log_SHP, rows_SW, _given(down_GrO, out_SO), out_SO, _given(low_Sr, out_SO), rows_SW.stride(0),
        heads * size, size, _size(down_GrO, 1), parts, down_GrO is not None,
    )  # fmt: skip


@_on_its_device
def join_gates(
    gate_SF: Tensor, up_SF: Tensor, rows_SW: Tensor, bias_gate: Tensor | None, bias_up: Tensor | None,
    low_Sr: Tensor | None, up_gate: Tensor | None, up_up: Tensor | None, gelu: bool, *, out_SF: Tensor,
) -> None:  # fmt: skip
    """See `decode_ops.join_gates`."""
    slots, width = gate_SF.shape
    _join_gates[(slots, triton.cdiv(width, CHUNK))](
        gate_SF, up_SF, rows_SW, _given(bias_gate, gate_SF), _given(bias_up, gate_SF), _given(low_Sr, gate_SF),
        _given(up_gate, gate_SF), _given(up_up, gate_SF), out_SF, rows_SW.stride(0), width, _size(up_gate, 1),
        bias_gate is not None, bias_up is not None, up_gate is not None, gelu,
    )  # fmt: skip


@_on_its_device
def lower(x_SI: Tensor, rows_SW: Tensor, down_GrI: Tensor, *, low_Sr: Tensor) -> None:
    """See `decode_ops.lower`."""
    slots, width = x_SI.shape
    rank = down_GrI.shape[1]
    _lower[(slots, triton.cdiv(rank, RANKS))](x_SI, rows_SW, down_GrI, low_Sr, rows_SW.stride(0), width, rank)


def _given(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return a tensor, or in place of None another tensor that the kernel does not read."""
    return other if tensor is None else tensor


def _size(tensor: Tensor | None, dimension: int) -> int:
    return 0 if tensor is None else tensor.shape[dimension]


def _precision(x: Tensor) -> str:
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if x.dtype == torch.float32 and tf32 else "ieee"


@triton.jit
def _raised(low_row, up_GrO, adapter, rank, width, column, real):
    """Return the update of one row at some columns: low · Bᵀ, or zeros for a row without an adapter."""
    sum_C = tl.zeros(column.shape, dtype=tl.float32)
    up = up_GrO + tl.maximum(adapter, 0).to(tl.int64) * rank * width
    for first in range(0, rank, _RANKS):
        r = first + tl.arange(0, _RANKS)
        there = (r < rank) & (adapter >= 0)
        low_R = tl.load(low_row + r, mask=there, other=0.0)
        up_RC = tl.load(
            up + r[:, None].to(tl.int64) * width + column[None, :],
            mask=there[:, None] & real[None, :],
            other=0.0,
        ).to(tl.float32)
        sum_C += tl.sum(low_R[:, None] * up_RC, axis=0)
    return sum_C


@triton.jit
def _lowered(row, down_GrI, adapter, first, rank, width):
    """Return some rows of A·x for one row of the batch, beginning at the rank `first`, or zeros without an adapter."""
    r = first + tl.arange(0, _RANKS)
    there = (r < rank) & (adapter >= 0)
    down = down_GrI + tl.maximum(adapter, 0).to(tl.int64) * rank * width
    sum_RC = tl.zeros((_RANKS, _CHUNK), dtype=tl.float32)
    for start in range(0, width, _CHUNK):
        column = start + tl.arange(0, _CHUNK)
        real = column < width
        x_C = tl.load(row + column, mask=real, other=0.0).to(tl.float32)
        down_RC = tl.load(
            down + r[:, None].to(tl.int64) * width + column[None, :],
            mask=there[:, None] & real[None, :],
            other=0.0,
        ).to(tl.float32)
        sum_RC += down_RC * x_C[None, :]
    return tl.sum(sum_RC, axis=1)


@triton.jit
def _gain(weight, column, real, CENTRED: tl.constexpr):
    gain_C = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    if CENTRED:
        gain_C += 1.0
    return gain_C


@triton.jit
def _join_norm(
    x_SD, rows_SW, y_SD, bias_D, low_Sr, up_GrD, post_D, gain_D, down_GqD, h_SD, next_Sq, scratch_SD,
    row_width, width, rank, next_rank, eps,
    SUMS: tl.constexpr, BIASED: tl.constexpr, ADAPTED: tl.constexpr, SANDWICHED: tl.constexpr, LOWERS: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    adapter = tl.load(rows_SW + s * row_width + _ADAPTER)
    x, h, scratch = x_SD + s * width, h_SD + s * width, scratch_SD + s * width
    square_C = tl.zeros((_CHUNK,), dtype=tl.float32)
    for first in range(0, width, _CHUNK):
        column = first + tl.arange(0, _CHUNK)
        real = column < width
        if SUMS:
            sum_C = tl.load(y_SD + s * width + column, mask=real, other=0.0).to(tl.float32)
            if BIASED:
                sum_C += tl.load(bias_D + column, mask=real, other=0.0).to(tl.float32)
            if ADAPTED:
                sum_C += _raised(low_Sr + s * rank, up_GrD, adapter, rank, width, column, real)
            if not SANDWICHED:
                sum_C += tl.load(x + column, mask=real, other=0.0)
            tl.store(scratch + column, sum_C, mask=real)
        else:
            sum_C = tl.load(x + column, mask=real, other=0.0)
        square_C += sum_C * sum_C
    # Threads read below what other threads of the program have written.
    tl.debug_barrier()
    inverse = tl.rsqrt(tl.sum(square_C, axis=0) / width + eps)
    if SANDWICHED:
        square_C = tl.zeros((_CHUNK,), dtype=tl.float32)
        for first in range(0, width, _CHUNK):
            column = first + tl.arange(0, _CHUNK)
            real = column < width
            sum_C = (
                tl.load(scratch + column, mask=real, other=0.0)
                * inverse
                * _gain(post_D, column, real, CENTRED)
            )
            sum_C += tl.load(x + column, mask=real, other=0.0)
            tl.store(x + column, sum_C, mask=real)
            square_C += sum_C * sum_C
        tl.debug_barrier()
        inverse = tl.rsqrt(tl.sum(square_C, axis=0) / width + eps)
    for first in range(0, width, _CHUNK):
        column = first + tl.arange(0, _CHUNK)
        real = column < width
        h_C = tl.load(x + column, mask=real, other=0.0) * inverse * _gain(gain_D, column, real, CENTRED)
        tl.store(h + column, h_C.to(h_SD.dtype.element_ty), mask=real)
    if LOWERS:
        tl.debug_barrier()
        for first in range(0, next_rank, _RANKS):
            r = first + tl.arange(0, _RANKS)
            low_R = _lowered(h, down_GqD, adapter, first, next_rank, width)
            tl.store(next_Sq + s * next_rank + r, low_R, mask=r < next_rank)


@triton.jit
def _head(
    row, bias, low_row, up, adapter, rank, width, column, real, BIASED: tl.constexpr, ADAPTED: tl.constexpr
):
    """Return half a head of a row: product, bias and update."""
    half_C = tl.load(row + column, mask=real, other=0.0).to(tl.float32)
    if BIASED:
        half_C += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
    if ADAPTED:
        half_C += _raised(low_row, up, adapter, rank, width, column, real)
    return half_C


@triton.jit
def _turned(
    one_C, two_C, gain, cos, sin, e, real, half, size, eps, NORMED: tl.constexpr, CENTRED: tl.constexpr
):
    """Return both halves of a head, normalised if heads are, and rotated."""
    if NORMED:
        square = tl.sum(one_C * one_C, axis=0) + tl.sum(two_C * two_C, axis=0)
        inverse = tl.rsqrt(square / size + eps)
        one_C = one_C * inverse * _gain(gain, e, real, CENTRED)
        two_C = two_C * inverse * _gain(gain, e + half, real, CENTRED)
    cos_one, sin_one = tl.load(cos + e, mask=real, other=0.0), tl.load(sin + e, mask=real, other=0.0)
    cos_two = tl.load(cos + half + e, mask=real, other=0.0)
    sin_two = tl.load(sin + half + e, mask=real, other=0.0)
    return one_C * cos_one - two_C * sin_one, two_C * cos_two + one_C * sin_two


@triton.jit(do_not_specialize=["layer"])
def _turn_heads(
    q_SO, k_SO, v_SO, rows_SW, where_1, cos_SE, sin_SE, bias_q, bias_k, bias_v, low_Sr, up_q, up_k, up_v, gain_q,
    gain_k, out_SO, row_width, heads, key_heads, size, rank, eps, layer, layers,
    BIASED_Q: tl.constexpr, BIASED_K: tl.constexpr, BIASED_V: tl.constexpr, ADAPTED: tl.constexpr,
    NORMED: tl.constexpr, CENTRED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    s, t = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = rows_SW + s * row_width
    adapter = tl.load(row + _ADAPTER)
    e, half = tl.arange(0, HALF), size // 2
    real = e < half
    low = low_Sr + s * 3 * rank
    cos, sin = cos_SE + s * size, sin_SE + s * size
    if t < heads:
        width = heads * size
        one, two = t * size + e, t * size + half + e
        row_q = q_SO + s * width
        one_C = _head(row_q, bias_q, low, up_q, adapter, rank, width, one, real, BIASED_Q, ADAPTED)
        two_C = _head(row_q, bias_q, low, up_q, adapter, rank, width, two, real, BIASED_Q, ADAPTED)
        one_C, two_C = _turned(one_C, two_C, gain_q, cos, sin, e, real, half, size, eps, NORMED, CENTRED)
        out = out_SO + s * width
        tl.store(out + one, one_C.to(out_SO.dtype.element_ty), mask=real)
        tl.store(out + two, two_C.to(out_SO.dtype.element_ty), mask=real)
    else:
        width = key_heads * size
        own = tl.load(row + _COUNT) - 1
        block = tl.load(row + _BLOCKS + tl.load(row + _SHARED) + own // _BLOCK).to(tl.int64)
        cache = tl.load(where_1).to(out_SO.dtype) + (block * layers + layer) * 2 * key_heads * _BLOCK * size
        if t < heads + key_heads:
            j = t - heads
            one, two = j * size + e, j * size + half + e
            row_k = k_SO + s * width
            one_C = _head(row_k, bias_k, low + rank, up_k, adapter, rank, width, one, real, BIASED_K, ADAPTED)
            two_C = _head(row_k, bias_k, low + rank, up_k, adapter, rank, width, two, real, BIASED_K, ADAPTED)
            one_C, two_C = _turned(one_C, two_C, gain_k, cos, sin, e, real, half, size, eps, NORMED, CENTRED)
            place = cache + (j * _BLOCK + own % _BLOCK) * size
            tl.store(place + e, one_C.to(out_SO.dtype.element_ty), mask=real)
            tl.store(place + half + e, two_C.to(out_SO.dtype.element_ty), mask=real)
        else:
            j = t - heads - key_heads
            one, two = j * size + e, j * size + half + e
            row_v = v_SO + s * width
            one_C = _head(
                row_v, bias_v, low + 2 * rank, up_v, adapter, rank, width, one, real, BIASED_V, ADAPTED
            )
            two_C = _head(
                row_v, bias_v, low + 2 * rank, up_v, adapter, rank, width, two, real, BIASED_V, ADAPTED
            )
            place = cache + ((key_heads + j) * _BLOCK + own % _BLOCK) * size
            tl.store(place + e, one_C.to(out_SO.dtype.element_ty), mask=real)
            tl.store(place + half + e, two_C.to(out_SO.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["layer"])
def _attend(
    q_SO, rows_SW, where_1, part_SHPE, log_SHP, row_width, heads, key_heads, per_key, size, window, cap, scale, layer,
    layers, parts,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a part of the attention of the queries that share one key head of one row."""
    s, j, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row = rows_SW + s * row_width
    shared, prefix, count = tl.load(row + _SHARED), tl.load(row + _PREFIX), tl.load(row + _COUNT)
    position, blocks = prefix + count - 1, shared + tl.cdiv(count, _BLOCK)
    start = 0
    if WINDOWED:
        # The first block that contains a token of the window.
        far = tl.maximum(position - window + 1, 0)
        start = tl.where(far < prefix, far // _BLOCK, shared + tl.maximum(far - prefix, 0) // _BLOCK)
    each = tl.cdiv(blocks - start, parts)
    first = start + part * each
    last = tl.minimum(first + each, blocks)
    u, e, b = tl.arange(0, QUERIES), tl.arange(0, SIZE), tl.arange(0, _BLOCK)
    head_U, real_U, real_E = j * per_key + u, u < per_key, e < size
    q_UE = tl.load(
        q_SO + s * heads * size + head_U[:, None] * size + e[None, :],
        mask=real_U[:, None] & real_E[None, :],
        other=0.0,
    )
    if INTERPRETED:
        q_UE = q_UE.to(tl.float32)
    cache = tl.load(where_1).to(q_SO.dtype)
    top_U = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    total_U = tl.zeros((QUERIES,), dtype=tl.float32)
    sum_UE = tl.zeros((QUERIES, SIZE), dtype=tl.float32)
    for m in range(first, last):
        block = tl.load(row + _BLOCKS + m).to(tl.int64)
        keys = cache + ((block * layers + layer) * 2 * key_heads + j) * _BLOCK * size
        values = keys + key_heads * _BLOCK * size
        own = m - shared
        visible = tl.where(own < 0, prefix - m * _BLOCK, count - own * _BLOCK)
        seen_B = b < visible
        if WINDOWED:
            at = tl.where(own < 0, m * _BLOCK, prefix + own * _BLOCK)
            seen_B = seen_B & (at + b > position - window)
        k_EB = tl.load(
            keys + b[None, :] * size + e[:, None], mask=seen_B[None, :] & real_E[:, None], other=0.0
        )
        v_BE = tl.load(
            values + b[:, None] * size + e[None, :], mask=seen_B[:, None] & real_E[None, :], other=0.0
        )
        if INTERPRETED:
            k_EB, v_BE = k_EB.to(tl.float32), v_BE.to(tl.float32)
        score_UB = tl.dot(q_UE, k_EB, input_precision=PRECISION) * scale
        if CAPPED:
            score_UB = cap * (2.0 * tl.sigmoid(2.0 * score_UB / cap) - 1.0)
        score_UB = tl.where(seen_B[None, :], score_UB, float("-inf"))
        higher_U = tl.maximum(top_U, tl.max(score_UB, axis=1))
        shift_U = tl.where(higher_U == float("-inf"), 0.0, higher_U)
        weight_UB = tl.exp(score_UB - shift_U[:, None])
        factor_U = tl.exp(top_U - shift_U)
        total_U = total_U * factor_U + tl.sum(weight_UB, axis=1)
        sum_UE = sum_UE * factor_U[:, None] + tl.dot(
            weight_UB.to(v_BE.dtype), v_BE, input_precision=PRECISION
        )
        top_U = higher_U
    place_U = (s * heads + head_U) * parts + part
    divisor_U = tl.where(total_U > 0.0, total_U, 1.0)
    tl.store(
        part_SHPE + place_U[:, None] * size + e[None, :],
        sum_UE / divisor_U[:, None],
        mask=real_U[:, None] & real_E[None, :],
    )
    tl.store(
        log_SHP + place_U, tl.where(total_U > 0.0, top_U + tl.log(divisor_U), float("-inf")), mask=real_U
    )


@triton.jit
def _gather(
    part_SHPE, log_SHP, rows_SW, down_GrO, out_SO, low_Sr, row_width, width, size, rank, parts, LOWERS: tl.constexpr
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    adapter = tl.load(rows_SW + s * row_width + _ADAPTER)
    heads, out = width // size, out_SO + s * width
    for first in range(0, width, _CHUNK):
        column = first + tl.arange(0, _CHUNK)
        real = column < width
        place_C = (s * heads + column // size) * parts
        top_C = tl.full((_CHUNK,), float("-inf"), dtype=tl.float32)
        for part in range(parts):
            top_C = tl.maximum(top_C, tl.load(log_SHP + place_C + part, mask=real, other=0.0))
        sum_C = tl.zeros((_CHUNK,), dtype=tl.float32)
        total_C = tl.zeros((_CHUNK,), dtype=tl.float32)
        for part in range(parts):
            weight_C = tl.exp(tl.load(log_SHP + place_C + part, mask=real, other=0.0) - top_C)
            total_C += weight_C
            value_C = tl.load(part_SHPE + (place_C + part) * size + column % size, mask=real, other=0.0)
            sum_C += weight_C * value_C
        tl.store(out + column, (sum_C / total_C).to(out_SO.dtype.element_ty), mask=real)
    if LOWERS:
        tl.debug_barrier()
        for first in range(0, rank, _RANKS):
            r = first + tl.arange(0, _RANKS)
            low_R = _lowered(out, down_GrO, adapter, first, rank, width)
            tl.store(low_Sr + s * rank + r, low_R, mask=r < rank)


@triton.jit
def _join_gates(
    gate_SF, up_SF, rows_SW, bias_gate, bias_up, low_Sr, up_gate, up_up, out_SF, row_width, width, rank,
    BIASED_GATE: tl.constexpr, BIASED_UP: tl.constexpr, ADAPTED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    adapter = tl.load(rows_SW + s * row_width + _ADAPTER)
    column = tl.program_id(1) * _CHUNK + tl.arange(0, _CHUNK)
    real = column < width
    low, own = low_Sr + s * 2 * rank, s * width
    gate_C = _head(
        gate_SF + own, bias_gate, low, up_gate, adapter, rank, width, column, real, BIASED_GATE, ADAPTED
    )
    up_C = _head(
        up_SF + own, bias_up, low + rank, up_up, adapter, rank, width, column, real, BIASED_UP, ADAPTED
    )
    if GELU:
        inner_C = 0.7978845608028654 * (gate_C + 0.044715 * gate_C * gate_C * gate_C)
        lit_C = gate_C * tl.sigmoid(2.0 * inner_C)
    else:
        lit_C = gate_C * tl.sigmoid(gate_C)
    tl.store(out_SF + own + column, (lit_C * up_C).to(out_SF.dtype.element_ty), mask=real)


@triton.jit
def _lower(x_SI, rows_SW, down_GrI, low_Sr, row_width, width, rank):
    s = tl.program_id(0).to(tl.int64)
    adapter = tl.load(rows_SW + s * row_width + _ADAPTER)
    first = tl.program_id(1) * _RANKS
    r = first + tl.arange(0, _RANKS)
    low_R = _lowered(x_SI + s * width, down_GrI, adapter, first, rank, width)
    tl.store(low_Sr + s * rank + r, low_R, mask=r < rank)
