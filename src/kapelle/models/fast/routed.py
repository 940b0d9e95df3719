"""Linear layers whose rows go to different adapters, forward and backward, without autograd in between.

A *work order* (`Linear`) lists which tensors a layer reads and which rows belong to which adapter; `forward_linear` and
`backward_linear` carry it out on plain tensors, inside the autograd functions of blocks.py and lora_bank.py. Writing
both passes by hand saves what autograd costs: split and joined activations and one sum per branch of a gradient.

Several adapters are one grouped product where there is a kernel for it (grouped.py); else each has its own products.

Adapters are LoRA as in 2106.09685, y = Wx + (alpha / rank) · B·A·x. Rows use only their own adapter's tensors.

Shapes: N rows, n rows of one leg, I and O features in and out, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kapelle.models.fast.grouped import AdapterGroup, add_updates, backward_updates, takes_groups
from kapelle.models.fast.keyed_dropout import dropped
from kapelle.models.fast.products import product


class Leg(NamedTuple):
    """Rows [first, last) of one adapter; `a_rI` and `b_Or` are places in the list of tensors."""

    first: int
    last: int
    a_rI: int
    b_Or: int
    scale: float
    dropout: float
    keys_n: Tensor | None = None
    """Of dropout (`keyed_dropout.py`)."""


class Linear(NamedTuple):
    """One layer's work order; tensors are named by their place in a list."""

    weight_OI: int
    bias_O: int | None
    legs: tuple[Leg, ...]


class Kept(NamedTuple):
    """What one leg's forward pass leaves for its backward pass, or that of all legs where they are grouped."""

    low_nr: Tensor
    """A·x."""
    mask_nI: Tensor | None
    """True where dropout let x through."""


Tensors = Sequence[Tensor]

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(rows, weight, what to add) → rows times the transposed weight; see products.py."""


class Gradients:
    """Gradients of a list of tensors, each written once; a tensor that is used several times is listed as often."""

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = wanted
        self.values: list[Tensor | None] = [None] * len(wanted)

    def put(self, place: int, of: Tensor, make: Callable[[], Tensor]) -> None:
        """Keep what `make` returns, in the type of the tensor that it is the gradient `of`, where it is wanted."""
        if self.wanted[place]:
            self.values[place] = make().to(of.dtype)


def flat(kept: Sequence[Kept]) -> list[Tensor | None]:
    """Return what passes saved, one after another, as autograd stores it."""
    return [tensor for each in kept for tensor in each]


def unflat(tensors: Sequence[Tensor]) -> list[Kept]:
    """Undo `flat`."""
    return [Kept(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


def forward_linear(
    order: Linear, tensors: Tensors, x_NI: Tensor, multiply: Product = product
) -> tuple[Tensor, list[Kept]]:
    """Return the output `_NO` in the type of `x_NI`, and what the backward pass needs."""
    out_NO = multiply(x_NI, tensors[order.weight_OI].to(x_NI.dtype), None)
    if takes_groups(x_NI, out_NO.shape[1], len(order.legs)):
        kept = [Kept(*add_updates(_groups(order, tensors), x_NI, out_NO))]
    else:
        kept = [_add_factors(leg, tensors, x_NI, out_NO) for leg in order.legs]
    if order.bias_O is not None:
        out_NO.add_(tensors[order.bias_O])
    return out_NO, kept


def _add_factors(leg: Leg, tensors: Tensors, x_NI: Tensor, out_NO: Tensor) -> Kept:
    """Add a leg's update to its rows."""
    x_nI, out_nO = x_NI[leg.first : leg.last], out_NO[leg.first : leg.last]
    a_rI, b_Or = tensors[leg.a_rI].to(x_NI.dtype), tensors[leg.b_Or].to(x_NI.dtype)
    mask_nI = None
    if leg.dropout:
        x_nI, mask_nI = dropped(x_nI, leg.dropout, leg.keys_n)
    low_nr = x_nI @ a_rI.t()
    out_nO.addmm_(low_nr, b_Or.t(), alpha=leg.scale)
    return Kept(low_nr, mask_nI)


def _groups(order: Linear, tensors: Tensors) -> list[AdapterGroup]:
    return [
        AdapterGroup(
            leg.first, leg.last, tensors[leg.a_rI], tensors[leg.b_Or], leg.scale, leg.dropout, leg.keys_n
        )
        for leg in order.legs
    ]


def backward_linear(
    order: Linear,
    tensors: Tensors,
    kept: Sequence[Kept],
    x_NI: Tensor,
    given_NO: Tensor,
    grads: Gradients,
    *,
    more_NI: Tensor | None = None,
    wanted: bool = True,
    multiply: Product = product,
) -> Tensor | None:
    """Return the gradient of `x_NI` plus `more_NI` (used up), None where it is not `wanted`; fill `grads`."""
    weight_OI = tensors[order.weight_OI]
    dx_NI = multiply(given_NO, weight_OI.to(x_NI.dtype).t(), more_NI) if wanted else None
    grouped = takes_groups(x_NI, given_NO.shape[1], len(order.legs))
    if grouped:
        _backward_groups(order, tensors, kept[0], x_NI, given_NO, dx_NI, grads)
    for leg, left in () if grouped else zip(order.legs, kept, strict=True):
        x_nI, given_nO = x_NI[leg.first : leg.last], given_NO[leg.first : leg.last]
        dx_nI = None if dx_NI is None else dx_NI[leg.first : leg.last]
        _backward_factors(leg, tensors, left, x_nI, given_nO, dx_nI, grads)
    grads.put(order.weight_OI, weight_OI, lambda: given_NO.t() @ x_NI)
    if order.bias_O is not None:
        grads.put(order.bias_O, tensors[order.bias_O], lambda: given_NO.sum(0))
    return dx_NI


def _backward_groups(
    order: Linear,
    tensors: Tensors,
    kept: Kept,
    x_NI: Tensor,
    given_NO: Tensor,
    dx_NI: Tensor | None,
    grads: Gradients,
) -> None:
    learns = any(grads.wanted[leg.a_rI] or grads.wanted[leg.b_Or] for leg in order.legs)
    if dx_NI is None and not learns:
        return
    made = backward_updates(_groups(order, tensors), *kept, x_NI, given_NO, dx_NI, factors=learns)
    for leg, factors in zip(order.legs, made, strict=True):
        for place, value in ((leg.a_rI, factors.a_rI), (leg.b_Or, factors.b_Or)):
            if value is not None:
                grads.put(place, tensors[place], lambda value=value: value)  # type: ignore[misc]


def _backward_factors(
    leg: Leg,
    tensors: Tensors,
    kept: Kept,
    x_nI: Tensor,
    given_nO: Tensor,
    dx_nI: Tensor | None,
    grads: Gradients,
) -> None:
    a_rI, b_Or = tensors[leg.a_rI], tensors[leg.b_Or]
    if dx_nI is None and not grads.wanted[leg.a_rI] and not grads.wanted[leg.b_Or]:
        return
    scale, kind = leg.scale, x_nI.dtype
    down_rI, up_Or = a_rI.to(kind), b_Or.to(kind)
    if kept.mask_nI is not None:
        x_nI = x_nI * kept.mask_nI / (1 - leg.dropout)
    given_nr = given_nO @ up_Or
    if dx_nI is not None and kept.mask_nI is None:
        dx_nI.addmm_(given_nr, down_rI, alpha=scale)
    elif dx_nI is not None and kept.mask_nI is not None:
        dx_nI.add_((given_nr @ down_rI).mul_(kept.mask_nI).mul_(scale / (1 - leg.dropout)))
    # With beta 0 the first argument only lends its shape: the product scales on its way out.
    grads.put(leg.a_rI, a_rI, lambda: torch.addmm(down_rI, given_nr.t(), x_nI, beta=0, alpha=scale))
    grads.put(
        leg.b_Or, b_Or, lambda: torch.addmm(up_Or.t(), kept.low_nr.t(), given_nO, beta=0, alpha=scale).t()
    )
