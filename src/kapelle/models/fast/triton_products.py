"""Grouped matrix products in Triton, for CUDA devices and types for which torch has no kernel.

torch's `grouped_mm` is one kernel in bfloat16 on compute capability 9 and 10. On an A100, an L40S or a 4090, and in
float16 or float32, `grouped_mm` is a loop that synchronises with the GPU. In this module, the product of all groups is
one kernel: sums are computed in float32, the host does not wait for the device, and results are deterministic.

Tests run the kernels on a CPU in Triton's interpreter (`TRITON_INTERPRET=1`).

In tensor shapes, N is the number of rows, G of groups of consecutive rows, K of features that are summed over, and M of
output features; P and Q are the numbers of features of the two factors of an outer product.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
"""The maximum number of rows of a tile."""

WIDTH = 64
"""The maximum number of features of a tile in either dimension. Products need at least 16 features."""

# The interpreter multiplies with NumPy, which has no bfloat16.
INTERPRETED = triton.knobs.runtime.interpret


def grouped(x_NK: Tensor, weight_GKM: Tensor, ends_G: Tensor) -> Tensor:
    """Return the product of each group's rows and the group's own weight, of shape (N, M).

    The int32 tensor `ends_G` contains the row after the last row of each group. Groups are in the order of their rows
    and cover all rows. A group may be empty.
    """
    rows, summed, width = len(x_NK), x_NK.shape[1], weight_GKM.shape[2]
    out_NM = x_NK.new_empty(rows, width)
    tile_M = _tile(width)
    # Each group's last tile may be partly empty, and only the device knows the lengths of groups.
    grid = (triton.cdiv(rows, ROWS) + len(ends_G), triton.cdiv(width, tile_M))
    with on(x_NK.device):
        _grouped_kernel[grid](
        x_NK, weight_GKM, out_NM, ends_G,
        len(ends_G), summed, width,
        *x_NK.stride(), *weight_GKM.stride(), *out_NM.stride(),
        ROWS, _tile(summed), tile_M, _precision(), INTERPRETED,
    )  # fmt: skip
    return out_NM


def grouped_outer(left_NP: Tensor, right_NQ: Tensor, ends_G: Tensor) -> Tensor:
    """Return the sum of outer products (leftᵀ · right) over the rows of each group, of shape (G, P, Q).

    The result of an empty group is zero.
    """
    out_GPQ = left_NP.new_empty(len(ends_G), left_NP.shape[1], right_NQ.shape[1])
    tile_P, tile_Q = (_tile(size) for size in out_GPQ.shape[1:])
    grid = (len(ends_G), triton.cdiv(out_GPQ.shape[1], tile_P), triton.cdiv(out_GPQ.shape[2], tile_Q))
    with on(left_NP.device):
        _outer_kernel[grid](
        left_NP, right_NQ, out_GPQ, ends_G,
        *out_GPQ.shape[1:],
        *left_NP.stride(), *right_NQ.stride(), *out_GPQ.stride(),
        ROWS, tile_P, tile_Q, _precision(), INTERPRETED,
    )  # fmt: skip
    return out_GPQ


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which Triton starts its kernels on this CUDA device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _precision() -> str:
    """Return the precision of float32 products, which is the precision that torch uses."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _tile(size: int) -> int:
    return min(WIDTH, max(16, 1 << (size - 1).bit_length()))


@triton.jit
def _grouped_kernel(
    x_NK, weight_GKM, out_NM, ends_G,
    groups, summed, width,
    x_row, x_feature, weight_group, weight_in, weight_out, out_row, out_feature,
    ROWS: tl.constexpr, TILE_K: tl.constexpr, TILE_M: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the rows of one group. Tiles are numbered consecutively over all groups."""
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
        row_T = first + tl.arange(0, ROWS)
        column_M = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
        real_T, real_M = row_T < last, column_M < width
        x_T = x_NK + row_T.to(tl.int64) * x_row
        weight_M = weight_GKM + tl.cast(group, tl.int64) * weight_group + column_M * weight_out
        sum_TM = tl.zeros((ROWS, TILE_M), dtype=tl.float32)
        for k in range(0, summed, TILE_K):
            place_K = k + tl.arange(0, TILE_K)
            real_K = place_K < summed
            x_TK = tl.load(
                x_T[:, None] + place_K[None, :] * x_feature, mask=real_T[:, None] & real_K[None, :], other=0.0
            )
            weight_KM = tl.load(
                weight_M[None, :] + place_K[:, None] * weight_in,
                mask=real_K[:, None] & real_M[None, :],
                other=0.0,
            )
            if INTERPRETED:
                x_TK, weight_KM = x_TK.to(tl.float32), weight_KM.to(tl.float32)
            sum_TM = tl.dot(x_TK, weight_KM, sum_TM, input_precision=PRECISION)
        tl.store(
            out_NM + row_T.to(tl.int64)[:, None] * out_row + column_M[None, :] * out_feature,
            sum_TM.to(out_NM.dtype.element_ty),
            mask=real_T[:, None] & real_M[None, :],
        )


@triton.jit
def _outer_kernel(
    left_NP, right_NQ, out_GPQ, ends_G,
    size_P, size_Q,
    left_row, left_feature, right_row, right_feature, out_group, out_P, out_Q,
    ROWS: tl.constexpr, TILE_P: tl.constexpr, TILE_Q: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the sum of outer products of one group, over all rows of the group in order."""
    group = tl.program_id(0)
    end = tl.load(ends_G + group)
    start = tl.load(ends_G + group - 1, mask=group > 0, other=0)
    place_P = tl.program_id(1) * TILE_P + tl.arange(0, TILE_P)
    place_Q = tl.program_id(2) * TILE_Q + tl.arange(0, TILE_Q)
    real_P, real_Q = place_P < size_P, place_Q < size_Q
    sum_PQ = tl.zeros((TILE_P, TILE_Q), dtype=tl.float32)
    for n in range(start, end, ROWS):
        row_T = n + tl.arange(0, ROWS)
        real_T = row_T < end
        row_T = row_T.to(tl.int64)
        left_PT = tl.load(
            left_NP + row_T[None, :] * left_row + place_P[:, None] * left_feature,
            mask=real_P[:, None] & real_T[None, :],
            other=0.0,
        )
        right_TQ = tl.load(
            right_NQ + row_T[:, None] * right_row + place_Q[None, :] * right_feature,
            mask=real_T[:, None] & real_Q[None, :],
            other=0.0,
        )
        if INTERPRETED:
            left_PT, right_TQ = left_PT.to(tl.float32), right_TQ.to(tl.float32)
        sum_PQ = tl.dot(left_PT, right_TQ, sum_PQ, input_precision=PRECISION)
    tl.store(
        out_GPQ + tl.cast(group, tl.int64) * out_group + place_P[:, None] * out_P + place_Q[None, :] * out_Q,
        sum_PQ.to(out_GPQ.dtype.element_ty),
        mask=real_P[:, None] & real_Q[None, :],
    )
