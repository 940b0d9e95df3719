"""Linear layers with different adapters for different rows, with hand-written forward and backward passes.

A *work order* (`Linear`) lists the tensors of a layer and the rows of each adapter. The functions `forward_linear` and
`backward_linear` execute a work order on plain tensors, inside the autograd functions of flat.py and lora_bank.py.
Writing both passes by hand saves what autograd would add: splitting and joining activations, and one sum per branch of
a gradient.

Adapters are LoRA as in arXiv:2106.09685, y = Wx + (alpha / rank) · B·A·x. Rows use only the tensors of their own
adapter, so no gradient flows from one adapter to another.

The updates of adapters are computed as grouped products if there is a kernel for them (triton_products.py). Otherwise,
each adapter has separate products, and launching them leaves a GPU mostly idle. A grouped product computes all groups of
rows in one kernel, in the forward pass, in the backward pass and for the gradient of each group's weight. Layers that
read the same rows share these kernels, if the same rows have adapters in them. The factors are stacked, and smaller
ranks are padded with zeros, which changes no result. Rows without an adapter form a group with zero factors, because
rows outside all groups are not computed.

The mask of dropout (arXiv:1207.0580) is a function of each token and independent of the pass. A random generator draws
masks in the order of a pass, so a different split into microbatches or processes would give different masks. In this
module, a row has a key, a layer has a salt, and their hash (the finaliser of MurmurHash3) decides whether a feature is
kept. An optimiser step is therefore the same for any split of its samples. Without keys, torch's generator draws the
masks.

On a CPU in float32, torch multiplies with its BLAS, which reaches 60 to 90 % of oneDNN's speed for the thousands of
rows of an update. oneDNN is used for any number of rows, because the results of two libraries would differ by rounding.
In half precision, torch already uses oneDNN.

In tensor shapes, N is the number of rows, n of rows of one leg or group, I of input features, O of output features, S
of layers and G of groups; r is the rank (for a stack, the largest rank times S, or the largest rank).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from kapelle.models.fast import kernels

LEAST_CAPABILITY = (8, 0)
"""The compute capability from which kapelle's grouped products use tensor cores in both half-precision types."""

STACKS = 2
"""The number of stacks of factors that a layer caches. Different adapters, or a different order of adapters, need
another stack."""

ALIGNMENT = 16
"""The alignment in bytes of the rows of stacks, which kernels read faster."""


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


def forward_linears(
    orders: Sequence[Linear], tensors: Tensors, x_NI: Tensor, multiply: Product = product
) -> tuple[list[Tensor], list[SavedForBackward]]:
    """Return the outputs of layers that read the same rows, of shapes (N, O), and the tensors that the backward pass needs.

    The outputs have the type of `x_NI`.
    """
    outs = [multiply(x_NI, tensors[order.weight_OI].to(x_NI.dtype), None) for order in orders]
    kept = []
    for members, grouped in _together(orders, x_NI):
        own = [orders[k] for k in members]
        if grouped:
            layers = [_groups(order, tensors) for order in own]
            made = add_updates(layers, x_NI, [outs[k] for k in members], own[0].stacks)
            kept.append(SavedForBackward(*made))
            continue
        for leg in own[0].legs:
            x_nI, mask_nI = x_NI[leg.first : leg.last], None
            a_rI, b_Or = tensors[leg.a_rI].to(x_NI.dtype), tensors[leg.b_Or].to(x_NI.dtype)
            if leg.dropout:
                x_nI, mask_nI = dropped(x_nI, leg.dropout, leg.keys_n)
            low_nr = x_nI @ a_rI.t()
            outs[members[0]][leg.first : leg.last].addmm_(low_nr, b_Or.t(), alpha=leg.scale)
            kept.append(SavedForBackward(low_nr, mask_nI))
    for order, out_NO in zip(orders, outs, strict=True):
        if order.bias_O is not None:
            out_NO.add_(tensors[order.bias_O])
    return outs, kept


def _together(orders: Sequence[Linear], x_NI: Tensor) -> list[tuple[list[int], bool]]:
    """Return sets of layers whose updates are computed together, and whether they are grouped. Other sets have one layer."""
    sets: dict[Hashable, list[int]] = {}
    for number, order in enumerate(orders):
        key: Hashable = number
        if order.legs and order.grouped and has_kernel(x_NI.device, x_NI.dtype):
            key = tuple((leg.first, leg.last) for leg in order.legs)
            if any(leg.dropout for leg in order.legs):  # each layer has its own masks
                key = (number, key)
        sets.setdefault(key, []).append(number)
    return [(members, not isinstance(key, int)) for key, members in sets.items()]


def _groups(order: Linear, tensors: Tensors) -> list[AdapterGroup]:
    return [
        AdapterGroup(
            leg.first, leg.last, tensors[leg.a_rI], tensors[leg.b_Or], leg.scale, leg.dropout, leg.keys_n
        )
        for leg in order.legs
    ]


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
    """Return the gradient of `x_NI`, or None if it is not `wanted`, and store the other gradients in `grads`.

    The gradients of the outputs are given in the order of the layers.
    """
    dx_NI: Tensor | None = None
    left = iter(kept)
    for members, grouped in _together(orders, x_NI):
        own = [orders[k] for k in members]
        for order, number in zip(own if wanted else (), members, strict=False):
            dx_NI = multiply(given[number], tensors[order.weight_OI].to(x_NI.dtype).t(), dx_NI)
        if grouped:
            places = [place for order in own for leg in order.legs for place in (leg.a_rI, leg.b_Or)]
            learns = any(grads.wanted[place] for place in places)
            saved = next(left)
            if dx_NI is not None or learns:
                layers = [_groups(order, tensors) for order in own]
                made = backward_updates(
                    layers, *saved, x_NI, [given[k] for k in members], dx_NI,
                    factors=learns, stacks=own[0].stacks,
                )  # fmt: skip
                for place, value in zip(places, made, strict=False):
                    if grads.wanted[place]:
                        grads.values[place] = value.to(tensors[place].dtype)
            continue
        for leg in own[0].legs:
            rows = slice(leg.first, leg.last)
            dx_nI = None if dx_NI is None else dx_NI[rows]
            _backward_factors(leg, tensors, next(left), x_NI[rows], given[members[0]][rows], dx_nI, grads)
    for order, given_NO in zip(orders, given, strict=True):
        grads.put(order.weight_OI, tensors[order.weight_OI], partial(torch.mm, given_NO.t(), x_NI))
        if order.bias_O is not None:
            grads.put(order.bias_O, tensors[order.bias_O], partial(torch.sum, given_NO, 0))
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


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether grouped products of a type are single kernels on a device that pass their test."""
    return (
        kernels.runs_operations(device, dtype)
        and kernels.capability(device) >= LEAST_CAPABILITY
        and kernels.holds("Triton's grouped products", (device, dtype), lambda: trial(device, dtype))
    )


def trial(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[int] = (150, 5000)
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the grouped products of three layers and four groups, one of which is empty, as kernels and plain.

    The sizes are numbers of rows.
    """
    drawn = partial(kernels.drawn, device=device, dtype=dtype)
    for rows in sizes:
        ends_G = torch.tensor((3, 3, 70, rows), dtype=torch.int32, device=device)
        scale_G = torch.tensor((0.5, 1.0, 2.0, 3.0), device=device)
        layers = [drawn(rows, width, seed=width) for width in (72, 24, 40)]
        weight_GKM, low_NK = drawn(4, 136, 8, seed=1), drawn(rows, 24, seed=2)
        for xs, weight in ((layers, weight_GKM), (layers[:1], weight_GKM[:, :72])):
            narrow_NK = low_NK[:, : 8 * len(xs)]
            given = xs, narrow_NK, ends_G, torch.float32
            yield GROUPED_OUTER(*given), _plain_grouped_outer(*given)
            yield GROUPED(xs, weight, scale_G, ends_G), _plain_grouped(xs, weight, scale_G, ends_G)
            outs = [[x_NI.clone() for x_NI in xs] for _ in range(2)]
            for add, own in zip((ADD_GROUPED, _plain_add_grouped), outs, strict=True):
                add(own, narrow_NK, weight.transpose(1, 2), ends_G)
            yield from zip(*outs, strict=True)


def _rows_of(ends_G: Tensor) -> list[slice]:
    ends = ends_G.tolist()
    return [slice(first, last) for first, last in zip((0, *ends), ends, strict=False)]


def _plain_grouped(
    xs: Sequence[Tensor], weight_GKM: Tensor, scale_G: Tensor | None, ends_G: Tensor
) -> Tensor:
    out_NM = xs[0].new_empty(len(xs[0]), len(xs) * weight_GKM.shape[2])
    weights = weight_GKM.split([x_NK.shape[1] for x_NK in xs], 1)
    for group, rows in enumerate(_rows_of(ends_G)):
        for x_NK, own_GKM, own_NM in zip(xs, weights, out_NM.chunk(len(xs), 1), strict=True):
            own_NM[rows] = x_NK[rows] @ own_GKM[group]
        if scale_G is not None:
            out_NM[rows] *= scale_G[group]
    return out_NM


def _plain_add_grouped(outs: Sequence[Tensor], x_NK: Tensor, weight_GKM: Tensor, ends_G: Tensor) -> None:
    weights = weight_GKM.split([out_NM.shape[1] for out_NM in outs], 2)
    for group, rows in enumerate(_rows_of(ends_G)):
        for out_NM, own_NK, own_GKM in zip(outs, x_NK.chunk(len(outs), 1), weights, strict=True):
            out_NM[rows].addmm_(own_NK[rows], own_GKM[group])


def _plain_grouped_outer(
    lefts: Sequence[Tensor], right_NQ: Tensor, ends_G: Tensor, dtype: torch.dtype
) -> Tensor:
    rights = right_NQ.chunk(len(lefts), 1)
    return torch.stack(
        [
            torch.cat([left[rows].t() @ right[rows] for left, right in zip(lefts, rights, strict=True)])
            for rows in _rows_of(ends_G)
        ]
    ).to(dtype)


# The arguments are those of the functions of triton_products.py.
_operation = partial(kernels.operation, module="kapelle.models.fast.triton_products")
GROUPED = _operation(
    "grouped(Tensor[] xs, Tensor weight, Tensor? scale, Tensor ends) -> Tensor", _plain_grouped
)
ADD_GROUPED = _operation(
    "add_grouped(Tensor(a!)[] outs, Tensor x, Tensor weight, Tensor ends) -> ()", _plain_add_grouped
)
GROUPED_OUTER = _operation(
    "grouped_outer(Tensor[] lefts, Tensor right, Tensor ends, ScalarType dtype) -> Tensor",
    _plain_grouped_outer,
)


Layers = Sequence[Sequence[AdapterGroup]]
"""The groups of rows of each layer. All layers have the same groups of rows."""


def add_updates(
    layers: Layers, x_NI: Tensor, outs: Sequence[Tensor], stacks: StoredStacks | None = None
) -> tuple[Tensor, Tensor | None]:
    """Add the update of every group to the output of every layer.

    Return the scaled A·x of all layers, of shape (N, r), and the dropout mask (None without dropout).
    """
    stack, ends_G = (stacks or StoredStacks()).of(layers, x_NI)
    mask_NI, groups = None, layers[0]
    if any(group.dropout for group in groups):
        x_NI, mask_NI = x_NI.clone(), torch.ones_like(x_NI, dtype=torch.bool)
        for group in groups:  # masks are drawn in the groups' order
            if group.dropout:
                rows = slice(group.first, group.last)
                x_NI[rows], mask_NI[rows] = dropped(x_NI[rows], group.dropout, group.keys_n)
    low_Nr: Tensor = GROUPED([x_NI], stack.down_GrI.transpose(1, 2), stack.scale_G, ends_G)
    ADD_GROUPED(outs, low_Nr, stack.up_GOr.transpose(1, 2), ends_G)
    return low_Nr, mask_NI


def backward_updates(
    layers: Layers,
    low_Nr: Tensor,
    mask_NI: Tensor | None,
    x_NI: Tensor,
    given: Sequence[Tensor],
    dx_NI: Tensor | None,
    *,
    factors: bool,
    stacks: StoredStacks | None = None,
) -> list[Tensor]:
    """Add the contribution of the updates to `dx_NI`, and return the gradients of factors if `factors` is True.

    The gradients are those of A and B of each group of each layer.
    """
    stack, ends_G = (stacks or StoredStacks()).of(layers, x_NI)
    given_Nr = GROUPED(given, stack.up_GOr, stack.scale_G, ends_G)
    if dx_NI is not None and mask_NI is None:
        ADD_GROUPED([dx_NI], given_Nr, stack.down_GrI, ends_G)
    elif dx_NI is not None and mask_NI is not None:
        dx_NI.add_(_through(layers[0], GROUPED([given_Nr], stack.down_GrI, None, ends_G), mask_NI))
    if not factors:
        return []
    if mask_NI is not None:
        x_NI = _through(layers[0], x_NI, mask_NI)
    kind = layers[0][0].a_rI.dtype
    da_GrI = GROUPED_OUTER([given_Nr], x_NI, ends_G, kind)
    db_GOr = GROUPED_OUTER(given, low_Nr, ends_G, kind)
    return _parts(layers, stack.places, da_GrI, db_GOr)


def _parts(layers: Layers, places: Sequence[int], down_GrI: Tensor, up_GOr: Tensor) -> list[Tensor]:
    """Return views of the factors A and B of each group of each layer in a stack, given the groups' places in it."""
    rank, first = up_GOr.shape[2], 0
    parts = []
    for number, groups in enumerate(layers):
        last = first + len(groups[0].b_Or)
        for place, group in zip(places, groups, strict=True):
            own = len(group.a_rI)
            parts.append(down_GrI[place, number * rank : number * rank + own])
            parts.append(up_GOr[place, first:last, :own])
        first = last
    return parts


class _Stack(NamedTuple):
    """The factors of all groups of layers in one type."""

    down_GrI: Tensor
    """The factors A. The factors of layers follow each other."""
    up_GOr: Tensor
    """The factors B. The outputs of layers follow each other."""
    scale_G: Tensor
    """The scale of each group as float32."""
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

    def of(self, layers: Layers, x_NI: Tensor) -> tuple[_Stack, Tensor]:
        """Return the stack in the type of `x_NI`, and the row after the last row of each of its groups."""
        order: list[int | None] = []  # of given groups; None is a group of zeros
        ends = [0]
        for number, group in enumerate(layers[0]):
            if group.first > ends[-1]:
                order.append(None)
                ends.append(group.first)
            order.append(number)
            ends.append(group.last)
        if len(x_NI) > ends[-1]:
            order.append(None)
            ends.append(len(x_NI))
        ends_G = _on_device(tuple(ends[1:]), torch.int32, x_NI.device)
        return self._stack(layers, order, x_NI.dtype), ends_G

    def _stack(self, layers: Layers, order: Sequence[int | None], dtype: torch.dtype) -> _Stack:
        factors = [tensor for groups in layers for group in groups for tensor in (group.a_rI, group.b_Or)]
        if any(tensor.is_inference() for tensor in factors):  # inference tensors have no version
            return stacked(layers, order, dtype)
        if self._steps != StoredStacks.steps:
            self._kept.clear()
            self._steps = StoredStacks.steps
        readers = (
            dtype,
            *order,
            *(t.data_ptr() for t in factors),
            *(group.scale for group in layers[0]),
        )
        versions = [tensor._version for tensor in factors]  # noqa: SLF001 — it has no public name
        made_of, stack = self._kept.pop(readers, ([], None))
        if stack is None or made_of != versions:
            stack = stacked(layers, order, dtype)
            while len(self._kept) >= STACKS:
                del self._kept[next(iter(self._kept))]
        self._kept[readers] = versions, stack
        if stack.down_GrI.is_cuda and torch.cuda.is_current_stream_capturing():
            self._recorded.append(stack)
        return stack


def _count_step(*_: object) -> None:
    StoredStacks.steps += 1


register_optimizer_step_post_hook(_count_step)


def stacked(layers: Layers, order: Sequence[int | None], dtype: torch.dtype) -> _Stack:
    """Return the factors of the adapters, padded to one rank and joined, for groups in this order."""
    first = layers[0][0].a_rI
    # Training also uses the stacks of sampling.
    with torch.inference_mode(mode=False), torch.no_grad():
        step = ALIGNMENT // dtype.itemsize
        ranks = {len(group.a_rI) for groups in layers for group in groups}
        rank = -(-max(ranks) // step) * step
        new = first.new_empty if ranks == {rank} and None not in order else first.new_zeros
        down_GrI = new(len(order), len(layers) * rank, first.shape[1], dtype=dtype)
        up_GOr = new(len(order), sum(len(groups[0].b_Or) for groups in layers), rank, dtype=dtype)
        places = tuple(place for place, number in enumerate(order) if number is not None)
        sources = tuple(
            tensor.detach() for groups in layers for group in groups for tensor in (group.a_rI, group.b_Or)
        )
        torch._foreach_copy_(_parts(layers, places, down_GrI, up_GOr), sources)
        scales = tuple(0.0 if number is None else layers[0][number].scale for number in order)
        return _Stack(down_GrI, up_GOr, _on_device(scales, torch.float32, first.device), places, sources)


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor, which is cached, because copying it for every layer would synchronise with the GPU."""
    with torch.inference_mode(mode=False):  # training also uses the tensors of sampling
        return torch.tensor(numbers, dtype=dtype, device=device)


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
