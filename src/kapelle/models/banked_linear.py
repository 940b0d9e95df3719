"""A linear layer of the base with the low-rank factors of every adapter that targets it.

Before a pass the bank (lora_bank.py) sends contiguous rows of the batch to adapters. A layer computes the base's product for
all rows and adds to each row the update of its own adapter alone.

Adapters are LoRA as in 2106.09685, y = Wx + (alpha / rank) · B·A·x, stored as PEFT stores them.

Shapes: R rows, L positions, I and O features in and out, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kapelle.errors import ModelError
from kapelle.models.fast.keyed_dropout import dropped
from kapelle.models.fast.products import plain_product
from kapelle.models.fast.routed import (
    Gradients,
    Leg,
    Linear,
    backward_linear,
    flat,
    forward_linear,
    unflat,
)
from kapelle.team import Lora

if TYPE_CHECKING:
    from transformers.pytorch_utils import Conv1D

    from kapelle.models.lora_bank import LoraBank

    Plain = nn.Linear | Conv1D
    """What multiplies by a weight and adds a bias."""


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by a weight and adds a bias; routers do more, whatever class they extend."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D) and not type(module).__name__.endswith("Router")


def weight_of(layer: Plain) -> Tensor:
    """Return the weight `_OI` of a linear layer; GPT-2's `Conv1D` keeps it the other way round."""
    return layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()


def features_of(layer: Plain) -> tuple[int, int]:
    """Return the features in and out of a linear layer."""
    if isinstance(layer, nn.Linear):  # a quantised one packs its weight into another shape
        return layer.in_features, layer.out_features
    features_out, features_in = weight_of(layer).shape
    return features_in, features_out


def is_quantised(layer: nn.Module) -> bool:
    """Return whether a layer keeps its weight as codes that only its own forward pass can read."""
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and not weight.is_floating_point()


def slot_of(name: str) -> str:
    """Return a module name that collides with no attribute, whatever an agent is called."""
    return f"<{name}>"


class Factors(nn.Module):
    """One adapter's pair of factors at one layer."""

    def __init__(
        self, features_in: int, features_out: int, lora: Lora, device: torch.device, salt: int = 0
    ) -> None:
        super().__init__()
        self.salt = salt
        """Of this layer's dropout (`keyed_dropout.py`)."""
        self.a_rI = nn.Parameter(torch.empty(lora.rank, features_in, device=device))
        self.b_Or = nn.Parameter(torch.zeros(features_out, lora.rank, device=device))
        self.scale = lora.alpha / lora.rank
        self.dropout = lora.dropout


class BankedLinear(nn.Module):
    """A linear layer of the base, with the factors of every adapter that targets it."""

    def __init__(self, base: Plain, bank: LoraBank) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict()
        self._bank = (bank,)  # in a tuple, so that the bank is not registered as a submodule

    def merged(self, adapter: str | None) -> Tensor:
        """Return the weight `_OI` that computes base and adapter in one product; without dropout."""
        factors = self.factors_of(adapter) if adapter else None
        if factors is None:
            return weight_of(self.base)
        weight_OI = weight_of(self.base).to(factors.b_Or.dtype)
        return torch.addmm(weight_OI, factors.b_Or, factors.a_rI, alpha=factors.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return the base's output plus, row by row, that of the row's own adapter."""
        if all(slot not in self.adapters for slot, _, _ in self._bank[0].route):
            y: Tensor = self.base(x)
            return y
        return self._beside(x) if is_quantised(self.base) else linear(self, x)

    def _beside(self, x: Tensor) -> Tensor:
        """Return the output of a base that computes itself, plus each row's update; by autograd."""
        y: Tensor = self.base(x)
        dtype = computes_in(x)
        x_NI, y_NO = x.to(dtype).reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]).clone()
        each = self.tokens_of_a_row(len(x_NI))
        for factors, first, last in self.factors():
            rows = slice(first * each, last * each)
            kept_nI = x_NI[rows]
            if factors.dropout and factors.training:
                kept_nI, _ = dropped(kept_nI, factors.dropout, self.keys_of(factors, rows))
            low_nr = kept_nI @ factors.a_rI.to(dtype).t()
            y_NO[rows] += (low_nr @ factors.b_Or.to(dtype).t() * factors.scale).to(y_NO.dtype)
        return y_NO.view(y.shape)

    def keys_of(self, factors: Factors, rows: slice) -> Tensor | None:
        """Return the keys `_n` of dropout at these rows of the flattened input; None where torch's generator draws."""
        keys_N = self._bank[0].keys_N
        return None if keys_N is None else keys_N[rows] ^ factors.salt

    def factors_of(self, adapter: str) -> Factors | None:
        """Return an adapter's factors here, None if it does not target this layer."""
        if slot_of(adapter) not in self.adapters:
            return None
        factors = self.adapters[slot_of(adapter)]
        assert isinstance(factors, Factors)
        return factors

    def tokens_of_a_row(self, tokens: int) -> int:
        """Return how many tokens of an input each routed row has; the input may be rows × positions, or flattened.

        Raises ModelError if the input is not the whole batch: its tokens could be anybody's.
        """
        rows = self._bank[0].rows
        if rows and tokens % rows:
            raise ModelError(
                f"A layer with adapters got {tokens} tokens of a batch of {rows} rows: some part of the model gathers tokens "
                "before it, so that their adapters are not known. Name other layers in `lora.targets`."
            )
        return tokens // max(rows, 1)

    def factors(self) -> Iterator[tuple[Factors, int, int]]:
        """Yield the factors that the running pass uses here, with their rows [first, last)."""
        for slot, first, last in self._bank[0].route:
            if slot in self.adapters:
                factors = self.adapters[slot]
                assert isinstance(factors, Factors)
                yield factors, first, last


def order_of(layer: Plain | BankedLinear, size: torch.Size, tensors: list[Tensor]) -> Linear:
    """Return the work order of a layer for inputs of a size; append the tensors that it reads to `tensors`."""
    base = layer.base if isinstance(layer, BankedLinear) else layer
    weight, bias = len(tensors), None
    tensors.append(weight_of(base))
    if base.bias is not None:
        bias = len(tensors)
        tensors.append(base.bias)
    legs = []
    per_row = layer.tokens_of_a_row(size[:-1].numel()) if isinstance(layer, BankedLinear) else 1
    for factors, first, last in layer.factors() if isinstance(layer, BankedLinear) else ():
        place = len(tensors)
        tensors += (factors.a_rI, factors.b_Or)
        dropout = factors.dropout if factors.training else 0.0
        rows = slice(first * per_row, last * per_row)
        keys_n = layer.keys_of(factors, rows) if dropout and isinstance(layer, BankedLinear) else None
        legs.append(Leg(rows.start, rows.stop, place, place + 1, factors.scale, dropout, keys_n))
    return Linear(weight, bias, tuple(legs))


def computes_in(x: Tensor) -> torch.dtype:
    """Return the type in which a linear layer computes now, for this input."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def linear(layer: Plain | BankedLinear, x: Tensor) -> Tensor:
    """Return a layer's output for an input whose first axis is routed."""
    tensors: list[Tensor] = []
    dtype = computes_in(x)
    order = order_of(layer, x.shape, tensors)
    y: Tensor = _Routed.apply(order, x.to(dtype).reshape(-1, x.shape[-1]), *tensors)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


class _Routed(torch.autograd.Function):
    """One layer with its adapters."""

    @staticmethod
    def forward(ctx: Any, order: Linear, x_NI: Tensor, *tensors: Tensor) -> Tensor:
        out_NO, kept = forward_linear(order, tensors, x_NI, plain_product)
        ctx.save_for_backward(x_NI, *tensors, *flat(kept))
        ctx.order = order
        return out_NO

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x_NI, tensors, order = saved[0], saved[1 : len(ctx.needs_input_grad) - 1], ctx.order
        grads = Gradients(ctx.needs_input_grad[2:])
        kept = unflat(saved[1 + len(tensors) :])
        dx_NI = backward_linear(
            order,
            tensors,
            kept,
            x_NI,
            given[0],
            grads,
            wanted=ctx.needs_input_grad[1],
            multiply=plain_product,
        )
        return (None, dx_NI, *grads.values)
