"""Apply many LoRA adapters to one base model in a single forward and backward pass.

Every adapted linear layer of the base model becomes a `BankedLinear` that holds the low-rank factors of all adapters.
Before a forward pass, the bank receives the *route* of the pass, which states which contiguous rows of the batch belong
to which adapter. A layer computes the product of the base weight for all rows and adds to each row the update of its
own adapter. No gradient flows from one adapter to another, because the parameters of one adapter are not part of the
graph of another adapter.

Adapters are LoRA as in arXiv:2106.09685, y = Wx + (alpha / rank) · B·A·x, in the storage format of PEFT.

In tensor shapes, R is the number of rows, L of positions, I of input features and O of output features, and r is the
rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from kapelle.errors import ModelError
from kapelle.models.adapters import EXPERTS, Layers, adapted_layers, adapter_shapes, peft_places
from kapelle.models.fast.routed_linear import (
    Gradients,
    Leg,
    Linear,
    StoredStacks,
    backward_linears,
    dropped,
    forward_linears,
    kept_rows_of,
    plain_product,
    salt_of,
    saved_tensors,
)
from kapelle.models.vision import sees
from kapelle.team import Lora

if TYPE_CHECKING:
    from transformers.pytorch_utils import Conv1D

    Plain = nn.Linear | Conv1D
    """A layer that multiplies its input by a weight and adds a bias."""

Route = Sequence[tuple[str | None, int, int]]
"""Spans of rows as tuples of the adapter (or None for the bare base model), the first row and the row after the last.
The spans are ascending and have no gaps."""


class LoraBank:
    """All adapters of one base model."""

    def __init__(self, model: nn.Module, *, kernels: bool = True) -> None:
        """Wrap a base model. With `kernels`, passes may use grouped kernels for the updates of several adapters."""
        self.kernels = kernels
        self._model = model
        self._layers: dict[str, BankedLinear] = {}
        self._experts: dict[str, BankedExperts] = {}
        self.adapters: dict[str, Lora] = {}
        """The LoRA settings of every adapter by name. The method `add` adds entries."""
        self.route: tuple[tuple[str, int, int], ...] = ()
        """The route of the current pass, with slots instead of adapter names."""
        self.keys_N: Tensor | None = None
        """The dropout keys (int32) of the tokens in the current pass, or None if torch's generator draws the dropout
        masks."""
        self.experts_NLk: Tensor | None = None
        """The recorded experts of the tokens in the current pass (int16). Negative values mean that the router chooses
        the experts of a token. The value is None if the router always chooses."""

    def add(self, name: str, lora: Lora, seed: int) -> None:
        """Add an adapter that changes nothing yet, because its factor B is zero. The factor A is drawn uniformly with `seed`.

        Raises ModelError if a target names no linear layer of the base model.
        """
        assert name, "an adapter needs a name"
        assert "." not in name, f"{name!r}: torch takes no dots in module names"
        assert name not in self.adapters, f"{name!r} is in the bank already"
        layers = layers_of(self._model)
        shapes = adapter_shapes(layers, lora)  # raises ModelError for layers that cannot have adapters
        paths = adapted_layers(layers, lora.targets)
        generator = torch.Generator().manual_seed(seed)
        for path in [path for path in paths if path in layers.linear]:
            if path not in self._layers:
                parent_path, _, leaf = path.rpartition(".")
                parent = self._model.get_submodule(parent_path)
                base = parent.get_submodule(leaf)
                assert is_linear(base)
                self._layers[path] = BankedLinear(cast("nn.Linear", base), self)
                setattr(parent, leaf, self._layers[path])
            layer = self._layers[path]
            features_in, features_out = features_of(layer.base)
            factors = Factors(features_in, features_out, lora, layer.base.weight.device, salt_of(path))
            _draw(factors, generator)
            factors.eval()
            layer.adapters[slot_of(name)] = factors
        for path in [path for path in paths if path in layers.experts]:
            module, _, leaf = path.rpartition(".")
            if module not in self._experts:
                parent_path, _, own = module.rpartition(".")
                parent = self._model.get_submodule(parent_path)
                self._experts[module] = BankedExperts(parent.get_submodule(own), self)
                setattr(parent, own, self._experts[module])
            experts = self._experts[module]
            count, features_in, features_out = layers.experts[path]
            device = experts.base.get_parameter(leaf).device
            factors = Factors(features_in, features_out, lora, device, experts=count)
            _draw(factors, generator)
            if slot_of(name) not in experts.adapters:
                experts.adapters[slot_of(name)] = nn.ModuleDict()
            cast("nn.ModuleDict", experts.adapters[slot_of(name)])[leaf] = factors
        assert {key: tuple(p.shape) for key, p in self.parameters(name).items()} == shapes
        self.adapters[name] = lora

    def remove(self, name: str) -> None:
        """Remove an adapter and free its weights. The adapted layers of the base model stay wrapped."""
        del self.adapters[name]
        adapted: list[BankedLinear | BankedExperts] = [*self._layers.values(), *self._experts.values()]
        for adapters in (layer.adapters for layer in adapted if slot_of(name) in layer.adapters):
            del adapters[slot_of(name)]

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of an adapter under PEFT's names."""
        slot = slot_of(name)
        each = {path: layer.adapters[slot] for path, layer in self._layers.items() if slot in layer.adapters}
        of_experts = {
            f"{module}.{leaf}": factors
            for module, experts in self._experts.items()
            for leaf, factors in experts.factors_of(slot).items()
        }
        each |= of_experts
        found: dict[str, nn.Parameter] = {}
        for path, place in peft_places(list(each), of_experts).items():
            factors = each[path]
            assert isinstance(factors, Factors)
            found[f"{place}.lora_A.weight"] = factors.a_rI
            found[f"{place}.lora_B.weight"] = factors.b_Or
        return found

    def train(self, *, on: bool) -> None:
        """Turn the dropout of the adapters on or off. The base model never has dropout."""
        for layer in self._layers.values():
            layer.adapters.train(on)

    def copy(self, source: str, target: str) -> None:
        """Copy the weights of `source` to `target`, which is added as a frozen adapter if it does not exist."""
        if target not in self.adapters:
            self.add(target, self.adapters[source], seed=0)
            for parameter in self.parameters(target).values():
                parameter.requires_grad_(False)
        self.fill(target, {key: value.detach() for key, value in self.parameters(source).items()})

    def fill(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the weights of an adapter. Raises ModelError if names or shapes do not match."""
        copy_weights(self.parameters(name), tensors, f"adapter '{name}'")

    @contextmanager
    def routed(
        self, route: Route, keys_N: Tensor | None = None, experts_NLk: Tensor | None = None
    ) -> Iterator[None]:
        """Route rows to adapters in the forward passes of this context. Dropout keys and recorded experts are used if they are given."""
        for name, _, _ in route:
            assert name is None or name in self.adapters, f"no adapter {name!r} in the bank"
        with self.on(
            tuple((slot_of(name or ""), first, last) for name, first, last in route), keys_N, experts_NLk
        ):
            yield

    @contextmanager
    def on(
        self,
        route: tuple[tuple[str, int, int], ...],
        keys_N: Tensor | None,
        experts_NLk: Tensor | None = None,
    ) -> Iterator[None]:
        """Use this route, these dropout keys and these experts in the passes of this context, and restore the previous ones afterwards."""
        before = self.route, self.keys_N, self.experts_NLk
        self.route, self.keys_N, self.experts_NLk = route, keys_N, experts_NLk
        try:
            yield
        finally:
            self.route, self.keys_N, self.experts_NLk = before

    @contextmanager
    def rows_at(self, place_BL: Tensor) -> Iterator[None]:
        """Route row k of a batch like the flat token `place_BL[k, 0]`, with the dropout keys of the row's own tokens.

        The flat tokens at the beginnings of the rows must be ascending.
        """
        places = place_BL[:, 0].tolist()
        slots = [slot for place in places for slot, first, last in self.route if first <= place < last]
        keys_N = None if self.keys_N is None else self.keys_N[place_BL].flatten()
        experts_NLk = None if self.experts_NLk is None else self.experts_NLk[place_BL.flatten()]
        with self.on(tuple(route_of(slots)), keys_N, experts_NLk):
            yield


def copy_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], whose: str) -> None:
    """Copy weights into the tensors `own` with the same names. Tensors that already share memory are not copied.

    Raises ModelError, which names the owner `whose`, if names or shapes do not match.
    """
    if own.keys() != weights.keys():
        odd = min(own.keys() ^ weights.keys())
        raise ModelError(
            f"The weights of {whose} do not fit this model: '{odd}' exists only in one of the two."
        )
    for key, tensor in own.items():
        if tensor.shape != weights[key].shape:
            raise ModelError(
                f"The weights of {whose} do not fit: '{key}' has shape {tuple(weights[key].shape)}, but "
                f"{tuple(tensor.shape)} in this model. Use the original `lora.rank` and model."
            )
    with torch.no_grad():
        for key, tensor in own.items():
            if tensor.data_ptr() != weights[key].data_ptr():
                tensor.copy_(weights[key])


Name = TypeVar("Name", str, str | None)


def route_of(adapters: Sequence[Name]) -> list[tuple[Name, int, int]]:
    """Return the contiguous spans of equal adapters as tuples of the adapter, the first row and the row after the last."""
    spans: list[tuple[Name, int, int]] = []
    for row, adapter in enumerate(adapters):
        if spans and spans[-1][0] == adapter:
            spans[-1] = (adapter, spans[-1][1], row + 1)
        else:
            spans.append((adapter, row, row + 1))
    return spans


def route_at(route: Route, place_Q: Tensor) -> list[tuple[str | None, int, int]]:
    """Return the route of some tokens of a pass, given the ascending positions of the tokens."""
    bounds = torch.tensor([last for _, _, last in route], device=place_Q.device)
    ends = torch.searchsorted(place_Q, bounds).tolist()
    return [(adapter, a, b) for (adapter, _, _), a, b in zip(route, [0, *ends], ends, strict=False)]


def layers_of(model: nn.Module) -> Layers:
    """Return the modules of a model by path, as if the model had no adapters."""
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    modules: dict[str, nn.Module] = {}
    banked: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if banked and path.startswith(banked):
            continue
        adapted = isinstance(module, BankedLinear | BankedExperts)
        if adapted:
            banked = (*banked[-1:], f"{path}.")
        modules[path] = module.base if adapted else module
    # In a vision-language model, everything except its decoder and its head belongs to vision.
    eyes: set[str] = set()
    if isinstance(model, PreTrainedModel) and sees(model.config):
        decoder = next(path for path, module in modules.items() if module is model.get_decoder())
        within = decoder.rpartition(".")[0]
        eyes = {path for path in modules if path and path.rpartition(".")[0] == within} - {decoder}
    # State-space mixers are modules with parameters A and D.
    own = {
        path: {name for name, _ in module.named_parameters(recurse=False)} for path, module in modules.items()
    }
    # The output head cannot have an adapter: it reads selected tokens, not whole rows.
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return Layers(
        type(model).__name__,
        frozenset(modules),
        {
            path: features_of(module)  # type: ignore[arg-type]
            for path, module in modules.items()
            if is_linear(module)
        },
        next((path for path, module in modules.items() if module is head and head is not None), None),
        frozenset(path for path, names in own.items() if {"A_log", "D"} <= names),
        frozenset(eyes),
        {
            f"{path}.{name}": shape
            for path, module in modules.items()
            if path.rpartition(".")[2] == EXPERTS
            for name, shape in stacked_weights(module).items()
        },
        frozenset(
            path
            for path, module in modules.items()
            if path.rpartition(".")[2] == EXPERTS and hasattr(module, "num_experts")
        ),
        transposed=frozenset(path for path, module in modules.items() if isinstance(module, Conv1D)),
    )


def is_linear(module: nn.Module) -> bool:
    """Return whether a module only multiplies by a weight and adds a bias. Routers do more, even if they extend such a class."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D) and not type(module).__name__.endswith("Router")


def stacked_weights(experts: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Return the number of experts and the features in and out of every weight that a block's experts keep in one tensor.

    The result is empty for modules without the experts interface of `transformers` (`use_experts_implementation`),
    whose flags describe the layout of weights and the steps of an expert.
    """
    if not hasattr(experts, "is_transposed") or not hasattr(experts, "has_gate"):
        return {}
    found = {}
    for name, weight in experts.named_parameters(recurse=False):
        if weight.ndim == 3 and weight.is_floating_point():
            count, *features = weight.shape
            features_in, features_out = features if experts.is_transposed else reversed(features)
            found[name] = (count, features_in, features_out)
    return found


def weight_of(layer: Plain) -> Tensor:
    """Return the weight of a linear layer, of shape (O, I). GPT-2's `Conv1D` stores the transpose of this weight."""
    return layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()


def features_of(layer: Plain) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    if isinstance(layer, nn.Linear):  # a quantised layer packs its weight into another shape
        return layer.in_features, layer.out_features
    features_out, features_in = weight_of(layer).shape
    return features_in, features_out


def is_quantised(layer: nn.Module) -> bool:
    """Return whether a layer stores its weight as codes that only the layer's own forward pass can read."""
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and not weight.is_floating_point()


def slot_of(name: str) -> str:
    """Return the module name of an adapter, which does not collide with any attribute."""
    return f"<{name}>"


class Factors(nn.Module):
    """The pair of factors of one adapter at one layer, or the pairs of all `experts` at one of their weights."""

    def __init__(
        self,
        features_in: int,
        features_out: int,
        lora: Lora,
        device: torch.device,
        salt: int = 0,
        experts: int = 1,
    ) -> None:
        super().__init__()
        rank = lora.rank * experts
        self.salt = salt
        """The salt for the dropout of this layer (see `routed_linear.py`)."""
        self.a_rI = nn.Parameter(torch.empty(rank, features_in, device=device))
        self.b_Or = nn.Parameter(torch.zeros(features_out, rank, device=device))
        self.scale = lora.alpha / lora.rank
        self.dropout = lora.dropout


def _draw(factors: Factors, generator: torch.Generator) -> None:
    """Initialise the factor A like PEFT: kaiming_uniform with a = sqrt(5)."""
    bound = 1 / math.sqrt(factors.a_rI.shape[1])
    with torch.no_grad():
        factors.a_rI.copy_(torch.rand(factors.a_rI.shape, generator=generator) * 2 * bound - bound)


class BankedExperts(nn.Module):
    """The experts of one block, with the factors of every adapter that targets them.

    Tokens are sorted by the adapter of their row and by their expert, so that each product reads one weight and one
    pair of factors. In tensor shapes, S is the number of pairs of a token and an expert that processes it, and k the
    number of experts of a token.
    """

    def __init__(self, base: nn.Module, bank: LoraBank) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict()
        """Mapping from the slot of an adapter and the name of a weight to the `Factors`."""
        self._bank = (bank,)  # in a tuple, so that the bank is not registered as a submodule

    def factors_of(self, slot: str) -> dict[str, Factors]:
        """Return the factors of an adapter by the name of the weight, in the order of the weights.

        The result is empty if the adapter does not target these experts.
        """
        if slot not in self.adapters:
            return {}
        own = cast("nn.ModuleDict", self.adapters[slot])
        names = [name for name, _ in self.base.named_parameters(recurse=False) if name in own]
        return {name: cast("Factors", own[name]) for name in names}

    def forward(self, hidden_ND: Tensor, index_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
        """Return the sum over the experts of each token, of shape (N, D), with the factors of the adapter of the token's row."""
        route = self._bank[0].route
        if all(slot not in self.adapters for slot, _, _ in route):
            y: Tensor = self.base(hidden_ND, index_Nk, weight_Nk)
            return y
        base: Any = self.base
        count, each = len(hidden_ND), tokens_of_a_row(route, len(hidden_ND))
        span_N = torch.empty(count, dtype=torch.long, device=hidden_ND.device)
        for number, (_, first, last) in enumerate(route):
            span_N[first * each : last * each] = number
        key_S = (span_N[:, None] * base.num_experts + index_Nk).flatten()
        order_S = key_S.argsort(stable=True)
        sizes = torch.bincount(key_S, minlength=len(route) * base.num_experts).tolist()
        chosen_k = index_Nk.shape[1]
        # Compute as the base does: in the type of its weights, independent of autocast.
        with torch.autocast(hidden_ND.device.type, enabled=False):
            pieces = []
            for key, x_SD in enumerate(hidden_ND[order_S // chosen_k].split(sizes)):
                if len(x_SD):
                    span, expert = divmod(key, base.num_experts)
                    pieces.append(self._expert(expert, x_SD, self.factors_of(route[span][0])))
            out_SD = torch.cat(pieces) * weight_Nk.flatten()[order_S][:, None]
            place_S = torch.empty_like(order_S)
            place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
            return out_SD[place_S].view(count, chosen_k, -1).sum(1).to(hidden_ND.dtype)

    def _expert(self, expert: int, x_SD: Tensor, factors: Mapping[str, Factors]) -> Tensor:
        """Return the output of one expert for its tokens."""
        base: Any = self.base
        inner = self._times("gate_up_proj" if base.has_gate else "up_proj", expert, x_SD, factors)
        inner = base._apply_gate(inner) if base.has_gate else base.act_fn(inner)  # noqa: SLF001 - it has no public name
        out = self._times("down_proj", expert, inner, factors)
        return cast("Tensor", base.post_expert_norm(out)) if base.has_post_expert_norm else out

    def _times(self, name: str, expert: int, x_SI: Tensor, factors: Mapping[str, Factors]) -> Tensor:
        base: Any = self.base
        weight = getattr(base, name)[expert]
        x_SI = x_SI.to(weight.dtype)
        bias = getattr(base, f"{name}_bias")[expert] if base.has_bias else None
        y_SO = nn.functional.linear(x_SI, weight.t() if base.is_transposed else weight, bias)
        if name in factors:
            own = factors[name]
            a_rI = own.a_rI.unflatten(0, (base.num_experts, -1))[expert]
            b_Or = own.b_Or.unflatten(1, (-1, base.num_experts))[:, :, expert]
            update_SO = (x_SI @ a_rI.to(x_SI.dtype).t()) @ b_Or.to(x_SI.dtype).t()
            y_SO = y_SO + own.scale * update_SO
        return y_SO


def tokens_of_a_row(route: tuple[tuple[str, int, int], ...], tokens: int) -> int:
    """Return the number of tokens per routed row of an input, whose shape may be rows × positions or flattened.

    Raises ModelError if the input is not the whole batch, because the adapters of its tokens are then unknown.
    """
    rows = route[-1][2] if route else 0  # in the batch of the running pass
    if rows and tokens % rows:
        raise ModelError(
            f"A layer with adapters got {tokens} tokens of a batch of {rows} rows: the model gathers tokens before this "
            "layer, so their adapters are unknown. Set other layers in `lora.targets`."
        )
    return tokens // max(rows, 1)


class BankedLinear(nn.Module):
    """A linear layer of the base model, with the factors of every adapter that targets the layer."""

    def __init__(self, base: Plain, bank: LoraBank) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict()
        self.stacks = StoredStacks()
        """The stacked factors of the adapters for grouped products."""
        self._bank = (bank,)  # in a tuple, so that the bank is not registered as a submodule

    @property
    def route(self) -> tuple[tuple[str, int, int], ...]:
        """The current route of the bank."""
        return self._bank[0].route

    @property
    def takes_kernels(self) -> bool:
        """Whether the updates of several adapters may be computed by one kernel."""
        return self._bank[0].kernels

    def merged(self, adapter: str | None) -> Tensor:
        """Return the weight, of shape (O, I), that combines the base weight and an adapter in one product, without dropout."""
        factors = self.factors_of(adapter) if adapter else None
        if factors is None:
            return weight_of(self.base)
        weight_OI = weight_of(self.base).to(factors.b_Or.dtype)
        return torch.addmm(weight_OI, factors.b_Or, factors.a_rI, alpha=factors.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the base layer plus, for each row, the output of the row's own adapter."""
        if all(slot not in self.adapters for slot, _, _ in self._bank[0].route):
            y: Tensor = self.base(x)
            return y
        return self._on_quantised(x) if is_quantised(self.base) else linear(self, x)

    def _on_quantised(self, x: Tensor) -> Tensor:
        """Return the output of a quantised base layer plus the update of each row, differentiated by autograd."""
        y: Tensor = self.base(x)
        dtype = computes_in(x)
        x_NI, y_NO = x.to(dtype).reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]).clone()
        each = tokens_of_a_row(self._bank[0].route, len(x_NI))
        for factors, first, last in self.factors():
            rows = slice(first * each, last * each)
            kept_nI = x_NI[rows]
            if factors.dropout and factors.training:
                kept_nI, _ = dropped(kept_nI, factors.dropout, self.keys_of(factors, rows))
            low_nr = kept_nI @ factors.a_rI.to(dtype).t()
            y_NO[rows] += (low_nr @ factors.b_Or.to(dtype).t() * factors.scale).to(y_NO.dtype)
        return y_NO.view(y.shape)

    def keys_of(self, factors: Factors, rows: slice) -> Tensor | None:
        """Return the dropout keys of these rows of the flattened input, or None if torch's generator draws the dropout masks."""
        keys_N = self._bank[0].keys_N
        return None if keys_N is None else keys_N[rows] ^ factors.salt

    def factors_of(self, adapter: str) -> Factors | None:
        """Return the factors of an adapter for this layer, or None if the adapter does not target the layer."""
        if slot_of(adapter) not in self.adapters:
            return None
        factors = self.adapters[slot_of(adapter)]
        assert isinstance(factors, Factors)
        return factors

    def factors(self) -> Iterator[tuple[Factors, int, int]]:
        """Yield the factors that the current pass uses in this layer, each with its first row and the row after its last."""
        for slot, first, last in self._bank[0].route:
            if slot in self.adapters:
                factors = self.adapters[slot]
                assert isinstance(factors, Factors)
                yield factors, first, last


def order_of(layer: Plain | BankedLinear, size: torch.Size, tensors: list[Tensor]) -> Linear:
    """Return the work order of a layer for inputs of a given size, and append the tensors that the layer reads to `tensors`."""
    base = layer.base if isinstance(layer, BankedLinear) else layer
    weight, bias = len(tensors), None
    tensors.append(weight_of(base))
    if base.bias is not None:
        bias = len(tensors)
        tensors.append(base.bias)
    legs = []
    per_row = tokens_of_a_row(layer.route, size[:-1].numel()) if isinstance(layer, BankedLinear) else 1
    for factors, first, last in layer.factors() if isinstance(layer, BankedLinear) else ():
        place = len(tensors)
        tensors += (factors.a_rI, factors.b_Or)
        dropout = factors.dropout if factors.training else 0.0
        rows = slice(first * per_row, last * per_row)
        keys_n = layer.keys_of(factors, rows) if dropout and isinstance(layer, BankedLinear) else None
        legs.append(Leg(rows.start, rows.stop, place, place + 1, factors.scale, dropout, keys_n))
    if not isinstance(layer, BankedLinear):
        return Linear(weight, bias, ())
    return Linear(weight, bias, tuple(legs), layer.stacks, grouped=layer.takes_kernels)


def computes_in(x: Tensor) -> torch.dtype:
    """Return the type in which a linear layer computes for this input under the current autocast settings."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def linear(layer: Plain | BankedLinear, x: Tensor) -> Tensor:
    """Return the output of a layer for an input whose first axis is routed to adapters."""
    tensors: list[Tensor] = []
    dtype = computes_in(x)
    order = order_of(layer, x.shape, tensors)
    y: Tensor = _RoutedLinear.apply(order, x.to(dtype).reshape(-1, x.shape[-1]), *tensors)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], -1)


class _RoutedLinear(torch.autograd.Function):
    """The autograd function of one linear layer with its adapters."""

    @staticmethod
    def forward(ctx: Any, order: Linear, x_NI: Tensor, *tensors: Tensor) -> Tensor:
        (out_NO,), kept = forward_linears((order,), tensors, x_NI, plain_product)
        ctx.save_for_backward(x_NI, *tensors, *saved_tensors(kept))
        ctx.order = order
        return out_NO

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x_NI, tensors, order = saved[0], saved[1 : len(ctx.needs_input_grad) - 1], ctx.order
        grads = Gradients(ctx.needs_input_grad[2:])
        kept = kept_rows_of(saved[1 + len(tensors) :])
        dx_NI = backward_linears(
            (order,), tensors, kept, x_NI, given, grads,
            wanted=ctx.needs_input_grad[1], multiply=plain_product,
        )  # fmt: skip
        return (None, dx_NI, *grads.values)
