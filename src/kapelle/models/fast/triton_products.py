"""Grouped matrix products in Triton, for the updates of adapters.

The products of all groups of rows, for up to three layers that read the same rows or add to them, are one kernel. Sums
are computed in float32, the host does not wait for the device, and results are deterministic. The operations and their
plain implementations are defined in routed_linear.py.

Tests run the kernels on a CPU in Triton's interpreter (`TRITON_INTERPRET=1`).

In tensor shapes, N is the number of rows, G of groups of consecutive rows, S of layers, K of features that are summed
over, and M of output features; P and Q are the numbers of features of the two factors of an outer product. The int32
tensor `ends_G` contains the row after the last row of each group. Groups are in the order of their rows and cover all
rows. A group may be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

LAYERS = 3
"""The maximum number of layers of one kernel."""

ROWS = 64
"""The maximum number of rows of a tile."""

WIDTH = 64
"""The maximum number of features of a tile in either dimension. Products need at least 16 features."""

FEW_ROWS = 256
"""The number of rows up to which a tile has 16 rows, and reads more features at once."""

SUMMED = 4096
"""The number of rows of a pass that one program of an outer product sums. The sums of more programs are added up."""

# The interpreter multiplies with NumPy, which has no bfloat16.
INTERPRETED = triton.knobs.runtime.interpret

Item = TypeVar("Item")


def grouped(xs: Sequence[Tensor], weight_GKM: Tensor, scale_G: Tensor | None, ends_G: Tensor) -> Tensor:
    """Return the product of each group's rows and the group's own weight, times its scale, of shape (N, S·M).

    Each layer has its own rows, and its features are a part of the summed features of the weight.
    """
    width = weight_GKM.shape[2]
    out_NM = xs[0].new_empty(len(xs[0]), len(xs) * width)
    weights = weight_GKM.split([x_NK.shape[1] for x_NK in xs], 1)
    _products([_rows(x_NK) for x_NK in xs], weights, out_NM.split(width, 1), scale_G, ends_G, adds=False)
    return out_NM


def add_grouped(outs: Sequence[Tensor], x_NK: Tensor, weight_GKM: Tensor, ends_G: Tensor) -> None:
    """Add the product of each group's rows and the group's own weight to outputs.

    Each layer has its own part of the features of x, and its output is a part of the features of the weight.
    """
    weights = weight_GKM.split([out_NM.shape[1] for out_NM in outs], 2)
    _products(_rows(x_NK).split(weight_GKM.shape[1], 1), weights, outs, None, ends_G, adds=True)


def _products(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale_G: Tensor | None,
    ends_G: Tensor,
    *,
    adds: bool,
) -> None:
    rows, width = len(xs[0]), max(out_NM.shape[1] for out_NM in outs)
    few = rows <= FEW_ROWS
    tile_N, tile_M = 16 if few else ROWS, _tile(width)
    tile_K = _tile(max(x_NK.shape[1] for x_NK in xs), (4 if few else 1) * WIDTH)
    # Each group's last tile may be partly empty, and only the device knows the lengths of groups.
    grid = (triton.cdiv(rows, tile_N) + len(ends_G), triton.cdiv(width, tile_M), len(xs))
    with on(xs[0].device):
        _grouped_kernel[grid](
            *_each(xs), *_each(weights), *_each(outs), ends_G, ends_G if scale_G is None else scale_G,
            len(ends_G), *_each(x_NK.shape[1] for x_NK in xs), *_each(out_NM.shape[1] for out_NM in outs),
            *_each(x_NK.stride(0) for x_NK in xs), *_each(out_NM.stride(0) for out_NM in outs), *weights[0].stride(),
            scale_G is not None, adds, len(xs), tile_N, tile_K, tile_M, _precision(), INTERPRETED,
        )  # fmt: skip


def grouped_outer(lefts: Sequence[Tensor], right_NQ: Tensor, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of outer products (leftᵀ · right) over the rows of each group, of shape (G, sum of P, Q / S).

    Each layer has its own left factor, and its own part of the features of the right one. The result of an empty group
    is zero.
    """
    widths = [left_NP.shape[1] for left_NP in lefts]
    right = _rows(right_NQ).split(right_NQ.shape[1] // len(lefts), 1)
    parts = max(1, triton.cdiv(len(right_NQ), SUMMED))
    kind = dtype if parts == 1 else torch.float32
    out_LGPQ = right_NQ.new_empty(parts, len(ends_G), sum(widths), right[0].shape[1], dtype=kind)
    outs = out_LGPQ.split(widths, 2)
    tile_P, tile_Q = _tile(max(widths)), _tile(right[0].shape[1])
    tiles_Q = triton.cdiv(right[0].shape[1], tile_Q)
    grid = (len(ends_G) * parts, triton.cdiv(max(widths), tile_P) * tiles_Q, len(lefts))
    lefts = [_rows(left_NP) for left_NP in lefts]
    with on(right_NQ.device):
        _outer_kernel[grid](
            *_each(lefts), *_each(right), *_each(outs), ends_G,
            *_each(widths), right[0].shape[1], parts, tiles_Q,
            *_each(left_NP.stride(0) for left_NP in lefts), right[0].stride(0), *out_LGPQ.stride()[:3],
            len(lefts), ROWS, tile_P, tile_Q, _precision(), INTERPRETED,
        )  # fmt: skip
    return out_LGPQ[0] if parts == 1 else out_LGPQ.sum(0).to(dtype)


def _rows(x_NK: Tensor) -> Tensor:
    """Return rows whose features are adjacent in memory."""
    return x_NK if x_NK.stride(1) == 1 else x_NK.contiguous()


def _each(values: Iterable[Item]) -> list[Item]:
    """Return one value for each of the `LAYERS` layers, of which the last ones are not read."""
    own = list(values)
    return own + own[-1:] * (LAYERS - len(own))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which Triton starts its kernels on this CUDA device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _precision() -> str:
    """Return the precision of float32 products, which is the precision that torch uses."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _tile(size: int, most: int = WIDTH) -> int:
    return min(most, max(16, 1 << (size - 1).bit_length()))


@triton.jit
def _grouped_kernel(
    x_0, x_1, x_2, weight_0, weight_1, weight_2, out_0, out_1, out_2, ends_G, scale_G,
    groups, summed_0, summed_1, summed_2, width_0, width_1, width_2,
    x_row_0, x_row_1, x_row_2, out_row_0, out_row_1, out_row_2, weight_group, weight_in, weight_out,
    SCALES: tl.constexpr, ADDS: tl.constexpr, LAYERS: tl.constexpr,
    ROWS: tl.constexpr, TILE_K: tl.constexpr, TILE_M: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the rows of one group in one layer. Tiles are numbered consecutively over all groups."""
    tile = tl.program_id(0)
    group, first, last = -1, 0, 0
    before, start = 0, 0  # tiles and rows of the groups before
    for g in range(groups):
        end = tl.load(ends_G + g)
        here = tl.cdiv(end - start, ROWS)
        found = (tile >= before) & (tile < before + here)
        group = tl.where(found, g, group)
        first = tl.where(found, start + (tile - before) * ROWS, first)
        last = tl.where(found, end, last)
        before += here
        start = end
    if group >= 0:
        layer = tl.program_id(2)
        if LAYERS == 1 or layer == 0:
            _product_tile(
                x_0, weight_0, out_0, scale_G, group, first, last, summed_0, width_0, x_row_0, out_row_0,
                weight_group, weight_in, weight_out, SCALES, ADDS, ROWS, TILE_K, TILE_M, PRECISION, INTERPRETED,
            )  # fmt: skip
        elif LAYERS == 2 or layer == 1:
            _product_tile(
                x_1, weight_1, out_1, scale_G, group, first, last, summed_1, width_1, x_row_1, out_row_1,
                weight_group, weight_in, weight_out, SCALES, ADDS, ROWS, TILE_K, TILE_M, PRECISION, INTERPRETED,
            )  # fmt: skip
        else:
            _product_tile(
                x_2, weight_2, out_2, scale_G, group, first, last, summed_2, width_2, x_row_2, out_row_2,
                weight_group, weight_in, weight_out, SCALES, ADDS, ROWS, TILE_K, TILE_M, PRECISION, INTERPRETED,
            )  # fmt: skip


@triton.jit
def _product_tile(
    x_NK, weight_GKM, out_NM, scale_G,
    group, first, last, summed, width, x_row, out_row, weight_group, weight_in, weight_out,
    SCALES: tl.constexpr, ADDS: tl.constexpr,
    ROWS: tl.constexpr, TILE_K: tl.constexpr, TILE_M: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row_T = first + tl.arange(0, ROWS)
    column_M = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    real_T, real_M = row_T < last, column_M < width
    if tl.program_id(1) * TILE_M < width:
        x_T = x_NK + row_T.to(tl.int64) * x_row
        weight_M = weight_GKM + tl.cast(group, tl.int64) * weight_group + column_M * weight_out
        sum_TM = tl.zeros((ROWS, TILE_M), dtype=tl.float32)
        for k in range(0, summed, TILE_K):
            place_K = k + tl.arange(0, TILE_K)
            real_K = place_K < summed
            x_TK = tl.load(x_T[:, None] + place_K[None, :], mask=real_T[:, None] & real_K[None, :], other=0.0)
            weight_KM = tl.load(
                weight_M[None, :] + place_K[:, None] * weight_in,
                mask=real_K[:, None] & real_M[None, :],
                other=0.0,
            )
            if INTERPRETED:
                x_TK, weight_KM = x_TK.to(tl.float32), weight_KM.to(tl.float32)
            sum_TM = tl.dot(x_TK, weight_KM, sum_TM, input_precision=PRECISION)
        if SCALES:
            sum_TM *= tl.load(scale_G + group)
        out_TM = out_NM + row_T.to(tl.int64)[:, None] * out_row + column_M[None, :]
        real_TM = real_T[:, None] & real_M[None, :]
        if ADDS:
            sum_TM += tl.load(out_TM, mask=real_TM, other=0.0).to(tl.float32)
        tl.store(out_TM, sum_TM.to(out_NM.dtype.element_ty), mask=real_TM)


@triton.jit
def _outer_kernel(
    left_0, left_1, left_2, right_0, right_1, right_2, out_0, out_1, out_2, ends_G,
    size_P_0, size_P_1, size_P_2, size_Q, parts, tiles_Q,
    left_row_0, left_row_1, left_row_2, right_row, out_part, out_group, out_P,
    LAYERS: tl.constexpr,
    ROWS: tl.constexpr, TILE_P: tl.constexpr, TILE_Q: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the sum of outer products over a part of the rows of one group, in order, in one layer."""
    group, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    end = tl.load(ends_G + group)
    start = tl.load(ends_G + group - 1, mask=group > 0, other=0)
    each = tl.cdiv(tl.cdiv(end - start, parts), ROWS) * ROWS
    first = start + part * each
    last = tl.minimum(first + each, end)
    place = tl.cast(part, tl.int64) * out_part + tl.cast(group, tl.int64) * out_group
    layer = tl.program_id(2)
    if LAYERS == 1 or layer == 0:
        _outer_tile(
            left_0, right_0, out_0 + place, first, last, size_P_0, size_Q, tiles_Q, left_row_0, right_row, out_P,
            ROWS, TILE_P, TILE_Q, PRECISION, INTERPRETED,
        )  # fmt: skip
    elif LAYERS == 2 or layer == 1:
        _outer_tile(
            left_1, right_1, out_1 + place, first, last, size_P_1, size_Q, tiles_Q, left_row_1, right_row, out_P,
            ROWS, TILE_P, TILE_Q, PRECISION, INTERPRETED,
        )  # fmt: skip
    else:
        _outer_tile(
            left_2, right_2, out_2 + place, first, last, size_P_2, size_Q, tiles_Q, left_row_2, right_row, out_P,
            ROWS, TILE_P, TILE_Q, PRECISION, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _outer_tile(
    left_NP, right_NQ, out_PQ, first, last, size_P, size_Q, tiles_Q, left_row, right_row, out_P,
    ROWS: tl.constexpr, TILE_P: tl.constexpr, TILE_Q: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    place_P = tl.program_id(1) // tiles_Q * TILE_P + tl.arange(0, TILE_P)
    place_Q = tl.program_id(1) % tiles_Q * TILE_Q + tl.arange(0, TILE_Q)
    real_P, real_Q = place_P < size_P, place_Q < size_Q
    if tl.program_id(1) // tiles_Q * TILE_P < size_P:
        sum_PQ = tl.zeros((TILE_P, TILE_Q), dtype=tl.float32)
        for n in range(first, last, ROWS):
            row_T = n + tl.arange(0, ROWS)
            real_T = row_T < last
            row_T = row_T.to(tl.int64)
            left_PT = tl.load(
                left_NP + row_T[None, :] * left_row + place_P[:, None],
                mask=real_P[:, None] & real_T[None, :],
                other=0.0,
            )
            right_TQ = tl.load(
                right_NQ + row_T[:, None] * right_row + place_Q[None, :],
                mask=real_T[:, None] & real_Q[None, :],
                other=0.0,
            )
            if INTERPRETED:
                left_PT, right_TQ = left_PT.to(tl.float32), right_TQ.to(tl.float32)
            sum_PQ = tl.dot(left_PT, right_TQ, sum_PQ, input_precision=PRECISION)
        tl.store(
            out_PQ + place_P[:, None] * out_P + place_Q[None, :],
            sum_PQ.to(out_PQ.dtype.element_ty),
            mask=real_P[:, None] & real_Q[None, :],
        )
