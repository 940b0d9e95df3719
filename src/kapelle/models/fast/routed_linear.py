"""Linear layers with different adapters for different rows, with hand-written forward and backward passes.

A *work order* (`Linear`) lists the tensors of a layer and the rows of each adapter. The functions `forward_linear` and
`backward_linear` execute a work order on plain tensors, inside the autograd functions of flat.py and lora_bank.py.
Writing both passes by hand saves what autograd would add: splitting and joining activations, and one sum per branch of
a gradient.

Adapters are LoRA as in arXiv:2106.09685, y = Wx + (alpha / rank) · B·A·x. Rows use only the tensors of their own
adapter, so no gradient flows from one adapter to another.

The updates of several adapters are computed as one grouped product if there is a kernel for it: torch's `grouped_mm`,
or kapelle's own kernel in Triton. Otherwise, each adapter has separate products, and launching them leaves a GPU mostly
idle. A grouped product computes all groups of rows in one kernel, in the forward pass, in the backward pass and for the
gradient of each group's weight. If all groups have the same number of rows, as in decoding, a batched product is used
instead, because grouped products are efficient only for many rows: they took 4.7 of the 9.3 ms of a step of 64 rows on
an H100. The factors are stacked, and smaller ranks are padded with zeros, which changes no result. Rows without an
adapter form a group with zero factors, because rows outside all groups are not computed.

The mask of dropout (arXiv:1207.0580) is a function of each token and independent of the pass. A random generator draws
masks in the order of a pass, so a different split into microbatches or processes would give different masks. In this
module, a row has a key, a layer has a salt, and their hash (the finaliser of MurmurHash3) decides whether a feature is
kept. An optimiser step is therefore the same for any split of its samples. Without keys, torch's generator draws the
masks.

On a CPU in float32, torch multiplies with its BLAS, which reaches 60 to 90 % of oneDNN's speed for the thousands of
rows of an update. oneDNN is used for any number of rows, because the results of two libraries would differ by rounding.
In half precision, torch already uses oneDNN.

In tensor shapes, N is the number of rows, n of rows of one leg or group, I of input features, O of output features and
G of groups; r is the rank (for a stack, the largest rank).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad
from torch.optim.optimizer import register_optimizer_step_post_hook

from kapelle.models.fast import kernels

LEAST_ADAPTERS = 2
"""The number of adapters in a pass from which their updates are grouped. With two adapters, grouping needs fewer
kernels than separate products. With three adapters, this holds even if ranks are padded."""

ARCHITECTURES = frozenset({9, 10})
"""The major compute capabilities for which torch has a kernel. On other GPUs, torch's grouped product is a loop that
waits for the GPU."""

LEAST_CAPABILITY = (8, 0)
"""The compute capability from which kapelle's grouped products use tensor cores in both half-precision types."""

STACKS = 2
"""The number of stacks of factors that a layer caches. Different adapters, or a different order of adapters, need
another stack."""

ALIGNMENT = 16
"""The alignment in bytes. The size of every row must be a multiple of this value for the kernel."""


def product(x_NI: Tensor, weight_OI: Tensor, more_NO: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ, plus `more_NO` if given. The tensor `more_NO` may be overwritten."""
    onednn = torch.backends.mkldnn.is_available()
    if x_NI.device.type != "cpu" or x_NI.dtype != torch.float32 or not onednn:
        return plain_product(x_NI, weight_OI, more_NO)
    made: Tensor
    if more_NO is None:
        made = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, None, "none", [], "")  # noqa: SLF001 — it has no public name
    else:
        made = torch.ops.mkldnn._linear_pointwise.binary(x_NI, more_NO, weight_OI, None, "add")  # noqa: SLF001
    return made


def plain_product(x_NI: Tensor, weight_OI: Tensor, more_NO: Tensor | None = None) -> Tensor:
    """Return the same result as `product`, computed by torch and bitwise identical to a linear layer of torch."""
    return torch.mm(x_NI, weight_OI.t()) if more_NO is None else more_NO.addmm_(x_NI, weight_OI.t())


class Leg(NamedTuple):
    """The rows [first, last) of one adapter. The fields `a_rI` and `b_Or` are indices into the list of tensors."""

    first: int
    last: int
    a_rI: int
    b_Or: int
    scale: float
    dropout: float
    keys_n: Tensor | None = None
    """The dropout keys of the rows (see `dropped`)."""


class Linear(NamedTuple):
    """The work order of one layer. Tensors are given as indices into a list."""

    weight_OI: int
    bias_O: int | None
    legs: tuple[Leg, ...]
    stacks: StoredStacks | None = None
    """The layer's cached stacks of factors. With None, the factors are stacked in every pass."""
    grouped: bool = True
    """Whether the updates of several adapters may be grouped."""


class SavedForBackward(NamedTuple):
    """The tensors that the backward pass needs, for one leg or for all grouped legs."""

    low_nr: Tensor
    """The product A·x."""
    mask_nI: Tensor | None
    """A mask that is True where dropout kept x."""


Tensors = Sequence[Tensor]

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function that returns rows times the transposed weight plus an optional term, given rows, weight and term (see
`product`)."""


class Gradients:
    """The gradients of a list of tensors. Each gradient is written once. A tensor that is used several times is listed several times."""

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = wanted
        self.values: list[Tensor | None] = [None] * len(wanted)

    def put(self, place: int, of: Tensor, make: Callable[[], Tensor]) -> None:
        """Store the gradient that `make` returns, in the type of the tensor `of`, if this gradient is wanted."""
        if self.wanted[place]:
            self.values[place] = make().to(of.dtype)


def saved_tensors(kept: Sequence[SavedForBackward]) -> list[Tensor | None]:
    """Return the tensors of several legs in one list, as autograd stores them."""
    return [tensor for each in kept for tensor in each]


def kept_rows_of(tensors: Sequence[Tensor]) -> list[SavedForBackward]:
    """Return the `SavedForBackward` of each leg, given the list that `saved_tensors` returned."""
    return [SavedForBackward(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


def forward_linear(
    order: Linear, tensors: Tensors, x_NI: Tensor, multiply: Product = product
) -> tuple[Tensor, list[SavedForBackward]]:
    """Return the output in the type of `x_NI`, of shape (N, O), and the tensors that the backward pass needs."""
    out_NO = multiply(x_NI, tensors[order.weight_OI].to(x_NI.dtype), None)
    if order.grouped and takes_groups(x_NI, out_NO.shape[1], len(order.legs)):
        kept = [SavedForBackward(*add_updates(_groups(order, tensors), x_NI, out_NO, order.stacks))]
    else:
        kept = []
        for leg in order.legs:
            x_nI, mask_nI = x_NI[leg.first : leg.last], None
            a_rI, b_Or = tensors[leg.a_rI].to(x_NI.dtype), tensors[leg.b_Or].to(x_NI.dtype)
            if leg.dropout:
                x_nI, mask_nI = dropped(x_nI, leg.dropout, leg.keys_n)
            low_nr = x_nI @ a_rI.t()
            out_NO[leg.first : leg.last].addmm_(low_nr, b_Or.t(), alpha=leg.scale)
            kept.append(SavedForBackward(low_nr, mask_nI))
    if order.bias_O is not None:
        out_NO.add_(tensors[order.bias_O])
    return out_NO, kept


def forward_linears(
    orders: Sequence[Linear], tensors: Tensors, x_NI: Tensor, multiply: Product = product
) -> tuple[list[Tensor], list[SavedForBackward]]:
    outs, kept = [], []
    for order in orders:
        out_NO, own = forward_linear(order, tensors, x_NI, multiply)
        outs.append(out_NO)
        kept += own
    return outs, kept


def backward_linears(
    orders: Sequence[Linear],
    tensors: Tensors,
    kept: Sequence[SavedForBackward],
    x_NI: Tensor,
    given: Sequence[Tensor],
    grads: Gradients,
    *,
    wanted: bool = True,
    multiply: Product = product,
) -> Tensor | None:
    dx_NI = None
    kept = list(kept)
    for order, given_NO in zip(orders, given, strict=True):
        count = 1 if order.grouped and takes_groups(x_NI, given_NO.shape[1], len(order.legs)) else len(order.legs)
        dx_NI = backward_linear(order, tensors, kept[:count], x_NI, given_NO, grads, more_NI=dx_NI, wanted=wanted, multiply=multiply)
        del kept[:count]
    return dx_NI


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
    kept: Sequence[SavedForBackward],
    x_NI: Tensor,
    given_NO: Tensor,
    grads: Gradients,
    *,
    more_NI: Tensor | None = None,
    wanted: bool = True,
    multiply: Product = product,
) -> Tensor | None:
    """Return the gradient of `x_NI` plus `more_NI`, or None if it is not `wanted`, and store the other gradients in `grads`.

    The tensor `more_NI` is overwritten.
    """
    weight_OI = tensors[order.weight_OI]
    dx_NI = multiply(given_NO, weight_OI.to(x_NI.dtype).t(), more_NI) if wanted else None
    if order.grouped and takes_groups(x_NI, given_NO.shape[1], len(order.legs)):
        learns = any(grads.wanted[leg.a_rI] or grads.wanted[leg.b_Or] for leg in order.legs)
        made: list[Factored] = []
        if dx_NI is not None or learns:
            groups = _groups(order, tensors)
            made = backward_updates(
                groups, *kept[0], x_NI, given_NO, dx_NI, factors=learns, stacks=order.stacks
            )
        for leg, factors in zip(order.legs, made, strict=False):
            for place, value in ((leg.a_rI, factors.a_rI), (leg.b_Or, factors.b_Or)):
                if value is not None and grads.wanted[place]:
                    grads.values[place] = value.to(tensors[place].dtype)
    else:
        for leg, left in zip(order.legs, kept, strict=True):
            x_nI, given_nO = x_NI[leg.first : leg.last], given_NO[leg.first : leg.last]
            dx_nI = None if dx_NI is None else dx_NI[leg.first : leg.last]
            _backward_factors(leg, tensors, left, x_nI, given_nO, dx_nI, grads)
    grads.put(order.weight_OI, weight_OI, lambda: given_NO.t() @ x_NI)
    if order.bias_O is not None:
        grads.put(order.bias_O, tensors[order.bias_O], lambda: given_NO.sum(0))
    return dx_NI


def _backward_factors(
    leg: Leg,
    tensors: Tensors,
    kept: SavedForBackward,
    x_nI: Tensor,
    given_nO: Tensor,
    dx_nI: Tensor | None,
    grads: Gradients,
) -> None:
    """Add the contribution of one leg to the gradient `dx_nI` of its rows, and store the gradients of its factors."""
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
    # With beta 0 only the shape of the first argument is used; `alpha` scales the product.
    grads.put(leg.a_rI, a_rI, lambda: torch.addmm(down_rI, given_nr.t(), x_nI, beta=0, alpha=scale))
    grads.put(
        leg.b_Or, b_Or, lambda: torch.addmm(up_Or.t(), kept.low_nr.t(), given_nO, beta=0, alpha=scale).t()
    )


# Grouped products.


class AdapterGroup(NamedTuple):
    """The rows [first, last) of one adapter, with the adapter's factors."""

    first: int
    last: int
    a_rI: Tensor
    b_Or: Tensor
    scale: float
    dropout: float
    keys_n: Tensor | None = None
    """The dropout keys of the rows (see `dropped`)."""


class Factored(NamedTuple):
    """The gradients of one adapter's factors. A gradient that is not wanted is None."""

    a_rI: Tensor | None
    b_Or: Tensor | None


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether grouped products of a type are a single kernel on a device, either torch's kernel or kapelle's in Triton."""
    return torch_has_kernel(device, dtype) or triton_has_kernel(device, dtype)


def torch_has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's grouped product is a single kernel for a type on a device."""
    return (
        hasattr(functional, "grouped_mm")  # since torch 2.10
        and device.type == "cuda"
        and torch.version.cuda is not None
        and dtype == torch.bfloat16
        and kernels.capability(device)[0] in ARCHITECTURES
    )


def triton_has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kapelle's grouped products (`triton_products.py`) replace torch's for a type on a device and pass their test."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and dtype in kernels.BOUNDS
        and not torch_has_kernel(device, dtype)
        and kernels.capability(device) >= LEAST_CAPABILITY
        and kernels.has_triton()
        and kernels.holds("Triton's grouped products", (device, dtype), lambda: _trial(device, dtype))
    )


def _trial(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the grouped products of four groups, one of which is empty, together with separate products."""
    from kapelle.models.fast import triton_products

    ends = (3, 3, 70, 150)
    x_NI = kernels.drawn(150, 72, seed=0, device=device, dtype=dtype)
    w_GIO = kernels.drawn(4, 24, 72, seed=1, device=device, dtype=dtype).transpose(1, 2)
    y_NO = kernels.drawn(150, 24, seed=2, device=device, dtype=dtype)
    ends_G = torch.tensor(ends, dtype=torch.int32, device=device)
    rows = [slice(first, last) for first, last in zip((0, *ends), ends, strict=False)]
    yield (
        triton_products.grouped(x_NI, w_GIO, ends_G),
        torch.cat([x_NI[own] @ w_IO for own, w_IO in zip(rows, w_GIO, strict=True)]),
    )
    yield (
        triton_products.grouped_outer(x_NI, y_NO, ends_G),
        torch.stack([x_NI[own].t() @ y_NO[own] for own in rows]),
    )


def takes_groups(x_NI: Tensor, features_out: int, adapters: int) -> bool:
    """Return whether the updates of this many adapters are grouped: at least `LEAST_ADAPTERS` adapters and an available kernel."""
    if adapters < LEAST_ADAPTERS or not has_kernel(x_NI.device, x_NI.dtype):
        return False
    if triton_has_kernel(x_NI.device, x_NI.dtype):
        return True
    step = ALIGNMENT // x_NI.element_size()
    return x_NI.shape[1] % step == 0 == features_out % step


class _Division(NamedTuple):
    """The division of the rows of a pass among groups."""

    ends_G: Tensor
    """The row after the last row of each group, as int32."""
    each: int
    """The number of rows of every group if all groups have the same number of rows; otherwise 0."""


def _grouped(x_NI: Tensor, weight_GIO: Tensor, division: _Division) -> Tensor:
    """Return the product of each group's rows and the group's own weight, of shape (N, O)."""
    if division.each:
        return torch.bmm(x_NI.unflatten(0, (-1, division.each)), weight_GIO).flatten(0, 1)
    ends_G = division.ends_G
    if triton_has_kernel(x_NI.device, x_NI.dtype):
        from kapelle.models.fast import triton_products

        return triton_products.grouped(x_NI, weight_GIO, ends_G)
    return functional.grouped_mm(_aligned(x_NI), weight_GIO, offs=ends_G)


def _add_grouped(sum_NO: Tensor, x_NI: Tensor, weight_GIO: Tensor, division: _Division) -> None:
    """Add the product of each group's rows and the group's own weight to `sum_NO`."""
    if division.each:
        own = (-1, division.each)
        sum_NO.unflatten(0, own).baddbmm_(x_NI.unflatten(0, own), weight_GIO)
    else:
        sum_NO.add_(_grouped(x_NI, weight_GIO, division))


def _grouped_outer(left_NI: Tensor, right_NO: Tensor, division: _Division) -> Tensor:
    """Return the sum of the outer products of each group, of shape (G, I, O)."""
    if division.each:
        own = (-1, division.each)
        return torch.bmm(left_NI.unflatten(0, own).transpose(1, 2), right_NO.unflatten(0, own))
    ends_G = division.ends_G
    if triton_has_kernel(left_NI.device, left_NI.dtype):
        from kapelle.models.fast import triton_products

        return triton_products.grouped_outer(left_NI, right_NO, ends_G)
    return functional.grouped_mm(_aligned(left_NI).t(), _aligned(right_NO), offs=ends_G)


def add_updates(
    groups: Sequence[AdapterGroup], x_NI: Tensor, out_NO: Tensor, stacks: StoredStacks | None = None
) -> tuple[Tensor, Tensor | None]:
    """Add the update of every group to `out_NO`, and return A·x of shape (N, r) and the dropout mask (None without dropout)."""
    stack, division = (stacks or StoredStacks()).of(groups, x_NI)
    mask_NI = None
    if any(group.dropout for group in groups):
        x_NI, mask_NI = x_NI.clone(), torch.ones_like(x_NI, dtype=torch.bool)
        for group in groups:  # masks are drawn in the groups' order
            if group.dropout:
                rows = slice(group.first, group.last)
                x_NI[rows], mask_NI[rows] = dropped(x_NI[rows], group.dropout, group.keys_n)
    low_Nr = _grouped(x_NI, stack.down_GrI.transpose(1, 2), division)
    _add_grouped(out_NO, low_Nr, stack.up_GOr.transpose(1, 2), division)
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
    stacks: StoredStacks | None = None,
) -> list[Factored]:
    """Add the contribution of the updates to `dx_NI`, and return the gradients of each group's factors if `factors` is True."""
    stack, division = (stacks or StoredStacks()).of(groups, x_NI)
    given_Nr = _grouped(given_NO, stack.up_GOr, division)
    if dx_NI is not None and mask_NI is None:
        _add_grouped(dx_NI, given_Nr, stack.down_GrI, division)
    elif dx_NI is not None and mask_NI is not None:
        dx_NI.add_(_through(groups, _grouped(given_Nr, stack.down_GrI, division), mask_NI))
    if not factors:
        return [Factored(None, None) for _ in groups]
    if mask_NI is not None:
        x_NI = _through(groups, x_NI, mask_NI)
    da_GrI = _grouped_outer(given_Nr, x_NI, division).to(groups[0].a_rI.dtype)
    db_GOr = _grouped_outer(given_NO, low_Nr, division).to(groups[0].b_Or.dtype)
    ranks = [len(group.a_rI) for group in groups]
    db = _scaled(groups, [db_GOr[place, :, :rank] for place, rank in zip(stack.places, ranks, strict=True)])
    return [
        Factored(da_GrI[place, :rank], db_Or)
        for place, rank, db_Or in zip(stack.places, ranks, db, strict=True)
    ]


class _Stack(NamedTuple):
    """The factors of all groups in one type. The factors B are multiplied by the scale."""

    down_GrI: Tensor
    up_GOr: Tensor
    places: tuple[int, ...]
    """The index of each given group in the stack, which also has groups of zeros for rows without an adapter."""
    sources: tuple[Tensor, ...]
    """The original factors. Keeping references to them ensures that their memory addresses stay unique."""


class StoredStacks:
    """The stacked factors of one layer, cached until a factor changes.

    All microbatches of an optimiser step, and all decoding steps between two updates, read one stack.
    """

    steps = 0
    """The number of optimiser steps in this process. A fused optimiser changes weights without increasing their
    version."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[list[int], _Stack]] = {}
        """The stacks by their adapters in order, with the versions of the factors. The most recently used stack is
        last."""
        self._steps = 0
        """The value of `steps` when the stacks were created."""
        self._recorded: deque[_Stack] = deque(maxlen=STACKS)
        """The stacks that CUDA graphs read without keeping references to them."""

    def of(self, groups: Sequence[AdapterGroup], x_NI: Tensor) -> tuple[_Stack, _Division]:
        """Return the stack in the type of `x_NI`, and the division of rows among the groups of the stack."""
        order: list[int | None] = []  # of given groups; None is a group of zeros
        ends = [0]
        for number, group in enumerate(groups):
            if group.first > ends[-1]:
                order.append(None)
                ends.append(group.first)
            order.append(number)
            ends.append(group.last)
        if len(x_NI) > ends[-1]:
            order.append(None)
            ends.append(len(x_NI))
        each = ends[1] if ends == list(range(0, ends[-1] + 1, ends[1])) else 0
        return self._stack(groups, order, x_NI.dtype), _Division(_ends(tuple(ends[1:]), x_NI.device), each)

    def _stack(
        self, groups: Sequence[AdapterGroup], order: Sequence[int | None], dtype: torch.dtype
    ) -> _Stack:
        factors = [tensor for group in groups for tensor in (group.a_rI, group.b_Or)]
        if any(tensor.is_inference() for tensor in factors):  # inference tensors have no version
            return stacked(groups, order, dtype)
        if self._steps != StoredStacks.steps:
            self._kept.clear()
            self._steps = StoredStacks.steps
        readers = (dtype, *order, *(t.data_ptr() for t in factors), *(group.scale for group in groups))
        versions = [tensor._version for tensor in factors]  # noqa: SLF001 — it has no public name
        made_of, stack = self._kept.pop(readers, ([], None))
        if stack is None or made_of != versions:
            stack = stacked(groups, order, dtype)
            while len(self._kept) >= STACKS:
                del self._kept[next(iter(self._kept))]
        self._kept[readers] = versions, stack
        if stack.down_GrI.is_cuda and torch.cuda.is_current_stream_capturing():
            self._recorded.append(stack)
        return stack


def _count_step(*_: object) -> None:
    StoredStacks.steps += 1


register_optimizer_step_post_hook(_count_step)


def stacked(groups: Sequence[AdapterGroup], order: Sequence[int | None], dtype: torch.dtype) -> _Stack:
    """Return the factors of the adapters, padded to one rank and joined, for groups in this order."""
    # Training also uses the stacks of sampling.
    with torch.inference_mode(mode=False), torch.no_grad():
        step = ALIGNMENT // dtype.itemsize
        rank = -(-max(len(group.a_rI) for group in groups) // step) * step
        scaled = _scaled(groups, [group.b_Or for group in groups])
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        for number in order:
            if number is None:
                downs.append(groups[0].a_rI.new_zeros(rank, groups[0].a_rI.shape[1]))
                ups.append(groups[0].b_Or.new_zeros(len(groups[0].b_Or), rank))
            else:
                a_rI, b_Or = groups[number].a_rI, scaled[number]
                more = rank - len(a_rI)
                downs.append(pad(a_rI, (0, 0, 0, more)) if more else a_rI)
                ups.append(pad(b_Or, (0, more)) if more else b_Or)
        return _Stack(
            torch.stack(downs).to(dtype),
            torch.stack(ups).to(dtype),
            tuple(place for place, number in enumerate(order) if number is not None),
            tuple(tensor.detach() for group in groups for tensor in (group.a_rI, group.b_Or)),
        )


def _scaled(groups: Sequence[AdapterGroup], tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the tensor of each group times the group's scale, computed in one kernel."""
    return torch._foreach_mul(tensors, [group.scale for group in groups])  # noqa: SLF001 — it has no public name


@lru_cache(maxsize=64)
def _ends(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the row after the last row of each group as a tensor.

    The tensor is cached, because copying it for every layer would synchronise with the GPU.
    """
    with torch.inference_mode(mode=False):  # training also uses the tensors of sampling
        return torch.tensor(ends, dtype=torch.int32, device=device)


def _aligned(x_NI: Tensor) -> Tensor:
    """Return rows with the alignment that the kernel needs."""
    step = ALIGNMENT // x_NI.element_size()
    fits = x_NI.stride(1) == 1 and x_NI.stride(0) % step == 0 == x_NI.storage_offset() % step
    return x_NI if fits else x_NI.clone(memory_format=torch.contiguous_format)


def _through(groups: Sequence[AdapterGroup], x_NI: Tensor, mask_NI: Tensor) -> Tensor:
    """Apply dropout with the mask `mask_NI` to rows."""
    out_NI = x_NI * mask_NI
    for group in groups:
        if group.dropout:
            out_NI[group.first : group.last] /= 1 - group.dropout
    return out_NI


# Dropout by keys.


def salt_of(path: str) -> int:
    """Return the salt of a layer as an int32, computed from the layer's path in the model."""
    return crc32(path.encode()) - (1 << 31)


def dropped(x_nI: Tensor, share: float, keys_n: Tensor | None) -> tuple[Tensor, Tensor]:
    """Drop about a fraction `share` of each row's features and scale up the others. Returns the rows and the mask of kept features."""
    if keys_n is None:
        return torch.native_dropout(x_nI, share, train=True)
    mask_nI = passed_features(keys_n, x_nI.shape[1], share)
    return x_nI * mask_nI / (1 - share), mask_nI


def passed_features(keys_n: Tensor, features: int, share: float) -> Tensor:
    """Return the mask of kept features for rows with these int32 keys. About a fraction `share` of the features is dropped."""
    hash_nI = keys_n[:, None] ^ _columns(features, keys_n.device)
    _finalise(hash_nI)
    # The hash is signed: −2³¹ … 2³¹ − 1.
    return hash_nI >= int(share * (1 << 32)) - (1 << 31)


@lru_cache(maxsize=64)
def _columns(features: int, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        column_I = torch.arange(features, dtype=torch.int32, device=device).mul_(-0x61C88647)
        _finalise(column_I)
        return column_I


def _finalise(hashes: Tensor) -> None:
    """Mix the bits of int32 numbers in place."""
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB), (16, 1)):
        # Torch's shift is arithmetic; the finaliser's is logical.
        hashes.bitwise_xor_((hashes >> shift).bitwise_and_((1 << (32 - shift)) - 1))
        hashes.mul_(factor)
