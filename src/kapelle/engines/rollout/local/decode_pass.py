"""A decoding step on a GPU in few kernels: one new token of every row, whatever the adapters and the lengths of the rows.

A layer has seven matrix products, and seven kernels between them (decode_ops.py). Adapters are read through a table
(paged_cache.py) from stacks that keep their memory, and the KV cache through an address in memory. A step therefore
depends on nothing but the number of slots, which is a power of two: a run records a few steps and replays them, while
rows join and leave, while weights are loaded, and while the cache is freed for an update.

In tensor shapes, S is the number of slots, R of rows, D the hidden size, F the inner size, E the head size, I and O the
numbers of input and output features of a layer, V the size of the vocabulary, and G the number of adapters in a stack;
r is the largest rank of all adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kapelle.models.fast.decode_ops import LayerKind, agree, ops
from kapelle.models.fast.flat import FlatModel
from kapelle.models.fast.kernels import runs_operations
from kapelle.models.fast.paged_cache import COUNT, LIVE, PREFIX, PagedCache, RowTable
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import BankedLinear

LEAST_SLOTS = 8
"""The minimum number of slots of a step."""

LARGEST_HEAD = 256
"""The maximum head size."""

PROGRAMS = 264
"""The number of programs from which attention uses a GPU fully. With fewer rows, the tokens of a row are divided."""

MOST_PARTS = 8
"""The maximum number of parts into which the tokens of a row are divided."""


class _GroupFactors(NamedTuple):
    """The factors of all adapters for layers that read the same input."""

    down_GqI: Tensor
    """The factors A of these layers, one after another."""
    up_GrO: tuple[Tensor, ...]
    """The transposed factors B of each layer, multiplied by the scale."""


class AdapterStacks:
    """The factors of all adapters of a model, in memory that is replaced only for more adapters or a higher rank."""

    def __init__(self, model: LanguageModel, flat: FlatModel, adapters: int) -> None:
        """Create stacks for at least this number of adapters, in the type in which products are computed."""
        self._bank, self._flat, self._dtype = model.bank, flat, model.dtype
        self.stacks: list[tuple[_GroupFactors | None, ...]] = []
        """The stacks of each layer: for queries, keys and values; the output projection; gate and up; and down."""
        self._place: dict[str, int] = {}
        self._free: list[int] = []
        self._stale: set[str] = set()
        self._least = max(1, adapters)
        self._capacity = self._rank = 0
        self._adapted: list[bool] = []
        """Whether each group of layers has adapters."""

    def place_of(self, adapter: str | None) -> int:
        """Return the number of an adapter in the stacks, or −1 for the bare base model."""
        if adapter is None:
            return -1
        if adapter not in self._place:
            self._place[adapter] = self._free.pop() if self._free else len(self._place)
            self._stale.add(adapter)
        return self._place[adapter]

    def forget(self, adapter: str) -> None:
        """Free the place of an adapter that no row reads, because its factors have changed or the adapter is gone."""
        self._stale.discard(adapter)
        if adapter in self._place:
            self._free.append(self._place.pop(adapter))

    def refresh(self) -> None:
        """Copy the factors that have changed into the stacks."""
        if not self._stale:
            return
        groups = list(_groups(self._flat))
        rank = max(self._rank, *(lora.rank for lora in self._bank.adapters.values()))
        count = max(len(self._place) + len(self._free), self._least)
        adapted = [any(isinstance(layer, BankedLinear) for layer in linears) for linears in groups]
        if count > self._capacity or rank > self._rank or adapted != self._adapted:
            self._capacity, self._rank, self._adapted = 1 << (count - 1).bit_length(), rank, adapted
            made = [
                self._empty(linears) if banked else None
                for linears, banked in zip(groups, adapted, strict=True)
            ]
            self.stacks = [tuple(made[first : first + 4]) for first in range(0, len(made), 4)]
            self._stale |= self._place.keys()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        former: list[Tensor] = []
        for stack, linears in zip(chain.from_iterable(self.stacks), groups, strict=True):
            for number, layer in enumerate(linears):
                for name in self._stale if isinstance(layer, BankedLinear) else ():
                    own, place = layer.factors_of(name), self._place[name]
                    if own is not None and stack is not None:
                        first, used = number * self._rank, len(own.a_rI)
                        targets += (
                            stack.down_GqI[place, first : first + used],
                            stack.up_GrO[number][place, :used],
                        )
                        sources += (own.a_rI, own.b_Or.t() * own.scale)
            if stack is not None:
                held = (stack.down_GqI, *stack.up_GrO)
                former += [each[self._place[name]] for each in held for name in self._stale]
        if targets:
            torch._foreach_zero_(former)
            torch._foreach_copy_(targets, sources)
        self._stale.clear()

    def _empty(self, linears: Sequence[Any]) -> _GroupFactors:
        """Return a stack of zeros."""
        shapes = [_base(layer).weight.shape for layer in linears]
        device = _base(linears[0]).weight.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self._dtype, device=device)

        return _GroupFactors(
            zeros(self._capacity, len(linears) * self._rank, shapes[0][1]),
            tuple(zeros(self._capacity, self._rank, shape[0]) for shape in shapes),
        )

    def addresses(self) -> tuple[int, ...]:
        """Return the memory addresses of the stacks."""
        return tuple(
            0 if stack is None else stack.down_GqI.data_ptr() for layer in self.stacks for stack in layer
        )


class DecodePass:
    """Decoding steps of one model. The pass outlives the rows of a batch."""

    def __init__(self, model: LanguageModel, flat: FlatModel, adapters: int) -> None:
        """Create a pass for a model that `decode_pass_of` accepts, with memory for at least this number of adapters."""
        self._model, self._flat = model, flat
        self.adapters = AdapterStacks(model, flat, adapters)
        self.table = RowTable(model.device)
        self._token_S = torch.zeros(0, dtype=torch.long, device=model.device)

    def cache(self) -> PagedCache:
        """Return an empty KV cache for the rows of a batch. A former cache must not be used any longer."""
        return PagedCache(self._flat, self.table, self._model.dtype)

    def memory(self) -> tuple[int, ...]:
        """Return the addresses of the memory that every step uses, except those of the base weights."""
        table, tokens = self.table.rows_SW, self._token_S
        return table.shape[1], table.data_ptr(), tokens.data_ptr(), *self.adapters.addresses()

    def weights(self) -> tuple[int, ...]:
        """Return the addresses of the base weights that a step reads."""
        flat = self._flat
        linears = [_base(layer) for group in _groups(flat) for layer in group]
        norms = [layer.input_layernorm for layer in flat.layers]
        return tuple(each.weight.data_ptr() for each in (flat.body.embed_tokens, flat.head, *linears, *norms))

    def put(self, token_R: Tensor, slots: int) -> None:
        """Store the tokens that the next step reads."""
        if slots > len(self._token_S):
            self._token_S = self._token_S.new_zeros(slots)
        self._token_S[: len(token_R)] = token_R

    def hidden(self, slots: int) -> Tensor:
        """Read the stored tokens and return the last hidden states, of shape (S, D), by tensor operations only."""
        flat, own, dtype = self._flat, ops(), self._model.dtype
        eps, family = flat.eps, flat.family
        rows_SW = self.table.rows_SW[:slots]
        rows_SW[:, COUNT] += rows_SW[:, LIVE]
        position_S = rows_SW[:, PREFIX] + rows_SW[:, COUNT] - 1
        x_SD = flat.body.embed_tokens(self._token_S[:slots]).float()
        turns = {kind: flat.rotary(x_SD, position_S.long(), kind) for kind in dict.fromkeys(flat.rotations)}
        stacks = self.adapters.stacks or [(None,) * 4] * len(flat.layers)
        parts = max(1, min(MOST_PARTS, PROGRAMS // (slots * flat.key_heads)))
        layers, where_1 = len(flat.layers), self.table.where_1

        def made(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(slots, *shape, dtype=kind, device=x_SD.device)

        def joined(
            summed: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None] | None,
            norm: Any,
            next_stack: _GroupFactors | None,
            kind: torch.dtype = dtype,
        ) -> tuple[Tensor, Tensor | None]:
            """Add a product, its bias and update to x after its own norm, and return the norm of x and the next A·x."""
            y_SD, bias_D, low_Sr, up_GrD, post_D = summed or (None,) * 5
            down_GqD = None if next_stack is None else next_stack.down_GqI
            h_SD = made(x_SD.shape[1], kind=kind)
            low_Sq = None if down_GqD is None else made(down_GqD.shape[1])
            own.join_norm(
                x_SD, rows_SW, y_SD, bias_D, low_Sr, up_GrD, post_D, norm.weight, down_GqD, eps, family.centred,
                h_SD=h_SD, next_Sq=low_Sq,
            )  # fmt: skip
            return h_SD, low_Sq

        summed = None
        for number, (layer, (of_qkv, of_o, of_gates, of_down)) in enumerate(
            zip(flat.layers, stacks, strict=True)
        ):
            a, mlp = layer.self_attn, layer.mlp
            h_SD, low_Sq = joined(summed, layer.input_layernorm, of_qkv)
            q, k, v = (_base(each) for each in (a.q_proj, a.k_proj, a.v_proj))
            q_SO = made(q.weight.shape[0], kind=dtype)
            gains = (a.q_norm.weight, a.k_norm.weight) if flat.normed_heads else (None, None)
            ups = (None,) * 3 if of_qkv is None else of_qkv.up_GrO
            own.turn_heads(
                *(_times(h_SD, each) for each in (q, k, v)), rows_SW, where_1,
                *(each[:, 0] for each in turns[flat.rotations[number]]), q.bias, k.bias, v.bias, low_Sq, *ups, *gains,
                eps, family.centred, number, layers, out_SO=q_SO,
            )  # fmt: skip
            part_SHPE, log_SHP = made(flat.heads, parts, flat.head_size), made(flat.heads, parts)
            own.attend(
                q_SO, rows_SW, where_1, flat.key_heads, flat.windows[number] or 0, flat.cap or 0.0, flat.scale, number,
                layers, part_SHPE=part_SHPE, log_SHP=log_SHP,
            )  # fmt: skip
            out_SO, low_Sr, up_GrD = made(q_SO.shape[1], kind=dtype), None, None
            if of_o is not None:
                low_Sr, up_GrD = made(of_o.down_GqI.shape[1]), of_o.up_GrO[0]
            own.gather(
                part_SHPE, log_SHP, rows_SW, None if of_o is None else of_o.down_GqI, out_SO=out_SO, low_Sr=low_Sr
            )  # fmt: skip
            o = _base(a.o_proj)
            post = (None, layer.post_attention_layernorm)
            if family.sandwiched:
                post = (layer.post_attention_layernorm.weight, layer.pre_feedforward_layernorm)
            h_SD, low_Sq = joined((_times(out_SO, o), o.bias, low_Sr, up_GrD, post[0]), post[1], of_gates)
            gate, up, down = (_base(each) for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
            inner_SF = made(gate.weight.shape[0], kind=dtype)
            of_both = (None,) * 2 if of_gates is None else of_gates.up_GrO
            own.join_gates(
                _times(h_SD, gate), _times(h_SD, up), rows_SW, gate.bias, up.bias, low_Sq, *of_both, family.gelu,
                out_SF=inner_SF,
            )  # fmt: skip
            low_Sr = up_GrD = None
            if of_down is not None:
                low_Sr, up_GrD = made(of_down.down_GqI.shape[1]), of_down.up_GrO[0]
                own.lower(inner_SF, rows_SW, of_down.down_GqI, low_Sr=low_Sr)
            last_D = layer.post_feedforward_layernorm.weight if family.sandwiched else None
            summed = (_times(inner_SF, down), down.bias, low_Sr, up_GrD, last_D)
        kind = torch.float32 if self._model.float_head else dtype
        return joined(summed, flat.body.norm, None, kind)[0]


def decode_pass_of(model: LanguageModel, adapters: int) -> DecodePass | None:
    """Return a pass for decoding steps in few kernels, or None if the device or the model has no such pass.

    The pass has memory for at least this number of adapters, and for more when they are needed.
    """
    flat = model.flat
    if (
        flat is None
        or not flat.kernels
        or not runs_operations(model.device, model.dtype)
        or model.sharded_pass
    ):
        return None
    linears = [_base(layer) for group in _groups(flat) for layer in group]
    if (
        flat.head_size % 2
        or flat.head_size > LARGEST_HEAD
        or not all(type(each) is nn.Linear for each in linears)
    ):
        return None
    kind = LayerKind(
        flat.layers[0].input_layernorm.weight.shape[0],
        linears[4].weight.shape[0],
        flat.heads,
        flat.key_heads,
        flat.head_size,
        flat.normed_heads,
        flat.family.centred,
        flat.family.sandwiched,
        flat.family.gelu,
        linears[0].bias is not None,
        max(window or 0 for window in flat.windows),
        flat.cap or 0.0,
    )
    return DecodePass(model, flat, adapters) if agree(model.device, model.dtype, kind) else None


def slots_for(rows: int) -> int:
    """Return the number of slots of a step for this number of rows: a power of two."""
    return max(LEAST_SLOTS, 1 << (rows - 1).bit_length())


def _groups(flat: FlatModel) -> Iterator[Sequence[Any]]:
    """Yield the linear layers of each layer, in groups that read the same input."""
    for layer in flat.layers:
        a, mlp = layer.self_attn, layer.mlp
        yield a.q_proj, a.k_proj, a.v_proj
        yield (a.o_proj,)
        yield mlp.gate_proj, mlp.up_proj
        yield (mlp.down_proj,)


def _base(layer: Any) -> Any:
    return layer.base if isinstance(layer, BankedLinear) else layer


def _times(x_SI: Tensor, linear: Any) -> Tensor:
    return torch.mm(x_SI, linear.weight.t())
