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
    backward_linears,
    forward_linears,
    kept_rows_of,
    plain_product,
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
        *heads, x_ND = Project.apply(task, x_ND, cos_N1E, sin_N1E, *tensors)  # type: ignore[no-untyped-call]
        gathered_NHE = attend(number, *heads)
        del heads
        tensors = [self.gain(layer.post_attention_layernorm)]
        if self.family.sandwiched:
            tensors += map(self.gain, (layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm))
        linears = tuple(
            order_of(each, x_ND.shape, tensors)
            for each in (a.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        task_of_rest = Rest(linears, self.eps, dtype, self.family.gelu, self.family.sandwiched, pieces)
        out_ND: Tensor = Finish.apply(task_of_rest, x_ND, gathered_NHE.flatten(1), *tensors)  # type: ignore[no-untyped-call]
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


class Rest(NamedTuple):
    """The second half of a layer: output projection, sum, norm, gate and up projection, down projection, sum."""

    linears: tuple[Linear, ...]
    """The linear layers of output, gate, up and down projection."""
    eps: float
    dtype: torch.dtype
    gelu: bool
    """Whether the activation of the gate is GELU."""
    sandwiched: bool
    """Whether both terms are normalised before they are added. The weights of these norms are the first and the third
    in the list of tensors, and that of the norm between them is the second."""
    pieces: LayerPieces = PLAIN


class Project(torch.autograd.Function):
    """Computes the queries, keys and values of one layer from x.

    The tensors are the weight of the norm, the weights of the heads' norms, and the tensors of the linear layers, in
    this order. The input x is also a result, so that its gradient from the second half is added in this step.
    """

    @staticmethod
    def forward(
        ctx: Any, task: Heads, x_ND: Tensor, cos_N1E: Tensor, sin_N1E: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values in the compute type, of shapes (N, H, E), (N, J, E) and (N, J, E), and x."""
        size = cos_N1E.shape[-1]
        h_ND, inverse_N1 = task.pieces.normed(x_ND, tensors[0], task.eps, task.dtype)
        outs, kept = forward_linears(task.linears, tensors, h_ND)
        q, k, v = (out_NO.view(len(h_ND), -1, size) for out_NO in outs)
        weights = tensors[1:3] if task.normed else (None, None)
        (q, k), raw = task.pieces.turned((q, k), weights, cos_N1E, sin_N1E, task.eps, x_ND.dtype)
        ctx.task = task
        ctx.save_for_backward(x_ND, cos_N1E, sin_N1E, inverse_N1, *raw, *tensors, *saved_tensors(kept))
        return q, k, v, x_ND

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the tensors."""
        task: Heads = ctx.task
        x_ND, cos_N1E, sin_N1E, inverse_N1, *rest = ctx.saved_tensors
        raw, rest = rest[:4], rest[4:]
        grads = Gradients(ctx.needs_input_grad[4:])
        tensors, kept = rest[: len(grads.wanted)], kept_rows_of(rest[len(grads.wanted) :])
        h_ND = task.pieces.scaled(x_ND, inverse_N1, tensors[0], task.dtype)
        weights = tensors[1:3] if task.normed else (None, None)
        learns = [task.normed and grads.wanted[number] for number in (1, 2)]
        outs, own = task.pieces.turned_back(
            given[:2], raw, weights, cos_N1E, sin_N1E, task.eps, x_ND.dtype, learns
        )
        for number, own_E in enumerate(own, 1):
            if own_E is not None:
                grads.values[number] = own_E.to(tensors[number].dtype)
        each_NO = [out.reshape(len(h_ND), -1) for out in (*outs, given[2])]
        stream = ctx.needs_input_grad[1] or grads.wanted[0]
        dh_ND = backward_linears(task.linears, tensors, kept, h_ND, each_NO, grads, wanted=stream)
        dx_ND = None
        if dh_ND is not None:
            more_ND = None if task.pieces is PLAIN else given[3]
            dx_ND, _ = _norm_backward(task, x_ND, tensors, 0, inverse_N1, dh_ND, more_ND, grads)
            if more_ND is None:  # in the order of autograd
                dx_ND.add_(given[3])
        return (None, dx_ND, None, None, *grads.values)


class Finish(torch.autograd.Function):
    """Computes y = x + o(attended) and y + down(act(gate(h)) · up(h)) with h = norm(y).

    The tensors are the weights of the norms, followed by the tensors of the linear layers.
    """

    @staticmethod
    def forward(ctx: Any, task: Rest, x_ND: Tensor, attended_NO: Tensor, *tensors: Tensor) -> Tensor:
        """Return the residual stream after the layer, of shape (N, D)."""
        pieces, (output, *gates, down) = task.pieces, task.linears
        (term_ND,), of_output = forward_linears((output,), tensors, attended_NO, plain_product)
        saved: list[Tensor] = []
        if task.sandwiched:
            saved.append(term_ND)
            term_ND, inverse_N1 = pieces.normed(term_ND.to(x_ND.dtype), tensors[0], task.eps, x_ND.dtype)
            saved.append(inverse_N1)
        y_ND, h_ND, inverse_N1 = pieces.sum_normed(
            x_ND, term_ND, tensors[task.sandwiched], task.eps, task.dtype
        )
        (gate_NF, up_NF), of_gates = forward_linears(gates, tensors, h_ND)
        inner_NF = pieces.gated(gate_NF, up_NF, task.gelu)
        (out_ND,), of_down = forward_linears((down,), tensors, inner_NF)
        if task.sandwiched:
            saved.append(out_ND)
            out_ND, last_N1 = pieces.normed(out_ND.to(x_ND.dtype), tensors[2], task.eps, x_ND.dtype)
            saved.append(last_N1)
        ctx.task = task
        kept = (of_output, of_gates, of_down)
        ctx.counts = [len(saved), *(2 * len(each) for each in kept)]
        ctx.save_for_backward(
            attended_NO, y_ND, inverse_N1, gate_NF, up_NF,
            *tensors, *saved, *(tensor for each in kept for tensor in saved_tensors(each)),
        )  # fmt: skip
        return y_ND + out_ND

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, of the attention outputs and of the tensors."""
        task: Rest = ctx.task
        attended_NO, y_ND, inverse_N1, gate_NF, up_NF, *rest = ctx.saved_tensors
        pieces, (output, *gates, down) = task.pieces, task.linears
        grads = Gradients(ctx.needs_input_grad[3:])
        tensors, rest = rest[: len(grads.wanted)], iter(rest[len(grads.wanted) :])
        saved, *kept = ([next(rest) for _ in range(count)] for count in ctx.counts)
        of_output, of_gates, of_down = map(kept_rows_of, kept)

        def term(first: int, norm: int, given_ND: Tensor) -> Tensor:
            """Return the gradient of a term before its norm, in the compute type."""
            term_ND, inverse_N1 = saved[first : first + 2]
            wide_ND = term_ND.to(given_ND.dtype)
            _, narrow_ND = _norm_backward(
                task, wide_ND, tensors, norm, inverse_N1, given_ND.clone(), None, grads
            )
            return narrow_ND

        h_ND = pieces.scaled(y_ND, inverse_N1, tensors[task.sandwiched], task.dtype)
        lit_NF, inner_NF = pieces.regated(gate_NF, up_NF, task.gelu)
        given_ND = term(2, 2, given[0]) if task.sandwiched else given[0].to(task.dtype)
        dinner_NF = backward_linears((down,), tensors, of_down, inner_NF, [given_ND], grads)
        assert dinner_NF is not None, "its gradient is requested"
        del inner_NF
        each_NF = pieces.gated_back(dinner_NF, lit_NF, gate_NF, up_NF, task.gelu)
        dh_ND = backward_linears(gates, tensors, of_gates, h_ND, each_NF, grads)
        assert dh_ND is not None, "its gradient is requested"
        dx_ND, given_ND = _norm_backward(
            task, y_ND, tensors, task.sandwiched, inverse_N1, dh_ND, given[0], grads
        )
        if task.sandwiched:
            given_ND = term(0, 0, dx_ND)
        dattended_NO = backward_linears(
            (output,), tensors, of_output, attended_NO, [given_ND], grads,
            wanted=ctx.needs_input_grad[2], multiply=plain_product,
        )  # fmt: skip
        return (None, dx_ND, dattended_NO, *grads.values)


def _norm_backward(
    task: Heads | Rest,
    x_ND: Tensor,
    tensors: Sequence[Tensor],
    place: int,
    inverse_N1: Tensor,
    dh_ND: Tensor,
    more_ND: Tensor | None,
    grads: Gradients,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a norm's input plus `more_ND`, and the same in the compute type.

    The gradient of the weight of the norm, which is the tensor at `place`, is stored. The tensor `dh_ND` is overwritten.
    """
    learns = grads.wanted[place]
    dx_ND, narrow_ND, dweight_D = task.pieces.normed_back(
        x_ND, tensors[place], inverse_N1, dh_ND, more_ND, task.dtype, learns
    )
    if dweight_D is not None:
        grads.values[place] = dweight_D.to(tensors[place].dtype)
    return dx_ND, narrow_ND
