"""The operations between the matrix products of a decoding step: definitions, plain implementations and a test.

Each operation is one kernel on a GPU (decode_kernels.py). Here, the same operations are written with plain operations
of torch, which are the implementation for all other devices and the reference for tests.

All operations receive the table of paged_cache.py, from which they read the adapter and the blocks of each row. An
adapter's update of a product y = Wx is B·A·x. The factor A is applied in the operation that computes x, and the factor
B, which includes the scale, in the operation that reads y. The product A·x (`low`) is in float32. A row without an
adapter has no update.

In tensor shapes, S is the number of slots, W the width of the table, D the hidden size, F the inner size, E the head
size, H and J the numbers of query heads and key heads, O the number of features of all query heads, P of the parts into
which the tokens of a row are divided, and G of adapters. The letters r and q are the ranks of all factors that are
applied together; a factor of one layer has the shape (G, rank, features) for A and for the transposed B.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu as gelu_of
from torch.nn.functional import silu

from kapelle.models.fast import kernels
from kapelle.models.fast.elementwise import rotated
from kapelle.models.fast.kv_cache import BLOCK
from kapelle.models.fast.paged_cache import ADAPTER, BLOCKS, COUNT, PREFIX, SHARED


def join_norm(
    x_SD: Tensor, rows_SW: Tensor, y_SD: Tensor | None, bias_D: Tensor | None, low_Sr: Tensor | None,
    up_GrD: Tensor | None, post_D: Tensor | None, gain_D: Tensor, down_GqD: Tensor | None, eps: float, centred: bool,
    *, h_SD: Tensor, next_Sq: Tensor | None,
) -> None:  # fmt: skip
    """Add a product with its bias and its update to the residual stream, normalise the sum, and apply the next factor A.

    Without `y_SD`, nothing is added. With `post_D`, the product is normalised before it is added. The function writes
    `x_SD`, the normalised sum `h_SD`, and `next_Sq`.
    """
    if y_SD is not None:
        y_SD = y_SD.float() if bias_D is None else y_SD.float() + bias_D
        y_SD = y_SD + _raised(low_Sr, up_GrD, rows_SW)
        x_SD += y_SD if post_D is None else _normed(y_SD, post_D, eps, centred)
    h_SD.copy_(_normed(x_SD, gain_D, eps, centred))
    if down_GqD is not None and next_Sq is not None:
        lower(h_SD, rows_SW, down_GqD, low_Sr=next_Sq)


def turn_heads(
    q_SO: Tensor, k_SO: Tensor, v_SO: Tensor, rows_SW: Tensor, where_1: Tensor, cos_SE: Tensor, sin_SE: Tensor,
    bias_q: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None, low_Sr: Tensor | None, up_q: Tensor | None,
    up_k: Tensor | None, up_v: Tensor | None, gain_q: Tensor | None, gain_k: Tensor | None, eps: float, centred: bool,
    layer: int, layers: int, *, out_SO: Tensor,
) -> None:  # fmt: skip
    """Add biases and updates to queries, keys and values, normalise and rotate heads, and store keys and values.

    Queries are written to `out_SO`; keys and values are written to the slot of each row's newest token in the blocks at
    the address `where_1`.
    """
    size = cos_SE.shape[1]
    lows = (None,) * 3 if low_Sr is None else low_Sr.chunk(3, dim=1)
    turned = []
    for y_SO, bias_O, low, up, gain_E in zip(
        (q_SO, k_SO, v_SO),
        (bias_q, bias_k, bias_v),
        lows,
        (up_q, up_k, up_v),
        (gain_q, gain_k, None),
        strict=True,
    ):
        wide_SO = y_SO.float() if bias_O is None else y_SO.float() + bias_O
        y_STE = (wide_SO + _raised(low, up, rows_SW)).unflatten(1, (-1, size))
        if gain_E is not None:
            y_STE = _normed(y_STE, gain_E, eps, centred)
        turned.append(y_STE)
    q_SHE, k_SJE = (rotated(y_STE, cos_SE[:, None], sin_SE[:, None]) for y_STE in turned[:2])
    out_SO.copy_(q_SHE.flatten(1))
    kv = _blocks_at(where_1, rows_SW, layers, k_SJE.shape[1], size, out_SO.dtype)
    own_S = rows_SW[:, COUNT].long() - 1
    place_S1 = (BLOCKS + rows_SW[:, SHARED].long() + own_S // BLOCK)[:, None]
    block_S = rows_SW.gather(1, place_S1)[:, 0].long()
    kv[block_S, layer, 0, :, own_S % BLOCK] = k_SJE.to(kv.dtype)
    kv[block_S, layer, 1, :, own_S % BLOCK] = turned[2].to(kv.dtype)


def attend(
    q_SO: Tensor, rows_SW: Tensor, where_1: Tensor, key_heads: int, window: int, cap: float, scale: float, layer: int,
    layers: int, *, part_SHPE: Tensor, log_SHP: Tensor,
) -> None:  # fmt: skip
    """Compute the attention of each row's newest token over parts of the row's blocks.

    The function writes the output of each part and the logarithm of the part's sum of weights. A `window` of 0 stands
    for all tokens, and a `cap` of 0 for scores without a soft cap.
    """
    slots, _, parts, size = part_SHPE.shape
    kv = _blocks_at(where_1, rows_SW, layers, key_heads, size, q_SO.dtype)
    shared_S1, prefix_S1, count_S1 = (rows_SW[:, column, None].long() for column in (SHARED, PREFIX, COUNT))
    blocks_S1 = shared_S1 + -(-count_S1 // BLOCK)
    most = int(blocks_S1.max())
    m_1M, b_B = torch.arange(most)[None], torch.arange(BLOCK)
    own_SM = m_1M - shared_S1
    visible_SM = torch.where(own_SM < 0, prefix_S1 - m_1M * BLOCK, count_S1 - own_SM * BLOCK)
    at_SM = torch.where(own_SM < 0, m_1M * BLOCK, prefix_S1 + own_SM * BLOCK)
    position_S1 = prefix_S1 + count_S1 - 1
    seen_SMB = b_B < visible_SM[..., None]
    start_S1 = torch.zeros_like(position_S1)
    if window:
        seen_SMB &= at_SM[..., None] + b_B > (position_S1 - window)[..., None]
        far_S1 = (position_S1 - window + 1).clamp(min=0)
        start_S1 = torch.where(
            far_S1 < prefix_S1, far_S1 // BLOCK, shared_S1 + (far_S1 - prefix_S1).clamp(min=0) // BLOCK
        )
    each_S1 = -(-(blocks_S1 - start_S1) // parts)
    part_SM = torch.where(m_1M < start_S1, -1, (m_1M - start_S1) // each_S1)
    keys, values = kv[rows_SW[:, BLOCKS : BLOCKS + most].long(), layer].movedim(2, 0).float()  # S, M, J, B, E
    q_SJUE = q_SO.float().view(slots, key_heads, -1, size)
    score_SJUMB = torch.einsum("sjue,smjbe->sjumb", q_SJUE, keys) * scale
    score_SJUMB = torch.tanh(score_SJUMB / cap) * cap if cap else score_SJUMB
    for part in range(parts):
        there_SMB = seen_SMB & (part_SM == part)[..., None]
        own_SJUMB = score_SJUMB.masked_fill(~there_SMB[:, None, None], -math.inf)
        log_SJU = own_SJUMB.flatten(3).logsumexp(-1)
        shift_SJU = log_SJU.masked_fill(log_SJU == -math.inf, 0.0)
        weight_SJUMB = (own_SJUMB - shift_SJU[..., None, None]).exp()
        part_SHPE[:, :, part] = torch.einsum("sjumb,smjbe->sjue", weight_SJUMB, values).flatten(1, 2)
        log_SHP[:, :, part] = log_SJU.flatten(1)


def gather(
    part_SHPE: Tensor, log_SHP: Tensor, rows_SW: Tensor, down_GrO: Tensor | None, *, out_SO: Tensor,
    low_Sr: Tensor | None,
) -> None:  # fmt: skip
    """Combine the parts of attention in `out_SO`, and apply the factor A of the output projection."""
    out_SO.copy_((part_SHPE * log_SHP.softmax(-1)[..., None]).sum(2).flatten(1))
    if down_GrO is not None and low_Sr is not None:
        lower(out_SO, rows_SW, down_GrO, low_Sr=low_Sr)


def join_gates(
    gate_SF: Tensor, up_SF: Tensor, rows_SW: Tensor, bias_gate: Tensor | None, bias_up: Tensor | None,
    low_Sr: Tensor | None, up_gate: Tensor | None, up_up: Tensor | None, gelu: bool, *, out_SF: Tensor,
) -> None:  # fmt: skip
    """Add biases and updates to the gate and the up projection, and write act(gate) · up to `out_SF`."""
    low_gate, low_up = (None, None) if low_Sr is None else low_Sr.chunk(2, dim=1)
    both = []
    for y_SF, bias_F, low, up in ((gate_SF, bias_gate, low_gate, up_gate), (up_SF, bias_up, low_up, up_up)):
        wide_SF = y_SF.float() if bias_F is None else y_SF.float() + bias_F
        both.append(wide_SF + _raised(low, up, rows_SW))
    out_SF.copy_((gelu_of(both[0], approximate="tanh") if gelu else silu(both[0])) * both[1])


def lower(x_SI: Tensor, rows_SW: Tensor, down_GrI: Tensor, *, low_Sr: Tensor) -> None:
    """Write A·x of each row's adapter, or zeros for a row without an adapter."""
    adapter_S = rows_SW[:, ADAPTER].long()
    own_SrI = down_GrI[adapter_S.clamp(min=0)].float()
    low_Sr.copy_((own_SrI @ x_SI.float()[..., None])[..., 0] * (adapter_S >= 0)[:, None])


def _raised(low_Sr: Tensor | None, up_GrO: Tensor | None, rows_SW: Tensor) -> Tensor | float:
    """Return low · Bᵀ of each row's adapter."""
    if low_Sr is None or up_GrO is None:
        return 0.0
    adapter_S = rows_SW[:, ADAPTER].long()
    update_SO = (low_Sr[:, None] @ up_GrO[adapter_S.clamp(min=0)].float())[:, 0]
    return update_SO * (adapter_S >= 0)[:, None]


def _normed(x: Tensor, gain: Tensor, eps: float, centred: bool) -> Tensor:
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * inverse * (gain.float() + 1 if centred else gain.float())


def _blocks_at(
    where_1: Tensor, rows_SW: Tensor, layers: int, key_heads: int, size: int, dtype: torch.dtype
) -> Tensor:
    """Return the blocks at a memory address, of shape (n, L, 2, J, B, E), as far as the table refers to them."""
    count = int(rows_SW[:, BLOCKS:].max()) + 1
    shape = (count, layers, 2, key_heads, BLOCK, size)
    memory = (ctypes.c_byte * (math.prod(shape) * dtype.itemsize)).from_address(int(where_1))
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@cache
def ops() -> Any:
    """Return the operations as functions of torch: a kernel on CUDA, and the plain operations above everywhere else."""
    written: Mapping[Callable[..., None], Sequence[str]] = {
        join_norm: ("x_SD", "h_SD", "next_Sq"),
        turn_heads: ("out_SO",),
        attend: ("part_SHPE", "log_SHP"),
        gather: ("out_SO", "low_Sr"),
        join_gates: ("out_SF",),
        lower: ("low_Sr",),
    }
    made = {}
    for plain, names in written.items():
        schema = f"{plain.__name__}{torch.library.infer_schema(plain, mutates_args=names)}"
        made[plain.__name__] = kernels.operation(schema, plain, "kapelle.models.fast.decode_kernels")
    return SimpleNamespace(**made)


class LayerKind(NamedTuple):
    """What a model's layers have in common, as far as the kernels depend on it."""

    width: int
    inner: int
    heads: int
    key_heads: int
    size: int
    """The head size."""
    normed: bool
    centred: bool
    sandwiched: bool
    gelu: bool
    biased: bool
    """Whether queries, keys and values have biases."""
    window: int
    """The sliding window of some layers, or 0."""
    cap: float
    """The soft cap of attention scores, or 0."""


def agree(device: torch.device, dtype: torch.dtype, kind: LayerKind) -> bool:
    """Return whether the kernels for layers of a kind give the results of plain operations on a device."""

    def trial() -> Iterator[tuple[Tensor, Tensor]]:
        found, expected = (_small_layer(each, dtype, kind) for each in (device, torch.device("cpu")))
        yield from ((one.cpu(), other) for one, other in zip(found, expected, strict=True))

    return kernels.holds("decoding kernels", (device, dtype, *kind), trial)


def _small_layer(device: torch.device, dtype: torch.dtype, kind: LayerKind) -> list[Tensor]:
    """Return everything that the operations of one layer write, for five rows of which one has no adapter and one is idle."""
    own, rank, slots, layers = ops(), 12, 5, 2
    seeds = count()

    def drawn(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return kernels.drawn(*shape, seed=next(seeds), device=torch.device("cpu"), dtype=kind).to(device)

    def made(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    def factor(rank: int, width: int) -> Tensor:
        return drawn(2, rank, width) / 8

    wide, heads, keys, size = torch.float32, kind.heads, kind.key_heads, kind.size
    # Adapter, whether it grows, shared blocks, tokens in them, own tokens, blocks.
    table = [
        [0, 1, 2, 70, 65, 4, 2, 1, 3],
        [1, 1, 0, 0, 64, 5, 0, 0, 0],
        [-1, 1, 1, 64, 1, 4, 6, 0, 0],
        [1, 1, 0, 0, 190, 7, 9, 8, 0],
        [-1, 0, 0, 0, 1, 0, 0, 0, 0],
    ]
    rows_SW = torch.tensor(table, dtype=torch.int32, device=device)
    kv = drawn(10, layers, 2, keys, BLOCK, size)
    where_1 = torch.tensor([kv.data_ptr()], device=device)
    x_SD, h_SD, h2_SD = drawn(slots, kind.width, kind=wide), *made(2, slots, kind.width, kind=dtype)
    gain_D, post_D = drawn(kind.width), drawn(kind.width) if kind.sandwiched else None
    low_S3 = made(slots, 3 * rank)
    down = factor(3 * rank, kind.width)
    own.join_norm(x_SD, rows_SW, None, None, None, None, None, gain_D, down, 1e-6, kind.centred, h_SD=h_SD, next_Sq=low_S3)  # fmt: skip
    widths = (heads * size, keys * size, keys * size)
    qkv = [drawn(slots, width) for width in widths]
    biases = [drawn(width) if kind.biased else None for width in widths]
    gains = [drawn(size) if kind.normed else None for _ in range(2)]
    cos_SE, sin_SE = drawn(slots, size, kind=wide), drawn(slots, size, kind=wide)
    q_SO = made(slots, heads * size, kind=dtype)
    own.turn_heads(*qkv, rows_SW, where_1, cos_SE, sin_SE, *biases, low_S3, *(factor(rank, width) for width in widths), *gains, 1e-6, kind.centred, 1, layers, out_SO=q_SO)  # fmt: skip
    written = [x_SD.clone(), h_SD, low_S3, q_SO, kv]
    low_Sr = made(slots, rank)
    for window in {0, kind.window}:
        for parts in (1, 3):
            part_SHPE, log_SHP = made(slots, heads, parts, size), made(slots, heads, parts)
            out_SO, low_Sr = made(slots, heads * size, kind=dtype), made(slots, rank)
            own.attend(q_SO, rows_SW, where_1, keys, min(window, 100), kind.cap, size**-0.5, 1, layers, part_SHPE=part_SHPE, log_SHP=log_SHP)  # fmt: skip
            own.gather(part_SHPE, log_SHP, rows_SW, factor(rank, heads * size), out_SO=out_SO, low_Sr=low_Sr)
            written += [out_SO, low_Sr]
    y_SD, low_S2, up = drawn(slots, kind.width), made(slots, 2 * rank), factor(rank, kind.width)
    own.join_norm(x_SD, rows_SW, y_SD, None, low_Sr, up, post_D, gain_D, factor(2 * rank, kind.width), 1e-6, kind.centred, h_SD=h2_SD, next_Sq=low_S2)  # fmt: skip
    z_SF, low = made(slots, kind.inner, kind=dtype), made(slots, rank)
    gates = [drawn(slots, kind.inner) for _ in range(2)]
    own.join_gates(*gates, rows_SW, None, None, low_S2, *(factor(rank, kind.inner) for _ in range(2)), kind.gelu, out_SF=z_SF)  # fmt: skip
    own.lower(z_SF, rows_SW, factor(rank, kind.inner), low_Sr=low)
    return [*written, x_SD, h2_SD, low_S2, z_SF, low]
