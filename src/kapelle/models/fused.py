"""A small model's pass for sampling: few, ready matrices and few, in-place steps.

Sampling reads the same weights once per token and trains none of them. So each adapter's update is added to its
own copy of the weights, queries, keys and values become one matrix, gate and up projection another, the scale of
the norms before them is part of them, and half precision is rounded once, not in every step. Pairs that rotary
attention turns lie side by side, so that a turn is one complex product: queries and keys are permuted alike,
which their products do not see. The copies cost memory and a pass over the weights: `fused_of` makes them only where
they are small.

Shapes: N flat tokens, D hidden size, H query heads, J key heads, E head size, Q chosen tokens, I and O features
in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from kapelle.models.lean import Attend, LeanModel
from kapelle.models.lora_bank import BankedLinear, Route

LARGEST = 1 << 26
"""Most weights, all copies together."""


class _Matrix(NamedTuple):
    weight_IO: Tensor
    bias_O: Tensor | None


class _Layer(NamedTuple):
    projections: _Matrix
    """Queries, keys and values side by side."""
    output: _Matrix
    gates: _Matrix
    """Gate and up projection side by side."""
    down: _Matrix


class FusedPass:
    """The forward pass of a lean model for rows of a few adapters."""

    def __init__(self, lean: LeanModel, adapters: Sequence[str | None], dtype: torch.dtype) -> None:
        """Copy the weights as they are now."""
        self._lean = lean
        self._dtype = dtype
        width = lean.layers[0].input_layernorm.weight.shape[0]
        self._least = {
            size: torch.tensor((size * lean.eps) ** 0.5, device=lean.device)
            for size in (width, lean.head_size)
        }
        self._layers = {
            adapter: [self._layer(layer, adapter) for layer in lean.layers]
            for adapter in dict.fromkeys(adapters)
        }
        self._scales = [self._head_scale(layer) for layer in lean.layers] if lean.normed_heads else []

    def hidden(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        route: Route,
        attend: Attend,
        last_Q: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states `_ND`, or those of the tokens at `last_Q` alone.

        `attend` mixes tokens; queries come scaled. In the last layer it gets queries of chosen tokens only.
        """
        lean = self._lean
        x_ND = lean.embed(tokens_N).float()
        turn_N1e = lean.turns(x_ND, positions_N)
        turned = lean.heads + lean.key_heads
        for number in range(lean.depth):
            layers = self._spans(number, route)
            h_ND = self._normed(x_ND)
            all_NO = _product([(layer.projections, a, b) for layer, a, b in layers], h_ND)
            all_NHE = all_NO.view(len(h_ND), -1, lean.head_size)
            qk_NHE = self._turned(number, all_NHE[:, :turned], turn_N1e)
            q_NHE, k_NJE = qk_NHE[:, : lean.heads], qk_NHE[:, lean.heads :]
            if last_Q is not None and number == lean.depth - 1:
                x_ND, q_NHE = x_ND[last_Q], q_NHE[last_Q]
                layers = self._spans(number, _chosen(route, last_Q))
            gathered_NHE = attend(number, q_NHE, k_NJE, all_NHE[:, turned:])
            _add_product([(layer.output, a, b) for layer, a, b in layers], gathered_NHE.flatten(1), x_ND)
            gates_NO = _product([(layer.gates, a, b) for layer, a, b in layers], self._normed(x_ND))
            gate, up = gates_NO.chunk(2, dim=-1)
            _add_product(
                [(layer.down, a, b) for layer, a, b in layers], silu(gate, inplace=True).mul_(up), x_ND
            )
        return lean.final_norm(x_ND)

    def _spans(self, number: int, route: Route) -> list[tuple[_Layer, int, int]]:
        return [(self._layers[adapter][number], first, last) for adapter, first, last in route]

    def _normed(self, x_ND: Tensor) -> Tensor:
        """Return the direction of each token; its length and the norm's scale are part of the next matrix."""
        return torch.div(x_ND, self._length(x_ND), out=torch.empty_like(x_ND, dtype=self._dtype))

    def _length(self, x: Tensor) -> Tensor:
        """Return √(|x|² + eps · D): RMSNorm is x over this, times √D."""
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return length.hypot_(self._least[x.shape[-1]])

    def _turned(self, number: int, qk_NHE: Tensor, turn_N1e: Tensor) -> Tensor:
        """Norm queries and keys where the model does, and turn each pair by its position's angle."""
        qk_NHE = qk_NHE.float()
        if self._scales:
            qk_NHE = (qk_NHE / self._length(qk_NHE)).mul_(self._scales[number])
        pairs_NHe = torch.view_as_complex(qk_NHE.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs_NHe * turn_N1e).flatten(-2).to(self._dtype)

    def _layer(self, layer: Any, adapter: str | None) -> _Layer:
        a, mlp = layer.self_attn, layer.mlp
        q, k, v = (_linear(part, adapter) for part in (a.q_proj, a.k_proj, a.v_proj))
        # With normed heads the scale of attention is part of the norm's.
        scale = 1.0 if self._lean.normed_heads else self._lean.scale
        q, k = self._paired(q, scale), self._paired(k, 1.0)
        norm_D, after_D = (
            norm.weight * norm.weight.shape[0] ** 0.5
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        gates = [_linear(part, adapter) for part in (mlp.gate_proj, mlp.up_proj)]
        return _Layer(
            self._joined([q, k, v], norm_D),
            self._joined([_linear(a.o_proj, adapter)], None),
            self._joined(gates, after_D),
            self._joined([_linear(mlp.down_proj, adapter)], None),
        )

    def _paired(self, linear: tuple[Tensor, Tensor | None], scale: float) -> tuple[Tensor, Tensor | None]:
        """Put the halves of each head's features side by side, pair by pair, and scale them."""
        weight_OI, bias_O = linear
        order_O = self._pairs().repeat(len(weight_OI) // self._lean.head_size)
        order_O = (
            order_O
            + torch.arange(len(weight_OI), device=order_O.device)
            // self._lean.head_size
            * self._lean.head_size
        )
        return weight_OI[order_O] * scale, None if bias_O is None else bias_O[order_O] * scale

    def _pairs(self) -> Tensor:
        return torch.arange(self._lean.head_size, device=self._lean.device).view(2, -1).t().flatten()

    def _head_scale(self, layer: Any) -> Tensor:
        """Return the norms' weights of query and key heads, one row per head, with the scale of attention."""
        a, order_E = layer.self_attn, self._pairs()
        q_E, k_E = a.q_norm.weight[order_E] * self._lean.scale, a.k_norm.weight[order_E]
        scale_HE = torch.cat((q_E.expand(self._lean.heads, -1), k_E.expand(self._lean.key_heads, -1)))
        return scale_HE.float() * self._lean.head_size**0.5

    def _joined(self, linears: Sequence[tuple[Tensor, Tensor | None]], norm_I: Tensor | None) -> _Matrix:
        weight_OI = torch.cat([weight_OI for weight_OI, _ in linears])
        weight_OI = weight_OI if norm_I is None else weight_OI * norm_I
        weight_IO = weight_OI.to(self._dtype).t().contiguous()
        if all(bias_O is None for _, bias_O in linears):
            return _Matrix(weight_IO, None)
        biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in linears]
        return _Matrix(weight_IO, torch.cat(biases).to(self._dtype))


def fused_of(lean: LeanModel, adapters: Sequence[str | None], dtype: torch.dtype) -> FusedPass | None:
    """Return the fused pass, or None where its copies would be large."""
    weights = sum(parameter.numel() for layer in lean.layers for parameter in layer.parameters())
    return FusedPass(lean, adapters, dtype) if weights * len(set(adapters)) <= LARGEST else None


def _linear(layer: Any, adapter: str | None) -> tuple[Tensor, Tensor | None]:
    if isinstance(layer, BankedLinear):
        return layer.merged(adapter), layer.base.bias
    return layer.weight, layer.bias


def _product(spans: Sequence[tuple[_Matrix, int, int]], x_NI: Tensor) -> Tensor:
    """Return each span of rows times its own matrix."""
    y_NO = x_NI.new_empty(len(x_NI), spans[0][0].weight_IO.shape[1])
    for (weight_IO, bias_O), first, last in spans:
        if bias_O is None:
            torch.mm(x_NI[first:last], weight_IO, out=y_NO[first:last])
        else:
            torch.addmm(bias_O, x_NI[first:last], weight_IO, out=y_NO[first:last])
    return y_NO


def _add_product(spans: Sequence[tuple[_Matrix, int, int]], x_NI: Tensor, y_NO: Tensor) -> None:
    """Add each span of rows times its own matrix to `y_NO`, in place."""
    for (weight_IO, bias_O), first, last in spans:
        if weight_IO.dtype == y_NO.dtype:
            y_NO[first:last].addmm_(x_NI[first:last], weight_IO)
        else:
            y_NO[first:last] += torch.mm(x_NI[first:last], weight_IO)
        if bias_O is not None:
            y_NO[first:last] += bias_O


def _chosen(route: Route, last_Q: Tensor) -> list[tuple[str | None, int, int]]:
    """Return the route of chosen tokens, ascending."""
    bounds = torch.tensor([last for _, _, last in route], device=last_Q.device)
    ends = torch.searchsorted(last_Q, bounds).tolist()
    return [(adapter, a, b) for (adapter, _, _), a, b in zip(route, [0, *ends], ends, strict=False)]
