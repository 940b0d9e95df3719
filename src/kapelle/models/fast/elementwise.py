"""Norms, rotation and gates between the matrix products of a layer, forward and backward, as plain operations or kernels.

Every piece is written in plain operations that compute in place to save memory. On a CPU, pieces run unchanged. On a
GPU, each plain operation would be a kernel that reads and writes all tokens, so each piece is one Triton kernel
(layer_kernels.py). Kernels are tested before use (`kernels.py`), because they round differently.

The sources are arXiv:1910.07467 (equation 4) for RMSNorm, arXiv:2002.05202 for SwiGLU, and arXiv:2104.09864 for RoPE
(in the half-split layout).

In tensor shapes, N is the number of flat tokens, H of query heads, J of key heads and T of heads of either kind; D is
the hidden size, F the inner size and E the head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu as gelu_of
from torch.nn.functional import silu

from kapelle.models.fast import kernels


def inverse_of(x: Tensor, eps: float) -> Tensor:
    """Return 1 / root mean square over the last axis, which is kept as a dimension of size 1."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def scaled(x_ND: Tensor, inverse_N1: Tensor, weight_D: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the normalised x in the compute type, given its inverse root mean square."""
    return (x_ND * inverse_N1).mul_(weight_D).to(dtype)


def normed(x_ND: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the normalised x in the compute type, and the inverse root mean square of shape (N, 1)."""
    inverse_N1 = inverse_of(x_ND, eps)
    return scaled(x_ND, inverse_N1, weight_D, dtype), inverse_N1


def sum_normed(
    x_ND: Tensor, y_ND: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + y in the type of x, the normalised sum in the compute type, and its inverse root mean square."""
    sum_ND = x_ND + y_ND
    return sum_ND, *normed(sum_ND, weight_D, eps, dtype)


def normed_back(
    x_ND: Tensor,
    weight_D: Tensor,
    inverse_N1: Tensor,
    dh_ND: Tensor,
    more_ND: Tensor | None,
    dtype: torch.dtype,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradient of a norm's input plus `more_ND`, and the same in the compute type.

    Also return the gradient of the norm's weight if `learns` is True. The tensor `dh_ND` is overwritten.
    """
    dh_ND = dh_ND.to(x_ND.dtype)
    dweight_D = (dh_ND * x_ND).mul_(inverse_N1).sum(0) if learns else None
    dh_ND.mul_(weight_D)
    pull_N1 = (dh_ND * x_ND).sum(-1, keepdim=True).mul_(inverse_N1**3).mul_(-1 / x_ND.shape[1])
    dx_ND = dh_ND.mul_(inverse_N1) if more_ND is None else torch.addcmul(more_ND, dh_ND, inverse_N1)
    dx_ND.addcmul_(x_ND, pull_N1)
    return dx_ND, dx_ND.to(dtype), dweight_D


def rotated(x_NTE: Tensor, cos_N1E: Tensor, sin_N1E: Tensor) -> Tensor:
    """Rotate each pair of features from the two halves of a head by the angle of the position."""
    half = x_NTE.shape[-1] // 2
    y_NTE = x_NTE * cos_N1E
    y_NTE[..., :half].addcmul_(x_NTE[..., half:], sin_N1E[..., :half], value=-1)
    y_NTE[..., half:].addcmul_(x_NTE[..., :half], sin_N1E[..., half:])
    return y_NTE


def turned(
    heads: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    cos_N1E: Tensor,
    sin_N1E: Tensor,
    eps: float,
    wide: torch.dtype,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return queries and keys in their own type, normalised if there are weights, and rotated by their positions.

    Also return what the backward pass of normalised heads needs: for queries and for keys, the heads in the type `wide`
    and their inverse root mean square of shape (N, T, 1).
    """
    made: list[Tensor] = []
    kept: list[Tensor | None] = []
    for out_NTE, weight_E in zip(heads, weights, strict=True):
        raw_NTE = out_NTE.to(wide)
        if weight_E is None:
            kept += (None, None)
            made.append(rotated(raw_NTE, cos_N1E, sin_N1E).to(out_NTE.dtype))
        else:
            inverse_NT1 = inverse_of(raw_NTE, eps)
            plain_NTE = (raw_NTE * inverse_NT1).mul_(weight_E)
            kept += (raw_NTE, inverse_NT1)
            made.append(rotated(plain_NTE, cos_N1E, sin_N1E).to(out_NTE.dtype))
    return made, kept


def turned_back(
    given: Sequence[Tensor],
    kept: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    cos_N1E: Tensor,
    sin_N1E: Tensor,
    eps: float,
    wide: torch.dtype,
    learns: Sequence[bool],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the gradients of queries and keys, and those of the weights of their norms, which are None unless they learn."""
    made: list[Tensor] = []
    own: list[Tensor | None] = []
    for number, (given_NTE, weight_E) in enumerate(zip(given, weights, strict=True)):
        draw_NTE = rotated(given_NTE.to(wide), cos_N1E, -sin_N1E)
        raw_NTE, inverse_NT1 = kept[2 * number : 2 * number + 2]
        dweight_E = None
        if raw_NTE is not None and inverse_NT1 is not None and weight_E is not None:
            if learns[number]:
                dweight_E = (draw_NTE * raw_NTE).mul_(inverse_NT1).sum((0, 1))
            draw_NTE.mul_(weight_E)
            pull_NT1 = (draw_NTE * raw_NTE).sum(-1, keepdim=True)
            pull_NT1.mul_(inverse_NT1**3).mul_(-1 / raw_NTE.shape[-1])
            draw_NTE.mul_(inverse_NT1).addcmul_(raw_NTE, pull_NT1)
        made.append(draw_NTE.to(given_NTE.dtype))
        own.append(dweight_E)
    return made, own


def lit(gate_NF: Tensor, gelu: bool) -> Tensor:
    """Return act(gate), where act is the tanh approximation of GELU or SiLU."""
    return gelu_of(gate_NF, approximate="tanh") if gelu else silu(gate_NF)


def gated(gate_NF: Tensor, up_NF: Tensor, gelu: bool) -> Tensor:
    """Return act(gate) · up."""
    return lit(gate_NF, gelu).mul_(up_NF)


def regated(gate_NF: Tensor, up_NF: Tensor, gelu: bool) -> tuple[Tensor | None, Tensor]:
    """Return act(gate), or None if `gated_back` does not need it, and act(gate) · up."""
    lit_NF = lit(gate_NF, gelu)
    return lit_NF, lit_NF * up_NF


def gated_back(
    dinner_NF: Tensor, lit_NF: Tensor | None, gate_NF: Tensor, up_NF: Tensor, gelu: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up projection. The tensors `dinner_NF` and `lit_NF` are overwritten."""
    lit_NF = lit(gate_NF, gelu) if lit_NF is None else lit_NF
    dup_NF = torch.mul(dinner_NF, lit_NF, out=lit_NF)
    dgate_NF = dinner_NF.mul_(up_NF)
    if gelu:
        torch.ops.aten.gelu_backward.grad_input(dgate_NF, gate_NF, approximate="tanh", grad_input=dgate_NF)
    else:
        torch.ops.aten.silu_backward.grad_input(dgate_NF, gate_NF, grad_input=dgate_NF)
    return dgate_NF, dup_NF


class LayerPieces(NamedTuple):
    """The operations of a layer between its matrix products, either as plain functions or as kernels."""

    normed: Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]] = normed
    sum_normed: Callable[[Tensor, Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor, Tensor]] = (
        sum_normed
    )
    scaled: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor] = scaled
    normed_back: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype, bool],
        tuple[Tensor, Tensor, Tensor | None],
    ] = normed_back
    turned: Callable[
        [Sequence[Tensor], Sequence[Tensor | None], Tensor, Tensor, float, torch.dtype],
        tuple[list[Tensor], list[Tensor | None]],
    ] = turned
    turned_back: Callable[
        [
            Sequence[Tensor],
            Sequence[Tensor | None],
            Sequence[Tensor | None],
            Tensor,
            Tensor,
            float,
            torch.dtype,
            Sequence[bool],
        ],
        tuple[list[Tensor], list[Tensor | None]],
    ] = turned_back
    gated: Callable[[Tensor, Tensor, bool], Tensor] = gated
    regated: Callable[[Tensor, Tensor, bool], tuple[Tensor | None, Tensor]] = regated
    gated_back: Callable[[Tensor, Tensor | None, Tensor, Tensor, bool], tuple[Tensor, Tensor]] = gated_back


PLAIN = LayerPieces()


# The same pieces as operations that are one kernel each.


def _norm_back(
    x_ND: Tensor,
    weight_D: Tensor,
    inverse_N1: Tensor,
    dh_ND: Tensor,
    more_ND: Tensor | None,
    dtype: torch.dtype,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx_ND, narrow_ND, dweight_D = normed_back(
        x_ND, weight_D, inverse_N1, dh_ND.clone(), more_ND, dtype, learns
    )
    if narrow_ND is dx_ND:  # the results of an operation are different tensors
        narrow_ND = x_ND.new_empty(0)
    return dx_ND, narrow_ND, weight_D.new_empty(0) if dweight_D is None else dweight_D


def _turn(
    q_NHE: Tensor,
    k_NJE: Tensor,
    q_weight_E: Tensor | None,
    k_weight_E: Tensor | None,
    cos_N1E: Tensor,
    sin_N1E: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    weights = (q_weight_E, k_weight_E)
    (one, other), _ = turned((q_NHE, k_NJE), weights, cos_N1E, sin_N1E, eps, cos_N1E.dtype)
    return one, other


def _turn_back(
    dq_NHE: Tensor,
    dk_NJE: Tensor,
    q_NHE: Tensor,
    k_NJE: Tensor,
    q_weight_E: Tensor | None,
    k_weight_E: Tensor | None,
    cos_N1E: Tensor,
    sin_N1E: Tensor,
    eps: float,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raw = [each.to(cos_N1E.dtype) for each in (q_NHE, k_NJE)]
    kept = [tensor for each in raw for tensor in (each, inverse_of(each, eps))]
    weights = (q_weight_E, k_weight_E)
    (one, other), own = turned_back(
        (dq_NHE, dk_NJE), kept, weights, cos_N1E, sin_N1E, eps, cos_N1E.dtype, (learns, learns)
    )
    dq_weight_E, dk_weight_E = (cos_N1E.new_empty(0) if each is None else each for each in own)
    return one, other, dq_weight_E, dk_weight_E


_operation = partial(kernels.operation, module="kapelle.models.fast.layer_kernels")
_NORM = _operation("norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)", normed)
_ADD_NORM = _operation(
    "add_norm(Tensor x, Tensor y, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    sum_normed,
)
_NORM_AGAIN = _operation(
    "norm_again(Tensor x, Tensor inverse, Tensor weight, ScalarType dtype) -> Tensor", scaled
)
_NORM_BACK = _operation(
    "norm_back(Tensor x, Tensor weight, Tensor inverse, Tensor dh, Tensor? more, ScalarType dtype, bool learns) "
    "-> (Tensor, Tensor, Tensor)",
    _norm_back,
)
_TURN = _operation(
    "turn(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps) "
    "-> (Tensor, Tensor)",
    _turn,
)
_TURN_BACK = _operation(
    "turn_back(Tensor dq, Tensor dk, Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, "
    "float eps, bool learns) -> (Tensor, Tensor, Tensor, Tensor)",
    _turn_back,
)
_GATE = _operation("gate(Tensor gate, Tensor up, bool gelu) -> Tensor", gated)
_GATE_BACK = _operation(
    "gate_back(Tensor dinner, Tensor gate, Tensor up, bool gelu) -> (Tensor, Tensor)",
    lambda dinner, gate, up, gelu: gated_back(dinner.clone(), None, gate, up, gelu),
)


def _normed_back(
    x_ND: Tensor,
    weight_D: Tensor,
    inverse_N1: Tensor,
    dh_ND: Tensor,
    more_ND: Tensor | None,
    dtype: torch.dtype,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    dx_ND, narrow_ND, dweight_D = _NORM_BACK(x_ND, weight_D, inverse_N1, dh_ND, more_ND, dtype, learns)
    return dx_ND, dx_ND if dtype == x_ND.dtype else narrow_ND, dweight_D if learns else None


def _turned(
    heads: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    cos_N1E: Tensor,
    sin_N1E: Tensor,
    eps: float,
    _wide: torch.dtype,
) -> tuple[list[Tensor], list[Tensor | None]]:
    # The backward pass computes the inverse root mean squares again.
    kept = [None if weights[0] is None else tensor for each in heads for tensor in (each, None)]
    return list(_TURN(*heads, *weights, cos_N1E, sin_N1E, eps)), kept


def _turned_back(
    given: Sequence[Tensor],
    kept: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    cos_N1E: Tensor,
    sin_N1E: Tensor,
    eps: float,
    _wide: torch.dtype,
    learns: Sequence[bool],
) -> tuple[list[Tensor], list[Tensor | None]]:
    heads = given if kept[0] is None else kept[::2]
    *made, one, other = _TURN_BACK(*given, *heads, *weights, cos_N1E, sin_N1E, eps, any(learns))
    return made, [own if learn else None for own, learn in zip((one, other), learns, strict=True)]


KERNELS = LayerPieces(
    _NORM,
    _ADD_NORM,
    _NORM_AGAIN,
    _normed_back,
    _turned,
    _turned_back,
    _GATE,
    lambda gate_NF, up_NF, gelu: (None, _GATE(gate_NF, up_NF, gelu)),
    lambda dinner_NF, _lit_NF, gate_NF, up_NF, gelu: _GATE_BACK(dinner_NF, gate_NF, up_NF, gelu),
)
"""The pieces as operations that are one kernel each on CUDA."""


def pieces_for(x_ND: Tensor, dtype: torch.dtype, head_size: int) -> LayerPieces:
    """Return the pieces for layers that compute in `dtype`: kernels on CUDA if they pass their test, else plain pieces."""
    device, width = x_ND.device, x_ND.shape[1]
    if x_ND.dtype != torch.float32 or not kernels.runs_operations(device, dtype):
        return PLAIN
    where = (device, dtype, f"width {width}", f"heads of {head_size}")
    taken = kernels.holds(
        "Triton's norms, rotations and gates", where, lambda: trial(device, dtype, width, head_size)
    )
    return KERNELS if taken else PLAIN


def trial(
    device: torch.device, dtype: torch.dtype, width: int, head_size: int, rows: int = 37
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results of every piece for a few tokens, as kernels and plain."""

    def drawn(*shape: int, seed: int, kind: torch.dtype = torch.float32) -> Tensor:
        return kernels.drawn(*shape, seed=seed, device=device, dtype=kind)

    x_ND, more_ND, weight_D = drawn(rows, width, seed=0), drawn(rows, width, seed=1), drawn(width, seed=2)
    y_ND, dh_ND, gate_NF, up_NF, dinner_NF = drawn(5, rows, width, seed=3, kind=dtype)
    heads, given = (
        [drawn(rows, many, head_size, seed=seed + many, kind=dtype) for many in (9, 2)] for seed in (4, 5)
    )
    cos_N1E, sin_N1E = drawn(2, rows, 1, head_size, seed=6)
    inverse_N1, weights = inverse_of(x_ND, 1e-6), [*drawn(2, head_size, seed=7)]
    weightless: list[Tensor | None] = [None, None]

    def computed(pieces: LayerPieces) -> Iterator[Tensor | None]:
        yield from pieces.normed(x_ND, weight_D, 1e-6, dtype)
        yield from pieces.sum_normed(x_ND, y_ND, weight_D, 1e-6, dtype)
        yield pieces.scaled(x_ND, inverse_N1, weight_D, dtype)
        for more, learns in ((None, True), (more_ND, False)):
            yield from pieces.normed_back(x_ND, weight_D, inverse_N1, dh_ND.clone(), more, dtype, learns)
        for own in (weights, weightless):
            made, kept = pieces.turned(heads, own, cos_N1E, sin_N1E, 1e-6, torch.float32)
            both = [own is weights] * 2
            back, learned = pieces.turned_back(given, kept, own, cos_N1E, sin_N1E, 1e-6, torch.float32, both)
            yield from (*made, *back, *learned)
        for gelu in (False, True):
            yield pieces.gated(gate_NF, up_NF, gelu)
            lit_NF, inner_NF = pieces.regated(gate_NF, up_NF, gelu)
            yield inner_NF
            yield from pieces.gated_back(dinner_NF.clone(), lit_NF, gate_NF, up_NF, gelu)

    for one, other in zip(computed(KERNELS), computed(PLAIN), strict=True):
        if one is not None and other is not None:
            yield one, other
