"""A forward pass for the families in families.py, with flat tokens, without padding, and with attention by plan.

`transformers` computes a layer in about forty calls and pads every sequence to the length of the longest sequence. In
this module, the tokens of all sequences are concatenated, so that linear layers have no padding and the LoRA bank
routes ranges of tokens. Only attention needs sequences: a *plan* defines which tokens attend to which. The weights
belong to the `transformers` modules, which also compute every model that this module does not support.

Each half of a layer is a single step of autograd with a hand-written backward pass. Autograd over the thirty small
operations of a layer would store an intermediate result of each operation, and later read and write each result again.
In this module, a half computes in place, and writes and sums products where the result is needed (elementwise.py
contains the operations between products). A half stores only what its backward pass cannot recompute cheaply: the
outputs of norms and gates, which would take a fifth of an update's memory, are recomputed. Norms and rotation are
computed in the type of the residual stream (float32), and products are computed in the compute type. The results are
equal to those of `transformers`, which tests check.

In tensor shapes, N is the number of flat tokens, T of heads of queries or of keys, H of query heads and J of key heads;
D is the hidden size, F the inner size and E the head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from kapelle.functional.masking import as_float
from kapelle.models.fast.attention import AttentionPlan, attend_by_buckets, attend_by_plan
from kapelle.models.fast.elementwise import PLAIN, LayerPieces, pieces_for
from kapelle.models.fast.families import Family, family_of
from kapelle.models.fast.routed_linear import (
    Gradients,
    Linear,
    backward_linear,
    forward_linear,
    kept_rows_of,
    saved_tensors,
)
from kapelle.models.lora_bank import computes_in, order_of

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""A function that returns the attention outputs of shape (N, H, E), given the layer number, `q_NHE`, `k_NJE` and
`v_NJE`."""


class FlatModel:
    """The forward pass over a `transformers` model's own modules."""

    def __init__(self, model: Any, family: Family, *, kernels: bool = True) -> None:
        """Wrap a model. With `kernels`, passes on CUDA use available kernels; otherwise, passes use torch's plain operations."""
        config = model.config
        self.family = family
        self.kernels = kernels
        """Whether passes may use kernels."""
        self.body = model.base_model
        """The `transformers` module that contains the embeddings, the layers and the last norm."""
        self.head: nn.Module = model.get_output_embeddings()
        self.layers: Sequence[Any] = list(self.body.layers)
        """The `transformers` modules of the layers."""
        attention = self.layers[0].self_attn
        self.head_size = int(attention.head_dim)
        self.key_heads = int(config.num_key_value_heads)
        self.heads = int(config.num_attention_heads)
        self.eps = float(config.rms_norm_eps)
        self.scale = float(attention.scaling)
        self.normed_heads = isinstance(getattr(attention, "q_norm", None), nn.Module)
        one = "sliding_attention" if config.model_type == "mistral" else "full_attention"
        kinds = getattr(config, "layer_types", None) or [one] * len(self.layers)
        self.windows = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
        """The number of tokens that each layer attends to, or None for all tokens."""
        self.cap: float | None = config.attn_logit_softcapping if family.capped else None
        """The soft cap of attention scores, or None."""
        self.rotations = tuple(kind if family.turned_by_kind else None for kind in kinds)
        """The kind of rotary angles that each layer uses."""

    def turns(self, x_ND: Tensor, positions_N: Tensor, layer: int = 0) -> Tensor:
        """Return the complex numbers that rotate the E / 2 pairs of a layer's heads by position, of shape (N, 1, E / 2)."""
        cos_N1E, sin_N1E = self.rotary(x_ND, positions_N, self.rotations[layer])
        half = self.head_size // 2
        return torch.complex(cos_N1E[..., :half].float(), sin_N1E[..., :half].float())

    def hidden(
        self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, run: Callable[..., Any] | None = None
    ) -> Tensor:
        """Return the last hidden states, of shape (N, D). The function `attend` computes attention; all other operations are per token.

        If `run` is given, it is called with each block and the block's arguments. If `run` is None, the blocks are
        called directly.
        """
        x_ND = as_float(self.body.embed_tokens(tokens_N))
        turns = {each: self.rotary(x_ND, positions_N, each) for each in dict.fromkeys(self.rotations)}
        for number, rotation in enumerate(self.rotations):
            args = (number, x_ND, *turns[rotation], attend)
            x_ND = self._block(*args) if run is None else run(self._block, *args)
        return rms_norm(x_ND, (x_ND.shape[-1],), self.gain(self.body.norm).to(x_ND.dtype), self.eps)

    def gain(self, norm: Any) -> Tensor:
        """Return the factor by which each feature is multiplied after a norm."""
        weight: Tensor = norm.weight
        return 1 + as_float(weight) if self.family.centred else weight

    def _block(self, number: int, x_ND: Tensor, cos_N1E: Tensor, sin_N1E: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream after a layer, of shape (N, D). The layer computes attention and then the MLP."""
        layer, dtype = self.layers[number], computes_in(x_ND)
        a, mlp = layer.self_attn, layer.mlp
        tensors: list[Tensor] = [self.gain(layer.input_layernorm)]
        if self.normed_heads:
            tensors += (self.gain(a.q_norm), self.gain(a.k_norm))
        q, k, v = (order_of(each, x_ND.shape, tensors) for each in (a.q_proj, a.k_proj, a.v_proj))
        pieces = pieces_for(x_ND, dtype, self.head_size) if self.kernels else PLAIN
        task = Heads((q, k, v), self.heads, self.key_heads, self.eps, dtype, self.normed_heads, pieces)
        # Queries, keys and values are freed before the second half.
        gathered_NHE = attend(number, *Project.apply(task, x_ND, cos_N1E, sin_N1E, *tensors))  # type: ignore[no-untyped-call]
        attended_ND = a.o_proj(gathered_NHE.flatten(1))
        sandwiched, gelu = self.family.sandwiched, self.family.gelu
        if sandwiched:
            gain_D = self.gain(layer.post_attention_layernorm)
            x_ND = Sum.apply(pieces, self.eps, x_ND, attended_ND, gain_D)  # type: ignore[no-untyped-call]
            tensors = [self.gain(layer.pre_feedforward_layernorm)]
        else:
            x_ND = x_ND + attended_ND
            tensors = [self.gain(layer.post_attention_layernorm)]
        gate, up, down = (
            order_of(each, x_ND.shape, tensors) for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        task_of_mlp = Gated((gate, up, down), self.eps, dtype, gelu, not sandwiched, pieces)
        out_ND: Tensor = Mlp.apply(task_of_mlp, x_ND, *tensors)  # type: ignore[no-untyped-call]
        if sandwiched:
            gain_D = self.gain(layer.post_feedforward_layernorm)
            out_ND = Sum.apply(pieces, self.eps, x_ND, out_ND, gain_D)  # type: ignore[no-untyped-call]
        return out_ND

    def by_plan(self, plan: AttentionPlan) -> Attend:
        """Return the attention function of one pass, which follows a plan."""

        def attend(layer: int, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor) -> Tensor:
            by_plan = attend_by_plan if self.kernels else attend_by_buckets
            return by_plan(plan.within(self.windows[layer]), q_NHE, k_NJE, v_NJE, self.scale, self.cap)

        return attend

    def rotary(self, x_ND: Tensor, positions_N: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the rotary angles of a kind in `rotations`, both of shape (N, 1, E)."""
        kinds = () if kind is None else (kind,)
        cos_1NE, sin_1NE = self.body.rotary_emb(x_ND, positions_N[None], *kinds)
        return cos_1NE[0][:, None], sin_1NE[0][:, None]


def flat_of(model: Any, *, kernels: bool = True) -> FlatModel | None:
    """Return the flat forward pass of a model, or None if the architecture is not supported."""
    family = family_of(model.config.to_dict())
    if family is None or not all(weight.is_floating_point() for weight in model.parameters()):
        return None  # only their own layers can read quantised weights
    return FlatModel(model, family, kernels=kernels)


class Heads(NamedTuple):
    """The first half of a layer: norm, queries, keys and values, norms of heads, rotation."""

    linears: tuple[Linear, Linear, Linear]
    """The linear layers of queries, keys and values."""
    heads: int
    key_heads: int
    eps: float
    dtype: torch.dtype
    """The type in which products are computed."""
    normed: bool
    """Whether queries and keys are normalised per head. If queries and keys are normalised, the weights of their norms
    follow the weight of the layer norm in the list of tensors."""
    pieces: LayerPieces = PLAIN


class Gated(NamedTuple):
    """The second half of a layer: norm, gate and up projection, down projection, sum."""

    linears: tuple[Linear, Linear, Linear]
    """The linear layers of gate, up and down projection."""
    eps: float
    dtype: torch.dtype
    gelu: bool
    """Whether the activation of the gate is GELU."""
    sums: bool
    """Whether the input is added to the result."""
    pieces: LayerPieces = PLAIN


class Project(torch.autograd.Function):
    """Computes the queries, keys and values of one layer from x.

    The tensors are the weight of the norm, the weights of the heads' norms, and the tensors of the linear layers, in
    this order.
    """

    @staticmethod
    def forward(
        ctx: Any, task: Heads, x_ND: Tensor, cos_N1E: Tensor, sin_N1E: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values in the compute type, of shapes (N, H, E), (N, J, E) and (N, J, E)."""
        size = cos_N1E.shape[-1]
        h_ND, inverse_N1 = task.pieces.normed(x_ND, tensors[0], task.eps, task.dtype)
        outs, kept = zip(*(forward_linear(linear, tensors, h_ND) for linear in task.linears), strict=True)
        raw: list[Tensor | None] = []
        read: list[Tensor] = []
        for number, out_NO in enumerate(outs[:2]):
            weight_E = tensors[1 + number] if task.normed else None
            heads_NTE, *left = task.pieces.turned(
                out_NO.view(len(h_ND), -1, size), weight_E, cos_N1E, sin_N1E, task.eps, x_ND.dtype
            )
            read.append(heads_NTE)
            raw += left
        ctx.task = task
        ctx.counts = [len(each) for each in kept]
        ctx.save_for_backward(
            x_ND, cos_N1E, sin_N1E, inverse_N1, *raw,
            *tensors, *(tensor for each in kept for tensor in saved_tensors(each)),
        )  # fmt: skip
        return read[0], read[1], outs[2].view(len(h_ND), -1, size)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the tensors."""
        task: Heads = ctx.task
        x_ND, cos_N1E, sin_N1E, inverse_N1, *rest = ctx.saved_tensors
        raw, rest = rest[:4], rest[4:]
        grads = Gradients(ctx.needs_input_grad[4:])
        tensors = rest[: len(grads.wanted)]
        h_ND = task.pieces.scaled(x_ND, inverse_N1, tensors[0], task.dtype)
        outs = []
        for number, given_NTE in enumerate(given[:2]):
            weight_E = tensors[1 + number] if task.normed else None
            learns = task.normed and grads.wanted[1 + number]
            raw_NTE, inverse_NT1 = raw[2 * number : 2 * number + 2]
            draw_NTE, own_E = task.pieces.turned_back(
                given_NTE, raw_NTE, inverse_NT1, weight_E, cos_N1E, sin_N1E, x_ND.dtype, learns
            )
            if own_E is not None:
                grads.values[1 + number] = own_E.to(tensors[1 + number].dtype)
            outs.append(draw_NTE)
        stream = ctx.needs_input_grad[1] or grads.wanted[0]
        dh_ND: Tensor | None = None
        left = _kept_of_each(rest[len(tensors) :], ctx.counts)
        for linear, kept, out in zip(task.linears, left, (*outs, given[2]), strict=True):
            given_NO = out.reshape(len(h_ND), -1)
            dh_ND = backward_linear(
                linear, tensors, kept, h_ND, given_NO, grads, more_NI=dh_ND, wanted=stream
            )
        dx_ND = None
        if dh_ND is not None:
            dx_ND = _norm_backward(task.pieces, x_ND, tensors[0], inverse_N1, dh_ND, None, grads)
        return (None, dx_ND, None, None, *grads.values)


class Mlp(torch.autograd.Function):
    """Computes x + down(act(gate(h)) · up(h)) with h = norm(x).

    The first x is added only if the field `sums` of the task is True. The tensors are the weight of the norm, followed
    by the tensors of the linear layers.
    """

    @staticmethod
    def forward(ctx: Any, task: Gated, x_ND: Tensor, *tensors: Tensor) -> Tensor:
        """Return the residual stream after the layer, or the term that will be added to it, of shape (N, D)."""
        gate, up, down = task.linears
        h_ND, inverse_N1 = task.pieces.normed(x_ND, tensors[0], task.eps, task.dtype)
        gate_NF, of_gate = forward_linear(gate, tensors, h_ND)
        up_NF, of_up = forward_linear(up, tensors, h_ND)
        inner_NF = task.pieces.gated(gate_NF, up_NF, task.gelu)
        out_ND, of_down = forward_linear(down, tensors, inner_NF)
        kept = [of_gate, of_up, of_down]
        ctx.task = task
        ctx.counts = [len(each) for each in kept]
        ctx.save_for_backward(
            x_ND, inverse_N1, gate_NF, up_NF,
            *tensors, *(tensor for each in kept for tensor in saved_tensors(each)),
        )  # fmt: skip
        return x_ND + out_ND if task.sums else out_ND

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the tensors."""
        task: Gated = ctx.task
        x_ND, inverse_N1, gate_NF, up_NF, *rest = ctx.saved_tensors
        grads = Gradients(ctx.needs_input_grad[2:])
        tensors = rest[: len(grads.wanted)]
        h_ND = task.pieces.scaled(x_ND, inverse_N1, tensors[0], task.dtype)
        lit_NF, inner_NF = task.pieces.regated(gate_NF, up_NF, task.gelu)
        kept = _kept_of_each(rest[len(tensors) :], ctx.counts)
        gate, up, down = task.linears
        given_ND = given[0].to(task.dtype)
        dinner_NF = backward_linear(down, tensors, kept[2], inner_NF, given_ND, grads)
        assert dinner_NF is not None, "its gradient is requested"
        dgate_NF, dup_NF = task.pieces.gated_back(dinner_NF, lit_NF, gate_NF, up_NF, task.gelu)
        dh_ND = backward_linear(gate, tensors, kept[0], h_ND, dgate_NF, grads)
        dh_ND = backward_linear(up, tensors, kept[1], h_ND, dup_NF, grads, more_NI=dh_ND)
        assert dh_ND is not None, "its gradient is requested"
        more_ND = given[0] if task.sums else None
        dx_ND = _norm_backward(task.pieces, x_ND, tensors[0], inverse_N1, dh_ND, more_ND, grads)
        return (None, dx_ND, *grads.values)


class Sum(torch.autograd.Function):
    """Computes x + norm(y) in the type of x."""

    @staticmethod
    def forward(
        ctx: Any, pieces: LayerPieces, eps: float, x_ND: Tensor, y_ND: Tensor, weight_D: Tensor
    ) -> Tensor:
        """Return the sum, of shape (N, D)."""
        h_ND, inverse_N1 = pieces.normed(y_ND.to(x_ND.dtype), weight_D, eps, x_ND.dtype)
        ctx.pieces = pieces
        ctx.save_for_backward(y_ND, weight_D, inverse_N1)
        return h_ND.add_(x_ND)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, of y and of the weight."""
        y_ND, weight_D, inverse_N1 = ctx.saved_tensors
        grads = Gradients(ctx.needs_input_grad[4:])
        wide_ND = y_ND.to(given[0].dtype)
        dy_ND = _norm_backward(ctx.pieces, wide_ND, weight_D, inverse_N1, given[0].clone(), None, grads)
        return None, None, given[0], dy_ND.to(y_ND.dtype), *grads.values


def _kept_of_each(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Any]:
    """Split the concatenated `saved_tensors` of several layers, given the number of legs of each layer."""
    left = []
    first = 0
    for count in counts:
        left.append(kept_rows_of(tensors[first : first + 2 * count]))
        first += 2 * count
    return left


def _norm_backward(
    pieces: LayerPieces,
    x_ND: Tensor,
    weight_D: Tensor,
    inverse_N1: Tensor,
    dh_ND: Tensor,
    more_ND: Tensor | None,
    grads: Gradients,
) -> Tensor:
    """Return the gradient of a norm's input plus `more_ND`, and store the gradient of its weight. The tensor `dh_ND` is overwritten."""
    dx_ND, dweight_D = pieces.normed_back(x_ND, weight_D, inverse_N1, dh_ND, more_ND, grads.wanted[0])
    if dweight_D is not None:
        grads.values[0] = dweight_D.to(weight_D.dtype)
    return dx_ND
