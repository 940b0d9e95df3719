"""Norms, rotation and gates between the matrix products of a layer, forward and backward, as plain or compiled operations.

Every piece is written once, in plain operations that compute in place to save memory. On a CPU, pieces run unchanged.
On a GPU, each plain operation would be a kernel that reads and writes all tokens, so `torch.compile` turns a piece into
one or two kernels, for any number of tokens. Compiled pieces are tested before use (`kernels.py`), because they round
differently.

The sources are arXiv:1910.07467 (equation 4) for RMSNorm, arXiv:2002.05202 for SwiGLU, and arXiv:2104.09864 for RoPE
(in the half-split layout).

In tensor shapes, N is the number of flat tokens and T of heads of queries or of keys; D is the hidden size, F the inner
size and E the head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu as gelu_of
from torch.nn.functional import silu

from kapelle.models.fast import kernels

LEAST_WIDTH = 512
"""The hidden size from which pieces are compiled. For a tiny model, compiling would take longer than a run."""


VARIANTS = 32
"""The maximum number of compiled graphs of a piece. If there are more variants of a piece, the plain operations of the
piece are used for them."""


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


def normed_back(
    x_ND: Tensor,
    weight_D: Tensor,
    inverse_N1: Tensor,
    dh_ND: Tensor,
    more_ND: Tensor | None,
    learns: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of a norm's input plus `more_ND`, and the gradient of the norm's weight if `learns` is True.

    The tensor `dh_ND` is overwritten.
    """
    dh_ND = dh_ND.to(x_ND.dtype)
    dweight_D = (dh_ND * x_ND).mul_(inverse_N1).sum(0) if learns else None
    dh_ND.mul_(weight_D)
    pull_N1 = (dh_ND * x_ND).sum(-1, keepdim=True).mul_(inverse_N1**3).mul_(-1 / x_ND.shape[1])
    dx_ND = dh_ND.mul_(inverse_N1) if more_ND is None else torch.addcmul(more_ND, dh_ND, inverse_N1)
    return dx_ND.addcmul_(x_ND, pull_N1), dweight_D


def rotated(x_NTE: Tensor, cos_N1E: Tensor, sin_N1E: Tensor) -> Tensor:
    """Rotate each pair of features from the two halves of a head by the angle of the position."""
    half = x_NTE.shape[-1] // 2
    y_NTE = x_NTE * cos_N1E
    y_NTE[..., :half].addcmul_(x_NTE[..., half:], sin_N1E[..., :half], value=-1)
    y_NTE[..., half:].addcmul_(x_NTE[..., :half], sin_N1E[..., half:])
    return y_NTE


def turned(
    out_NTE: Tensor, weight_E: Tensor | None, cos_N1E: Tensor, sin_N1E: Tensor, eps: float, wide: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return heads in their own type, normalised if there is a weight, and rotated by their positions.

    For normalised heads, also return what the backward pass needs: the heads in the type `wide`, and their inverse root
    mean square of shape (N, T, 1).
    """
    raw_NTE = out_NTE.to(wide)
    if weight_E is None:
        return rotated(raw_NTE, cos_N1E, sin_N1E).to(out_NTE.dtype), None, None
    inverse_NT1 = inverse_of(raw_NTE, eps)
    plain_NTE = (raw_NTE * inverse_NT1).mul_(weight_E)
    return rotated(plain_NTE, cos_N1E, sin_N1E).to(out_NTE.dtype), raw_NTE, inverse_NT1


def turned_back(
    given_NTE: Tensor,
    raw_NTE: Tensor | None,
    inverse_NT1: Tensor | None,
    weight_E: Tensor | None,
    cos_N1E: Tensor,
    sin_N1E: Tensor,
    wide: torch.dtype,
    learns: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of heads in the type of `given_NTE`, and the gradient of their norm's weight if `learns` is True."""
    draw_NTE = rotated(given_NTE.to(wide), cos_N1E, -sin_N1E)
    dweight_E = None
    if raw_NTE is not None and inverse_NT1 is not None and weight_E is not None:
        if learns:
            dweight_E = (draw_NTE * raw_NTE).mul_(inverse_NT1).sum((0, 1))
        draw_NTE.mul_(weight_E)
        pull_NT1 = (draw_NTE * raw_NTE).sum(-1, keepdim=True)
        pull_NT1.mul_(inverse_NT1**3).mul_(-1 / raw_NTE.shape[-1])
        draw_NTE.mul_(inverse_NT1).addcmul_(raw_NTE, pull_NT1)
    return draw_NTE.to(given_NTE.dtype), dweight_E


def lit(gate_NF: Tensor, gelu: bool) -> Tensor:
    """Return act(gate), where act is the tanh approximation of GELU or SiLU."""
    return gelu_of(gate_NF, approximate="tanh") if gelu else silu(gate_NF)


def gated(gate_NF: Tensor, up_NF: Tensor, gelu: bool) -> Tensor:
    """Return act(gate) · up."""
    return lit(gate_NF, gelu).mul_(up_NF)


def regated(gate_NF: Tensor, up_NF: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Return the two tensors act(gate) and act(gate) · up."""
    lit_NF = lit(gate_NF, gelu)
    return lit_NF, lit_NF * up_NF


def gated_back(
    dinner_NF: Tensor, lit_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, gelu: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up projection. The tensors `dinner_NF` and `lit_NF` are overwritten."""
    dup_NF = torch.mul(dinner_NF, lit_NF, out=lit_NF)
    dgate_NF = dinner_NF.mul_(up_NF)
    if gelu:
        torch.ops.aten.gelu_backward.grad_input(dgate_NF, gate_NF, approximate="tanh", grad_input=dgate_NF)
    else:
        torch.ops.aten.silu_backward.grad_input(dgate_NF, gate_NF, grad_input=dgate_NF)
    return dgate_NF, dup_NF


class LayerPieces(NamedTuple):
    """The operations of a layer between its matrix products, either as plain functions or compiled."""

    normed: Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]] = normed
    scaled: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor] = scaled
    normed_back: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor | None]
    ] = normed_back
    turned: Callable[
        [Tensor, Tensor | None, Tensor, Tensor, float, torch.dtype],
        tuple[Tensor, Tensor | None, Tensor | None],
    ] = turned
    turned_back: Callable[
        [Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor, torch.dtype, bool],
        tuple[Tensor, Tensor | None],
    ] = turned_back
    gated: Callable[[Tensor, Tensor, bool], Tensor] = gated
    regated: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]] = regated
    gated_back: Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]] = gated_back


PLAIN = LayerPieces()


@cache
def compiled() -> LayerPieces:
    """Return the compiled pieces. Each piece is compiled once for any number of tokens."""
    pieces: tuple[Callable[..., Any], ...] = PLAIN
    return LayerPieces._make(map(_compiled, pieces))


def _compiled(piece: Callable[..., Any]) -> Callable[..., Any]:
    # Sampling, training, single rows, single heads and each compute type have separate graphs.
    compiler: Any = torch.compile
    known = "recompile_limit" in signature(compiler).parameters
    made = compiler(piece, dynamic=True, **({"recompile_limit": VARIANTS} if known else {}))

    def computed(*given: Any) -> Any:
        # Autocast, which is on only in forward passes, would double the number of graphs. Autograd functions record history
        # themselves; the compiler would inspect the history of its arguments.
        with torch.autocast(given[0].device.type, enabled=False):
            return made(*(each.detach() if isinstance(each, Tensor) else each for each in given))

    return computed


def pieces_for(x_ND: Tensor, dtype: torch.dtype, head_size: int) -> LayerPieces:
    """Return the pieces for layers that compute in `dtype`: compiled pieces on CUDA if they pass their test, else plain pieces."""
    device, width = x_ND.device, x_ND.shape[1]
    if device.type != "cuda" or torch.version.cuda is None or width < LEAST_WIDTH or not kernels.has_triton():
        return PLAIN
    where = (device, x_ND.dtype, dtype, f"width {width}", f"heads of {head_size}")
    sizes = (width, head_size)
    taken = kernels.holds(
        "compiled pieces of layers", where, lambda: trial(device, x_ND.dtype, dtype, *sizes)
    )
    return compiled() if taken else PLAIN


def trial(
    device: torch.device, wide: torch.dtype, dtype: torch.dtype, width: int, head_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results of every piece for 37 tokens, compiled and plain. Backward pieces run in the thread of autograd."""

    def drawn(*shape: int, seed: int, kind: torch.dtype = wide) -> Tensor:
        return kernels.drawn(*shape, seed=seed, device=device, dtype=kind)

    x_ND, more_ND, weight_D = drawn(37, width, seed=0), drawn(37, width, seed=1), drawn(width, seed=2)
    out_NTE, given_NTE = drawn(2, 37, 4, head_size, seed=3, kind=dtype)
    cos_N1E, sin_N1E = drawn(2, 37, 1, head_size, seed=4)
    weight_E = drawn(head_size, seed=5)
    gate_NF, up_NF, dinner_NF, dh_ND = drawn(4, 37, width, seed=6, kind=dtype)
    made: list[list[Tensor | None]] = []

    def forward(pieces: LayerPieces) -> None:
        made.append(
            [
                *pieces.normed(x_ND, weight_D, 1e-6, dtype),
                *pieces.turned(out_NTE, None, cos_N1E, sin_N1E, 1e-6, wide),
                *pieces.turned(out_NTE, weight_E, cos_N1E, sin_N1E, 1e-6, wide),
                *(pieces.gated(gate_NF, up_NF, gelu) for gelu in (False, True)),
            ]
        )

    def backward(pieces: LayerPieces) -> None:
        inverse_N1, inverse_NT1 = inverse_of(x_ND, 1e-6), inverse_of(out_NTE.to(wide), 1e-6)
        turns = cos_N1E, sin_N1E, wide
        raw_NTE = out_NTE.to(wide)
        own: list[Tensor | None] = [pieces.scaled(x_ND, inverse_N1, weight_D, dtype)]
        for gelu in (False, True):
            lit_NF, inner_NF = pieces.regated(gate_NF, up_NF, gelu)
            own += (lit_NF.clone(), inner_NF)
            own += pieces.gated_back(dinner_NF.clone(), lit_NF, gate_NF, up_NF, gelu)
        for learns in (False, True):
            own += pieces.turned_back(given_NTE, None, None, None, *turns, learns)
            own += pieces.turned_back(given_NTE, raw_NTE, inverse_NT1, weight_E, *turns, learns)
            for more in (None, more_ND):
                own += pieces.normed_back(x_ND, weight_D, inverse_N1, dh_ND.clone(), more, learns)
        made.append(own)

    for pass_ in (forward, backward):
        for pieces in (compiled(), PLAIN):
            if pass_ is forward:
                with torch.no_grad():
                    forward(pieces)
            else:
                _InBackward.apply(
                    x_ND.detach().requires_grad_(True), partial(backward, pieces)
                ).sum().backward()  # type: ignore[no-untyped-call]
    for one, other in zip(made[0] + made[2], made[1] + made[3], strict=True):
        if one is not None and other is not None:
            yield one, other


class _InBackward(torch.autograd.Function):
    """Runs a function in autograd's backward thread of this device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        ctx.work()
        return given[0], None
