"""Many LoRA adapters on one base model, all in one forward and one backward pass.

Every adapted linear layer of the base becomes a `BankedLinear` that holds the low-rank factors of all
adapters. Before a forward pass the bank gets its *route*: which contiguous rows of the batch belong to
which adapter. Rows use only their own factors, so that no gradient crosses from one adapter to another:
the parameters of one are not part of the other's graph.

Adapters are LoRA as in 2106.09685, y = Wx + (alpha / rank) · B·A·x, stored as PEFT stores them.

Shapes: R rows, L positions, I and O features in and out, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kapelle.errors import ModelError, did_you_mean
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

Route = Sequence[tuple[str | None, int, int]]
"""(adapter or None for the bare base, first row, row after the last), ascending, without gaps."""


def _slot(name: str) -> str:
    """Return a module name that collides with no attribute, whatever an agent is called."""
    return f"<{name}>"


class Factors(nn.Module):
    """One adapter's pair of factors at one layer."""

    def __init__(self, features_in: int, features_out: int, lora: Lora, device: torch.device) -> None:
        super().__init__()
        self.a_rI = nn.Parameter(torch.empty(lora.rank, features_in, device=device))
        self.b_Or = nn.Parameter(torch.zeros(features_out, lora.rank, device=device))
        self.scale = lora.alpha / lora.rank
        self.dropout = lora.dropout


class BankedLinear(nn.Module):
    """A linear layer of the base, with the factors of every adapter that targets it."""

    def __init__(self, base: nn.Linear, bank: LoraBank) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict()
        self._bank = (bank,)  # in a tuple, so that the bank is not registered as a submodule

    def merged(self, adapter: str | None) -> Tensor:
        """Return the weight `_OI` that computes base and adapter in one product; without dropout."""
        factors = self.factors_of(adapter) if adapter else None
        if factors is None:
            return self.base.weight
        weight_OI = self.base.weight.to(factors.b_Or.dtype)
        return torch.addmm(weight_OI, factors.b_Or, factors.a_rI, alpha=factors.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return the base's output plus, row by row, that of the row's own adapter."""
        if all(slot not in self.adapters for slot, _, _ in self._bank[0].route):
            y: Tensor = self.base(x)
            return y
        return linear(self, x)

    def factors_of(self, adapter: str) -> Factors | None:
        """Return an adapter's factors here, None if it does not target this layer."""
        if _slot(adapter) not in self.adapters:
            return None
        factors = self.adapters[_slot(adapter)]
        assert isinstance(factors, Factors)
        return factors

    def factors(self) -> Iterator[tuple[Factors, int, int]]:
        """Yield the factors that the running pass uses here, with their rows [first, last)."""
        for slot, first, last in self._bank[0].route:
            if slot in self.adapters:
                factors = self.adapters[slot]
                assert isinstance(factors, Factors)
                yield factors, first, last


def order_of(layer: nn.Linear | BankedLinear, size: torch.Size, tensors: list[Tensor]) -> Linear:
    """Return the work order of a layer for inputs of a size; append the tensors that it reads to `tensors`."""
    base = layer.base if isinstance(layer, BankedLinear) else layer
    per_row = size[:-1].numel() // max(size[0], 1)
    weight, bias = len(tensors), None
    tensors.append(base.weight)
    if base.bias is not None:
        bias = len(tensors)
        tensors.append(base.bias)
    legs = []
    for factors, first, last in layer.factors() if isinstance(layer, BankedLinear) else ():
        place = len(tensors)
        tensors += (factors.a_rI, factors.b_Or)
        dropout = factors.dropout if factors.training else 0.0
        legs.append(Leg(first * per_row, last * per_row, place, place + 1, factors.scale, dropout))
    return Linear(weight, bias, tuple(legs))


def computes_in(x: Tensor) -> torch.dtype:
    """Return the type in which a linear layer computes now, for this input."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def linear(layer: nn.Linear | BankedLinear, x: Tensor) -> Tensor:
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
        out_NO = x_NI.new_empty(len(x_NI), len(tensors[order.weight_OI]))
        kept = forward_linear(order, tensors, x_NI, out_NO)
        ctx.save_for_backward(x_NI, *tensors, *flat(kept))
        ctx.order = order
        return out_NO

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x_NI, tensors, order = saved[0], saved[1 : len(ctx.needs_input_grad) - 1], ctx.order
        grads = Gradients(ctx.needs_input_grad[2:])
        dx_NI = torch.empty_like(x_NI) if ctx.needs_input_grad[1] else None
        backward_linear(order, tensors, unflat(saved[1 + len(tensors) :]), x_NI, given[0], dx_NI, grads)
        return (None, dx_NI, *grads.values)


class LoraBank:
    """All adapters of one base model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: dict[str, BankedLinear] = {}
        self._loras: dict[str, Lora] = {}
        self.route: tuple[tuple[str, int, int], ...] = ()
        """The route of the current pass, by slot."""

    @property
    def adapters(self) -> Mapping[str, Lora]:
        """The LoRA settings of every adapter by name."""
        return self._loras

    def add(self, name: str, lora: Lora, seed: int) -> None:
        """Add an adapter that changes nothing yet: A random (uniform, from `seed`), B zero.

        Raises ModelError when a target names no linear layer of the base.
        """
        assert name, "an adapter needs a name"
        assert "." not in name, f"{name!r}: torch takes no dots in module names"
        assert name not in self._loras, f"{name!r} is in the bank already"
        places = adapted_layers(self._model, lora.targets)
        generator = torch.Generator().manual_seed(seed)
        for path in places:
            layer = self._banked(path)
            factors = Factors(layer.base.in_features, layer.base.out_features, lora, layer.base.weight.device)
            bound = 1 / math.sqrt(layer.base.in_features)  # as PEFT: kaiming_uniform with a = sqrt(5)
            with torch.no_grad():
                factors.a_rI.copy_(torch.rand(factors.a_rI.shape, generator=generator) * 2 * bound - bound)
            factors.eval()
            layer.adapters[_slot(name)] = factors
        self._loras[name] = lora

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return an adapter's parameters under PEFT's names."""
        found: dict[str, nn.Parameter] = {}
        for path, layer in self._layers.items():
            if _slot(name) in layer.adapters:
                factors = layer.adapters[_slot(name)]
                assert isinstance(factors, Factors)
                found[f"base_model.model.{path}.lora_A.weight"] = factors.a_rI
                found[f"base_model.model.{path}.lora_B.weight"] = factors.b_Or
        return found

    def train(self, *, on: bool) -> None:
        """Turn the adapters' dropout on or off; the base never has any."""
        for layer in self._layers.values():
            layer.adapters.train(on)

    def copy(self, source: str, target: str) -> None:
        """Give `target` the weights of `source`, adding it as a frozen adapter when it is new."""
        if target not in self._loras:
            self.add(target, self._loras[source], seed=0)
            for parameter in self.parameters(target).values():
                parameter.requires_grad_(False)
        self.fill(target, {key: value.detach() for key, value in self.parameters(source).items()})

    def fill(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite an adapter's weights; ModelError when names or shapes do not fit."""
        own = self.parameters(name)
        if set(own) != set(tensors):
            odd = sorted(set(own) ^ set(tensors))
            raise ModelError(f"Adapter '{name}' does not fit: '{odd[0]}' is on one side only.")
        for key, parameter in own.items():
            if parameter.shape != tensors[key].shape:
                raise ModelError(
                    f"Adapter '{name}' does not fit: '{key}' is {tuple(tensors[key].shape)} in the file and "
                    f"{tuple(parameter.shape)} here. Set `lora.rank` and the model as they were."
                )
        with torch.no_grad():
            for key, parameter in own.items():
                parameter.copy_(tensors[key])

    @contextmanager
    def routed(self, route: Route) -> Iterator[None]:
        """Send rows to adapters for the forward passes inside."""
        for name, _, _ in route:
            assert name is None or name in self._loras, f"no adapter {name!r} in the bank"
        before, self.route = (
            self.route,
            tuple((_slot(name or ""), first, last) for name, first, last in route),
        )
        try:
            yield
        finally:
            self.route = before

    @contextmanager
    def rows_at(self, places: Sequence[int]) -> Iterator[None]:
        """Inside, row k of a batch goes where the flat token at `places[k]` (ascending) would go."""
        before = self.route
        slots = [slot for place in places for slot, first, last in before if first <= place < last]
        spans: list[tuple[str, int, int]] = []
        for row, slot in enumerate(slots):
            fresh = not spans or spans[-1][0] != slot
            spans = [*spans, (slot, row, row + 1)] if fresh else [*spans[:-1], (slot, spans[-1][1], row + 1)]
        self.route = tuple(spans)
        try:
            yield
        finally:
            self.route = before

    def _banked(self, path: str) -> BankedLinear:
        if path not in self._layers:
            parent_path, _, leaf = path.rpartition(".")
            parent = self._model.get_submodule(parent_path)
            base = parent.get_submodule(leaf)
            assert isinstance(base, nn.Linear)
            self._layers[path] = BankedLinear(base, self)
            setattr(parent, leaf, self._layers[path])
        return self._layers[path]


def adapted_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the paths of the linear layers that targets name; ModelError when one names none."""
    head = _output_head(model)
    linear = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | BankedLinear) and not path.endswith(".base") and module is not head
    ]
    missing = [t for t in targets if not any(p == t or p.endswith(f".{t}") for p in linear)]
    if missing:
        known = sorted({path.rpartition(".")[2] for path in linear})
        raise ModelError(
            f"`lora.targets` names '{missing[0]}', no linear layer of this model below its output head."
            f"{did_you_mean(missing[0], known)}"
        )
    return [p for p in linear if any(p == t or p.endswith(f".{t}") for t in targets)]


def _output_head(model: nn.Module) -> nn.Module | None:
    """Return the layer that cannot have an adapter: it reads chosen tokens, not whole rows."""
    from transformers import PreTrainedModel

    head: nn.Module | None = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return head


def route_at(route: Route, place_Q: Tensor) -> list[tuple[str | None, int, int]]:
    """Return the route of some tokens of a pass, whose places are ascending."""
    bounds = torch.tensor([last for _, _, last in route], device=place_Q.device)
    ends = torch.searchsorted(place_Q, bounds).tolist()
    return [(adapter, a, b) for (adapter, _, _), a, b in zip(route, [0, *ends], ends, strict=False)]
