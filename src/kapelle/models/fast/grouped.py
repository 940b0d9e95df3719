"""Low-rank updates of several adapters as grouped products: one call for all of them instead of one each.

A GPU is mostly idle while products of few rows are started. `grouped_mm` computes the products of all
groups of rows in one kernel, forward, backward, and, with both sides flat, the gradient of each group's weight. The
factors are stacked; smaller ranks are filled up with zeros, which changes no number. Rows without an adapter are a
group whose factors are zero, because rows outside all groups are not computed.

A row uses only the factors of its own group, so no gradient crosses from one adapter to another.

Shapes: N rows, n rows of one group, I and O features in and out, r rank (of the stack: the largest), G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from kapelle.models.fast.keyed_dropout import dropped

LEAST = 2
"""Adapters in a pass from which they are grouped: with two, fewer kernels are started than one by one, with three also if
ranks have to be padded."""

ARCHITECTURES = frozenset({9, 10})
"""Major compute capabilities that torch has a kernel for; elsewhere its grouped product is a loop that waits for the GPU."""

ALIGNMENT = 16
"""Bytes; the kernel needs every row to be a multiple."""


class AdapterGroup(NamedTuple):
    """Rows [first, last) of one adapter and its factors."""

    first: int
    last: int
    a_rI: Tensor
    b_Or: Tensor
    scale: float
    dropout: float
    keys_n: Tensor | None = None
    """Of dropout (`keyed_dropout.py`)."""


class Factored(NamedTuple):
    """Gradients of one adapter's factors; None where they are not wanted."""

    a_rI: Tensor | None
    b_Or: Tensor | None


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether grouped products of a type are one kernel on a device."""
    return (
        hasattr(functional, "grouped_mm")  # since torch 2.10
        and device.type == "cuda"
        and torch.version.cuda is not None
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device)[0] in ARCHITECTURES
    )


def takes_groups(x_NI: Tensor, features_out: int, adapters: int) -> bool:
    """Return whether the updates of so many adapters are grouped for an input: at least `LEAST`, and a kernel for them."""
    if adapters < LEAST or not has_kernel(x_NI.device, x_NI.dtype):
        return False
    step = ALIGNMENT // x_NI.element_size()
    return x_NI.shape[1] % step == 0 == features_out % step


def add_updates(groups: Sequence[AdapterGroup], x_NI: Tensor, out_NO: Tensor) -> tuple[Tensor, Tensor | None]:
    """Add every group's update to `out_NO`; return A·x `_Nr` and where dropout let x through, None without it."""
    stack = _Stack(groups, x_NI)
    mask_NI = None
    if any(group.dropout for group in groups):
        x_NI, mask_NI = _dropped(groups, x_NI)
    low_Nr = functional.grouped_mm(_aligned(x_NI), stack.down_GrI.transpose(1, 2), offs=stack.ends_G)
    out_NO.add_(functional.grouped_mm(low_Nr, stack.up_GOr.transpose(1, 2), offs=stack.ends_G))
    return low_Nr, mask_NI


def backward_updates(
    groups: Sequence[AdapterGroup],
    low_Nr: Tensor,
    mask_NI: Tensor | None,
    x_NI: Tensor,
    given_NO: Tensor,
    dx_NI: Tensor | None,
    *,
    factors: bool,
) -> list[Factored]:
    """Add the updates' part to `dx_NI`; return the gradients of each group's factors where `factors` are wanted."""
    stack = _Stack(groups, x_NI)
    given_NO = _aligned(given_NO)
    given_Nr = functional.grouped_mm(given_NO, stack.up_GOr, offs=stack.ends_G)
    if dx_NI is not None:
        through_NI = functional.grouped_mm(given_Nr, stack.down_GrI, offs=stack.ends_G)
        dx_NI.add_(through_NI if mask_NI is None else _through(groups, through_NI, mask_NI))
    if not factors:
        return [Factored(None, None) for _ in groups]
    if mask_NI is not None:
        x_NI = _through(groups, x_NI, mask_NI)
    da_GrI = functional.grouped_mm(given_Nr.t(), _aligned(x_NI), offs=stack.ends_G).to(groups[0].a_rI.dtype)
    db_GOr = functional.grouped_mm(given_NO.t(), low_Nr, offs=stack.ends_G).to(groups[0].b_Or.dtype)
    ranks = [len(group.a_rI) for group in groups]
    db = _scaled(groups, [db_GOr[place, :, :rank] for place, rank in zip(stack.places, ranks, strict=True)])
    return [
        Factored(da_GrI[place, :rank], db_Or)
        for place, rank, db_Or in zip(stack.places, ranks, db, strict=True)
    ]


class _Stack:
    """The factors of all groups in the type of an input; B carries the scale."""

    def __init__(self, groups: Sequence[AdapterGroup], x_NI: Tensor) -> None:
        step = ALIGNMENT // x_NI.element_size()
        rank = -(-max(len(group.a_rI) for group in groups) // step) * step
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        ends = [0]
        self.places: list[int] = []
        """Index of each given group in the stack, which has a group of zeros wherever rows have no adapter."""

        def leave_out(first: int) -> None:
            """Make rows up to `first` that no group covers a group of zeros."""
            if first > ends[-1]:
                downs.append(groups[0].a_rI.new_zeros(rank, groups[0].a_rI.shape[1]))
                ups.append(groups[0].b_Or.new_zeros(len(groups[0].b_Or), rank))
                ends.append(first)

        for group, b_Or in zip(groups, _scaled(groups, [group.b_Or for group in groups]), strict=True):
            leave_out(group.first)
            self.places.append(len(downs))
            more = rank - len(group.a_rI)
            downs.append(pad(group.a_rI, (0, 0, 0, more)) if more else group.a_rI)
            ups.append(pad(b_Or, (0, more)) if more else b_Or)
            ends.append(group.last)
        leave_out(len(x_NI))
        self.down_GrI = torch.stack(downs).to(x_NI.dtype)
        self.up_GOr = torch.stack(ups).to(x_NI.dtype)
        self.ends_G = _ends(tuple(ends[1:]), x_NI.device)


def _scaled(groups: Sequence[AdapterGroup], tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return each group's tensor times its scale, in one kernel."""
    return torch._foreach_mul(tensors, [group.scale for group in groups])  # noqa: SLF001 — it has no public name


@lru_cache(maxsize=64)
def _ends(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the rows after each group's last; cached, because a copy for every layer would synchronise with the GPU."""
    with torch.inference_mode(mode=False):  # what sampling made, training uses too
        return torch.tensor(ends, dtype=torch.int32, device=device)


def _aligned(x_NI: Tensor) -> Tensor:
    """Return rows with the alignment that the kernel needs."""
    step = ALIGNMENT // x_NI.element_size()
    fits = x_NI.stride(1) == 1 and x_NI.stride(0) % step == 0 == x_NI.storage_offset() % step
    return x_NI if fits else x_NI.clone(memory_format=torch.contiguous_format)


def _dropped(groups: Sequence[AdapterGroup], x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows after each group's dropout, and where it let them through; drawn in the groups' order."""
    out_NI, mask_NI = x_NI.clone(), torch.ones_like(x_NI, dtype=torch.bool)
    for group in groups:
        if group.dropout:
            rows = slice(group.first, group.last)
            out_NI[rows], mask_NI[rows] = dropped(x_NI[rows], group.dropout, group.keys_n)
    return out_NI, mask_NI


def _through(groups: Sequence[AdapterGroup], x_NI: Tensor, mask_NI: Tensor) -> Tensor:
    """Return what dropout makes of rows where it let `mask_NI` through."""
    out_NI = x_NI * mask_NI
    for group in groups:
        if group.dropout:
            out_NI[group.first : group.last] /= 1 - group.dropout
    return out_NI
