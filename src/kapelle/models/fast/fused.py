"""A forward pass of small models for sampling, with few prepared matrices and few in-place steps.

Sampling reads the same frozen weights once per token. The update of each adapter is therefore added to a separate copy
of the weights. Queries, keys and values are combined into one matrix, and gate and up projection into another matrix.
The scale of the preceding norms is multiplied into these matrices, and the result is rounded to half precision only
once. The output head is prepared in the same way. The pairs of features that rotary attention rotates are stored side
by side, so that a rotation is one complex product. Queries and keys have the same permutation, which leaves their
products unchanged. The copies cost memory and one pass over the weights, so `fused_of` creates them only for small
models.

In tensor shapes, N is the number of flat tokens, Q of chosen tokens, H of query heads, J of key heads, I of input
features and O of output features; D is the hidden size, E the head size and V the size of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from kapelle.functional.masking import as_float
from kapelle.models.devices import multiplies
from kapelle.models.fast.families import Family
from kapelle.models.fast.flat import Attend, FlatModel
from kapelle.models.lora_bank import BankedLinear, Route, route_at

LARGEST = 1 << 26
"""The maximum number of weights of all copies together."""

LARGE = 1 << 17
"""The number of weights of a float32 matrix from which the packed product is faster for any number of rows."""

MANY = 256
"""The number of rows from which the packed product is faster for every matrix."""


class _Matrix:
    """A weight and its bias, prepared for products with many or few rows."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._bias_O = bias_O
        self._large = weight_OI.numel() >= LARGE or weight_OI.dtype != torch.float32
        packs = weight_OI.device.type == "cpu" and multiplies(weight_OI.dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None) if packs else None  # noqa: SLF001
        self._weight_IO = None if packs and self._large else weight_OI.t().contiguous()

    def times(self, x_NI: Tensor) -> Tensor:
        """Return the product of rows and the weight, plus the bias."""
        if self._weight_IO is None or (self._packed is not None and x_NI.shape[0] >= MANY):
            product: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
                x_NI, self._packed, self._bias_O, "none", [], ""
            )
            return product
        if self._bias_O is None:
            return torch.mm(x_NI, self._weight_IO)
        return torch.addmm(self._bias_O, x_NI, self._weight_IO)

    def add_times(self, x_NI: Tensor, y_NO: Tensor) -> None:
        """Add the product of rows and the weight, plus the bias, to `y_NO`."""
        if self._weight_IO is None or x_NI.shape[0] >= MANY or self._weight_IO.dtype != y_NO.dtype:
            y_NO += self.times(x_NI)
            return
        y_NO.addmm_(x_NI, self._weight_IO)
        if self._bias_O is not None:
            y_NO += self._bias_O


class _Layer(NamedTuple):
    projections: _Matrix
    """The projections to queries, keys and values, side by side in one matrix."""
    output: _Matrix
    gates: _Matrix
    """The gate projection and the up projection, side by side in one matrix."""
    down: _Matrix
    scale_HE: Tensor | None
    """The scale of normalised queries and keys, or None if queries and keys have no norm."""


class FusedPass:
    """The forward pass of a flat model for rows of a few adapters. Copies of weights are created when a row first needs them."""

    def __init__(self, flat: FlatModel, dtype: torch.dtype) -> None:
        """Create a pass that computes in `dtype`."""
        self._flat = flat
        self._dtype = dtype
        self._layers: dict[str | None, list[_Layer]] = {}
        self._head: _Matrix | None = None
        width = flat.layers[0].input_layernorm.weight.shape[0]
        self._least = {
            size: torch.tensor((size * flat.eps) ** 0.5, device=flat.body.embed_tokens.weight.device)
            for size in (width, flat.head_size)
        }

    def forget(self, adapter: str | None) -> None:
        """Drop the copies of an adapter whose weights have changed. For the bare base model (None), drop all copies."""
        if adapter is None:
            self._layers.clear()
            self._head = None
        self._layers.pop(adapter, None)

    def logits(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        route: Route,
        attend: Attend,
        last_Q: Tensor | None = None,
    ) -> Tensor:
        """Return logits in float32, of shape (N, V), or only the logits of the tokens at `last_Q`.

        The function `attend` computes attention and receives queries that are already scaled. In the last layer,
        `attend` receives only the queries of selected tokens.
        """
        flat = self._flat
        x_ND = flat.body.embed_tokens(tokens_N).float()
        turn_N1e = flat.turns(x_ND, positions_N)
        turned = flat.heads + flat.key_heads
        for number in range(len(flat.layers)):
            layers = self._spans(number, route)
            h_ND = self._normed(x_ND)
            all_NO = _product([(layer.projections, a, b) for layer, a, b in layers], h_ND)
            all_NHE = all_NO.view(h_ND.shape[0], -1, flat.head_size)
            # Normalise queries and keys if the model does, and rotate each pair by its position's angle.
            qk_NHE, scale_HE = all_NHE[:, :turned].float(), layers[0][0].scale_HE
            if scale_HE is not None:
                qk_NHE = qk_NHE.div_(self._length(qk_NHE)).mul_(scale_HE)
            torch.view_as_complex(qk_NHE.unflatten(-1, (-1, 2))).mul_(turn_N1e)
            qk_NHE = qk_NHE.to(self._dtype)
            q_NHE, k_NJE = qk_NHE[:, : flat.heads], qk_NHE[:, flat.heads :]
            if last_Q is not None and number == len(flat.layers) - 1:
                x_ND, q_NHE = x_ND[last_Q], q_NHE[last_Q]
                layers = self._spans(number, route_at(route, last_Q))
            gathered_NHE = attend(number, q_NHE, k_NJE, all_NHE[:, turned:])
            _add_product([(layer.output, a, b) for layer, a, b in layers], gathered_NHE.flatten(1), x_ND)
            gates_NO = _product([(layer.gates, a, b) for layer, a, b in layers], self._normed(x_ND))
            gate, up = gates_NO.chunk(2, dim=-1)
            _add_product(
                [(layer.down, a, b) for layer, a, b in layers], silu(gate, inplace=True).mul_(up), x_ND
            )
        if self._head is None:  # no adapter changes it
            self._head = self._joined([_linear(flat.head, None)], _scale(flat.body.norm))
        return self._head.times(self._normed(x_ND)).float()

    def _spans(self, number: int, route: Route) -> list[tuple[_Layer, int, int]]:
        for adapter, _, _ in route:
            if adapter not in self._layers:
                self._layers[adapter] = [self._layer(layer, adapter) for layer in self._flat.layers]
        return [(self._layers[adapter][number], first, last) for adapter, first, last in route]

    def _normed(self, x_ND: Tensor) -> Tensor:
        """Return the direction of each token. The token's length and the norm's scale are part of the next matrix."""
        return torch.div(x_ND, self._length(x_ND), out=torch.empty_like(x_ND, dtype=self._dtype))

    def _length(self, x: Tensor) -> Tensor:
        """Return √(|x|² + eps · D). RMSNorm is x divided by this value and multiplied by √D."""
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return length.hypot_(self._least[x.shape[-1]])

    def _layer(self, layer: Any, adapter: str | None) -> _Layer:
        a, mlp = layer.self_attn, layer.mlp
        q, k, v = (_linear(part, adapter) for part in (a.q_proj, a.k_proj, a.v_proj))
        # With normed heads, the scale of attention is part of the norm's scale.
        scale = 1.0 if self._flat.normed_heads else self._flat.scale
        q, k = self._paired(q, scale), self._paired(k, 1.0)
        scale_HE = None
        if self._flat.normed_heads:
            q_E, k_E = (self._pairs(as_float(norm.weight)) for norm in (a.q_norm, a.k_norm))
            heads = [q_E * self._flat.scale] * self._flat.heads + [k_E] * self._flat.key_heads
            scale_HE = torch.stack(heads) * math.sqrt(self._flat.head_size)
        norm_D, after_D = _scale(layer.input_layernorm), _scale(layer.post_attention_layernorm)
        gates = [_linear(part, adapter) for part in (mlp.gate_proj, mlp.up_proj)]
        return _Layer(
            self._joined([q, k, v], norm_D),
            self._joined([_linear(a.o_proj, adapter)], None),
            self._joined(gates, after_D),
            self._joined([_linear(mlp.down_proj, adapter)], None),
            scale_HE,
        )

    def _paired(self, linear: tuple[Tensor, Tensor | None], scale: float) -> tuple[Tensor, Tensor | None]:
        weight_OI, bias_O = linear
        return self._pairs(weight_OI) * scale, None if bias_O is None else self._pairs(bias_O) * scale

    def _pairs(self, x: Tensor) -> Tensor:
        """Put the two halves of each head's features side by side, pair by pair."""
        half = self._flat.head_size // 2
        return x.view(-1, 2, half, *x.shape[1:]).transpose(1, 2).reshape(x.shape)

    def _joined(self, linears: Sequence[tuple[Tensor, Tensor | None]], norm_I: Tensor | None) -> _Matrix:
        weight_OI = torch.cat([weight_OI for weight_OI, _ in linears])
        weight_OI = weight_OI if norm_I is None else weight_OI * norm_I
        biases = [
            weight_OI.new_zeros(len(weight_OI)) if bias_O is None else bias_O for weight_OI, bias_O in linears
        ]
        biased = any(bias_O is not None for _, bias_O in linears)
        return _Matrix(weight_OI.to(self._dtype), torch.cat(biases).to(self._dtype) if biased else None)


def fused_of(flat: FlatModel, adapters: int, dtype: torch.dtype) -> FusedPass | None:
    """Return the fused pass, or None if the family differs from Llama or copies for this many adapters would be too large."""
    if flat.family != Family():
        return None
    layers = sum(parameter.numel() for layer in flat.layers for parameter in layer.parameters())
    head = sum(parameter.numel() for parameter in flat.head.parameters())
    return FusedPass(flat, dtype) if layers * max(adapters, 1) + head <= LARGEST else None


def _linear(layer: Any, adapter: str | None) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of a layer in float32 for any base type, so that they are rounded only once, at the end."""
    banked = isinstance(layer, BankedLinear)
    bias_O = layer.base.bias if banked else layer.bias
    weight_OI = layer.merged(adapter) if banked else layer.weight
    return as_float(weight_OI), None if bias_O is None else as_float(bias_O)


def _scale(norm: Any) -> Tensor:
    """Return the factor by which a norm multiplies the direction of a token, of shape (D,)."""
    scale: Tensor = as_float(norm.weight) * math.sqrt(len(norm.weight))
    return scale


def _product(spans: Sequence[tuple[_Matrix, int, int]], x_NI: Tensor) -> Tensor:
    """Return the product of each span of rows with the span's own matrix."""
    if len(spans) == 1:
        return spans[0][0].times(x_NI)
    return torch.cat([matrix.times(x_NI[first:last]) for matrix, first, last in spans])


def _add_product(spans: Sequence[tuple[_Matrix, int, int]], x_NI: Tensor, y_NO: Tensor) -> None:
    """Add the product of each span of rows with the span's own matrix to `y_NO`, in place."""
    if len(spans) == 1:
        spans[0][0].add_times(x_NI, y_NO)
        return
    for matrix, first, last in spans:
        matrix.add_times(x_NI[first:last], y_NO[first:last])
