"""Many LoRA adapters on one base model, all in one forward and one backward pass.

Every adapted linear layer of the base becomes a `BankedLinear` that holds the low-rank factors of all
adapters. Before a forward pass the bank gets its *route*: which contiguous rows of the batch belong to
which adapter. Rows use only their own factors, so that no gradient crosses from one adapter to another:
the parameters of one are not part of the other's graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from kapelle.errors import ModelError
from kapelle.models.banked_linear import BankedLinear, Factors, features_of, is_linear, slot_of
from kapelle.models.fast.keyed_dropout import salt_of
from kapelle.models.module_layers import layers_of
from kapelle.models.targets import adapted_layers
from kapelle.team import Lora

Route = Sequence[tuple[str | None, int, int]]
"""(adapter or None for the bare base, first row, row after the last), ascending, without gaps."""


class LoraBank:
    """All adapters of one base model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: dict[str, BankedLinear] = {}
        self._loras: dict[str, Lora] = {}
        self.route: tuple[tuple[str, int, int], ...] = ()
        """The route of the current pass, by slot."""
        self.keys_N: Tensor | None = None
        """Keys of dropout (int32) of the current pass's tokens; None where torch's generator draws."""

    @property
    def rows(self) -> int:
        """Rows of the batch of the current pass."""
        return self.route[-1][2] if self.route else 0

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
        places = adapted_layers(layers_of(self._model), lora.targets)
        generator = torch.Generator().manual_seed(seed)
        for path in places:
            layer = self._banked(path)
            features_in, features_out = features_of(layer.base)
            factors = Factors(features_in, features_out, lora, layer.base.weight.device, salt_of(path))
            bound = 1 / math.sqrt(features_in)  # as PEFT: kaiming_uniform with a = sqrt(5)
            with torch.no_grad():
                factors.a_rI.copy_(torch.rand(factors.a_rI.shape, generator=generator) * 2 * bound - bound)
            factors.eval()
            layer.adapters[slot_of(name)] = factors
        self._loras[name] = lora

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return an adapter's parameters under PEFT's names."""
        found: dict[str, nn.Parameter] = {}
        for path, layer in self._layers.items():
            if slot_of(name) in layer.adapters:
                factors = layer.adapters[slot_of(name)]
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
    def routed(self, route: Route, keys_N: Tensor | None = None) -> Iterator[None]:
        """Send rows to adapters for the forward passes inside; `keys_N` are those of their dropout."""
        for name, _, _ in route:
            assert name is None or name in self._loras, f"no adapter {name!r} in the bank"
        with self.on(tuple((slot_of(name or ""), first, last) for name, first, last in route), keys_N):
            yield

    @contextmanager
    def on(self, route: tuple[tuple[str, int, int], ...], keys_N: Tensor | None) -> Iterator[None]:
        """Inside, rows go where they went when `self.route` and `self.keys_N` were these."""
        before = self.route, self.keys_N
        self.route, self.keys_N = route, keys_N
        try:
            yield
        finally:
            self.route, self.keys_N = before

    @contextmanager
    def rows_at(self, place_BL: Tensor) -> Iterator[None]:
        """Inside, row k of a batch goes where the flat token `place_BL[k, 0]` (ascending) would go, with the keys of its own."""
        places = place_BL[:, 0].tolist()
        slots = [slot for place in places for slot, first, last in self.route if first <= place < last]
        spans: list[tuple[str, int, int]] = []
        for row, slot in enumerate(slots):
            fresh = not spans or spans[-1][0] != slot
            spans = [*spans, (slot, row, row + 1)] if fresh else [*spans[:-1], (slot, spans[-1][1], row + 1)]
        with self.on(tuple(spans), None if self.keys_N is None else self.keys_N[place_BL].flatten()):
            yield

    def _banked(self, path: str) -> BankedLinear:
        if path not in self._layers:
            parent_path, _, leaf = path.rpartition(".")
            parent = self._model.get_submodule(parent_path)
            base = parent.get_submodule(leaf)
            assert is_linear(base)
            self._layers[path] = BankedLinear(cast("nn.Linear", base), self)
            setattr(parent, leaf, self._layers[path])
        return self._layers[path]


def route_at(route: Route, place_Q: Tensor) -> list[tuple[str | None, int, int]]:
    """Return the route of some tokens of a pass, whose places are ascending."""
    bounds = torch.tensor([last for _, _, last in route], device=place_Q.device)
    ends = torch.searchsorted(place_Q, bounds).tolist()
    return [(adapter, a, b) for (adapter, _, _), a, b in zip(route, [0, *ends], ends, strict=False)]
