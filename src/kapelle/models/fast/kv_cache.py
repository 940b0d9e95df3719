"""The KV cache of rows that joined together, attention of one new token per row over it, and what is kept of finished rows.

The cache is made of contiguous blocks that are read as a whole: batched products read them about twice as fast
as the filled part of a larger tensor. The first block holds the prompts. Where rows are samples of one prompt, it
is stored once and all its rows attend to it in one product; else each row has its own copy. The blocks after it
hold the generated tokens; the last one is filled step by step, and its empty places are masked.

Between two new blocks no shape changes. Where steps are recorded (engines/rollout/local/step_graphs.py), the next place is kept in
tensors that a step changes in place, so that the same step runs again for the next place; elsewhere it is a plain number,
which costs less on a CPU.

Shapes: R rows, Q prompts, G most rows of a prompt, P longest prompt, T places of a block, H query heads, J key
heads, E head size, U = H / J query heads per key head, L layers, n tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kapelle.models.fast.attention import attention, fused_attention
from kapelle.models.fast.flat import Attend, FlatModel

TAIL = 16
"""Places added at a time: little idle work, and little unused memory."""

BLOCK = 64
"""Places up to which full blocks are joined: few products."""

SHARED = 2
"""Rows per prompt, on average, from which one copy of the prompt beats one in each row."""

Text = tuple[str | None, tuple[int, ...]]
"""An adapter (None for the bare base) and the token ids that it read."""


class KVCache:
    """The cache of rows whose prompts were read together."""

    def __init__(
        self,
        prompts: PromptBlock,
        prompt_R: Tensor,
        generated: Sequence[Tensor] = (),
        length: int = 0,
        *,
        recorded: bool = False,
    ) -> None:
        """Hold rows on prompts that were read (`prompt_R`, the prompt of each row, ascends); see `seated`."""
        self._recorded = recorded
        self._prompts = prompts
        self._prompt_R = prompt_R
        self.rows, self.device = len(prompt_R), prompt_R.device
        self._seats = _CacheSeats(prompts, prompt_R)
        self._blocks = [_Block(kv) for kv in generated]
        self.length = length
        """Tokens that every row has generated and read."""
        self._position_R = prompts.length_Q[prompt_R] + (length - 1)
        self._place_1 = prompt_R.new_full((1,), (length - 1) % TAIL)
        """Place of the last token in the last block."""
        empty_T = prompts.kv.new_full((TAIL,), -torch.inf)
        self._empty_T = empty_T.masked_fill_(torch.arange(TAIL, device=self.device) <= self._place_1, 0)
        """−∞ for the places of the last block that are still empty."""

    @classmethod
    def seated(cls, prompts: PromptBlock, prompt_R: Tensor, *, recorded: bool = False) -> KVCache:
        """Return a cache without generated tokens yet; prompts are copied where few rows share them."""
        if len(prompt_R) >= SHARED * len(prompts.length_Q):
            return cls(prompts, prompt_R, recorded=recorded)
        every_R = torch.arange(len(prompt_R), device=prompt_R.device)
        return cls(prompts.chosen(prompt_R), every_R, recorded=recorded)

    @property
    def places(self) -> int:
        """Token places that take memory."""
        generated = sum(block.places for block in self._blocks)
        return len(self._prompts.length_Q) * self._prompts.longest + self.rows * generated

    @property
    def places_of_a_row(self) -> int:
        """Most token places of a row that shares its prompt with no other."""
        return self._prompts.longest + sum(block.places for block in self._blocks)

    @property
    def left(self) -> int:
        """Tokens per row for which the blocks have room."""
        return -self.length % TAIL

    def open(self) -> bool:
        """Count one more token, and make room for it where there is none; True when the blocks are new."""
        fresh = not self.left
        if fresh:
            if len(self._blocks) > 1 and self._blocks[-2].places < BLOCK:
                self._blocks[-2:] = [_Block(torch.cat([block.kv for block in self._blocks[-2:]], dim=4))]
            shape = self._prompts.kv.shape
            kv = self._prompts.kv.new_zeros(*shape[:2], self.rows, shape[3], TAIL, shape[5])
            self._blocks.append(_Block(kv))
            self._place_1.fill_(-1)
            self._empty_T.fill_(-torch.inf)
        self.length += 1
        return fresh

    def advance(self) -> Tensor:
        """Advance to the place that `open` made, in tensors alone; return the position `_R` of its token.

        The tensor is valid until the next call.
        """
        if self._recorded:
            self._place_1.add_(1)
            self._empty_T.index_fill_(0, self._place_1, 0)
        return self._position_R.add_(1)

    def attend(self, layer: int, q_RHE: Tensor, k_RJE: Tensor, v_RJE: Tensor) -> Tensor:
        """Store one new token per row at the last place and let it attend to its row; see `flat.Attend`."""
        kv = self._blocks[-1].kv[layer]
        place = (self.length - 1) % TAIL
        if self._recorded:
            kv[0].index_copy_(2, self._place_1, k_RJE[:, :, None])
            kv[1].index_copy_(2, self._place_1, v_RJE[:, :, None])
        else:
            kv[0, :, :, place] = k_RJE
            kv[1, :, :, place] = v_RJE
        rows, heads, size = q_RHE.shape
        groups = rows * k_RJE.shape[1]
        q_gUE = q_RHE.reshape(groups, -1, size)
        scores = [self._seats.scores(layer, q_RHE).view(groups, q_gUE.shape[1], -1)]
        scores += [torch.bmm(q_gUE, block.keys[layer]) for block in self._blocks]
        if self._recorded:
            scores[-1].add_(self._empty_T)
        else:
            scores[-1][:, :, place + 1 :] = -torch.inf
        # CUDA's autocast makes a softmax float32, and leaves products in place as they are: they take one type.
        weight = torch.softmax(torch.cat(scores, dim=-1), dim=-1).to(v_RJE.dtype)
        first = self._prompts.longest
        out_gUE = self._seats.mixed(layer, weight[..., :first])
        for block in self._blocks:
            out_gUE.baddbmm_(weight[..., first : first + block.places], block.values[layer])
            first += block.places
        return out_gUE.view(rows, heads, size)

    def kept(self, rows: Tensor) -> KVCache:
        """Return a cache with copies of these rows, ascending, and of their prompts."""
        left_Q, prompt_R = self._prompt_R[rows].unique_consecutive(return_inverse=True)
        generated = [block.kv if len(rows) == self.rows else block.kv[:, :, rows] for block in self._blocks]
        return KVCache(
            self._prompts.chosen(left_Q), prompt_R, generated, self.length, recorded=self._recorded
        )

    def row(self, row: int, tokens: int) -> Tensor:
        """Return keys and values `(L, 2, J, n, E)` of the first tokens of a row."""
        prompt = int(self._prompt_R[row])
        parts = [self._prompts.of(prompt)]
        parts += [block.kv[:, :, row] for block in self._blocks]
        return torch.cat(parts, dim=3)[:, :, :, :tokens]


class PromptBlock:
    """Keys and values `(L, 2, Q, J, P, E)` of prompts, each right-aligned in a row of its own."""

    def __init__(self, kv: Tensor, length_Q: Tensor) -> None:
        """Hold prompts of these lengths (tokens)."""
        self.kv = kv
        self.length_Q = length_Q
        self.longest = kv.shape[4]
        place_P = torch.arange(self.longest, device=kv.device)
        hidden_QP = place_P < self.longest - length_Q[:, None]
        self.hidden_QP = hidden_QP if bool(hidden_QP.any()) else None
        """Places that hold no token; None where all do."""

    @classmethod
    def empty(
        cls, flat: FlatModel, lengths: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> PromptBlock:
        """Return room for prompts of these lengths (tokens)."""
        shape = (len(flat.layers), 2, len(lengths), flat.key_heads, max(lengths), flat.head_size)
        block = cls(torch.empty(shape, device=device, dtype=dtype), torch.tensor(lengths, device=device))
        if block.hidden_QP is not None:  # what is masked has weight 0, and 0 times anything has to be 0
            block.kv.masked_fill_(block.hidden_QP[None, None, :, None, :, None], 0)
        return block

    def put(self, prompt: int, kv: Tensor) -> int:
        """Store keys and values `(L, 2, J, n, E)` of a prompt's first tokens, which need not be read again.

        Returns their number.
        """
        first = self.longest - int(self.length_Q[prompt])
        self.kv[:, :, prompt, :, first : first + kv.shape[3]] = kv
        return kv.shape[3]

    def of(self, prompt: int) -> Tensor:
        """Return keys and values `(L, 2, J, n, E)` of a prompt that was read."""
        return self.kv[:, :, prompt, :, self.longest - int(self.length_Q[prompt]) :]

    def attention(self, spans: Sequence[tuple[int, int, int]]) -> Attend:
        """Return attention that stores the last tokens of prompts and lets them attend to their prompts.

        A span is first prompt, prompt after the last, and how many tokens of each are new, all the same. If
        there is one query per prompt, it is that of the last token.
        """
        masks: list[Tensor | None] = []
        """Where each new token of a span's prompts may attend; None if that is plain causal."""
        for first, last, new in spans:
            lengths = self.length_Q[first:last]
            most = int(lengths.max())
            if int(lengths.min()) == new == most:
                masks.append(None)
                continue
            place_P = torch.arange(self.longest - most, self.longest, device=self.kv.device)
            before = place_P[-new:, None] >= place_P
            there = place_P >= self.longest - lengths[:, None]
            masks.append(before & there[:, None])

        def attend(layer: int, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor) -> Tensor:
            outputs, key, query = [], 0, 0
            for (first, last, new), mask in zip(spans, masks, strict=True):
                queries = new if len(q_NHE) == len(k_NJE) else 1
                count = last - first
                # From flat tokens to prompts × tokens × heads × E.
                k = k_NJE[key : key + count * new].view(count, new, *k_NJE.shape[1:])
                v = v_NJE[key : key + count * new].view(count, new, *v_NJE.shape[1:])
                q = q_NHE[query : query + count * queries].view(count, queries, *q_NHE.shape[1:])
                key, query = key + count * new, query + count * queries
                self.kv[layer, 0, first:last, :, self.longest - new :] = k.transpose(1, 2)
                self.kv[layer, 1, first:last, :, self.longest - new :] = v.transpose(1, 2)
                if mask is None and queries == new:
                    outputs.append(attention(q, k, v, None, 1.0).flatten(0, 1))
                    continue
                # The queries are the last ones of prompts; they also attend to tokens that were read before.
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                looks = None if mask is None else mask[:, None, -queries:]
                if looks is not None:
                    k, v = self.kv[layer, :, first:last, :, self.longest - looks.shape[3] :]
                out = fused_attention(q, k, v, looks, causal=False, scale=1.0)
                outputs.append(out.transpose(1, 2).flatten(0, 1))
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return attend

    def chosen(self, prompt_R: Tensor) -> PromptBlock:
        """Return the block of these prompts, in this order, without places that none of them needs."""
        if len(prompt_R) == len(self.length_Q) and bool((prompt_R.diff() == 1).all()):
            return self
        length_R = self.length_Q[prompt_R]
        return PromptBlock(self.kv[:, :, prompt_R, :, self.longest - int(length_R.max()) :], length_R)


class _Block:
    """Keys and values `(L, 2, R, J, T, E)` of generated tokens, in the layout of batched products."""

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv
        self.places = kv.shape[4]
        self.keys, self.values = _sides(kv)


def _sides(kv: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return views of each layer's keys, transposed, and values; groups are rows × key heads."""
    return [k.flatten(0, 1).transpose(1, 2) for k in kv[:, 0]], [v.flatten(0, 1) for v in kv[:, 1]]


class _CacheSeats:
    """Which rows share which prompts, and their attention over them."""

    def __init__(self, prompts: PromptBlock, prompt_R: Tensor) -> None:
        """Seat the rows of each prompt side by side: Q × G seats, some of them empty."""
        count_Q = prompt_R.bincount(minlength=len(prompts.length_Q))
        self._most = int(count_Q.max())
        first_Q = count_Q.cumsum(0) - count_Q
        number_R = torch.arange(len(prompt_R), device=count_Q.device) - first_Q[prompt_R]
        self._seat_R: Tensor | None = prompt_R * self._most + number_R
        self._row_S = torch.zeros(len(count_Q) * self._most, dtype=torch.long, device=count_Q.device)
        self._row_S[self._seat_R] = torch.arange(len(prompt_R), device=count_Q.device)
        if len(self._row_S) == len(prompt_R):
            self._seat_R = None  # every seat is taken: rows are seats
        self._heads = prompts.kv.shape[3]
        self._keys, self._values = _sides(prompts.kv)
        hidden_QP = prompts.hidden_QP
        self._hidden = None if hidden_QP is None else hidden_QP[:, None].repeat_interleave(self._heads, 0)

    def scores(self, layer: int, q_RHE: Tensor) -> Tensor:
        """Return the scores of each row's query at each place of its prompt, `_RHP`."""
        rows, heads, size = q_RHE.shape
        q = self._gathered(q_RHE.reshape(rows, self._heads, -1, size))
        score = torch.bmm(q, self._keys[layer])
        if self._hidden is not None:
            score.masked_fill_(self._hidden, -torch.inf)
        return self._scattered(score, heads // self._heads)

    def mixed(self, layer: int, weight_gUP: Tensor) -> Tensor:
        """Return the weighted values of each row's prompt, rows × key heads × U × E."""
        per_key, width = weight_gUP.shape[1:]
        weight = self._gathered(weight_gUP.reshape(-1, self._heads, per_key, width))
        return self._scattered(torch.bmm(weight, self._values[layer]), per_key)

    def _gathered(self, x_RJUX: Tensor) -> Tensor:
        """From rows to prompts: `_RJUX` to Q·J × G·U × X."""
        if self._most == 1:
            return x_RJUX.reshape(-1, *x_RJUX.shape[2:])
        x_SJUX = x_RJUX if self._seat_R is None else x_RJUX[self._row_S]
        _, heads, per_key, width = x_SJUX.shape
        x_QGJUX = x_SJUX.view(-1, self._most, heads, per_key, width)
        return x_QGJUX.transpose(1, 2).reshape(-1, self._most * per_key, width)

    def _scattered(self, x: Tensor, per_key: int) -> Tensor:
        """From prompts to rows: Q·J × G·U × X to R·J × U × X."""
        if self._most == 1:
            return x
        x_QJGUX = x.view(-1, self._heads, self._most, per_key, x.shape[-1])
        x_SJUX = x_QJGUX.transpose(1, 2).reshape(-1, self._heads, per_key, x.shape[-1])
        x_RJUX = x_SJUX if self._seat_R is None else x_SJUX[self._seat_R]
        return x_RJUX.reshape(-1, per_key, x.shape[-1])


@dataclass(slots=True)
class _KeptRows:
    """Finished rows that are kept in one piece."""

    cache: KVCache
    texts: Sequence[Text]
    """What each of them has read."""


class Prefixes:
    """KV caches of finished rows, kept for prompts that continue them and found by the beginning of a longer text.

    An agent's next prompt is its last prompt, the ids that it sampled, and the messages since. Keys and values of the
    first two exist already when the row ends. They are kept as the rows left them, many rows in one piece, and
    copied only when a prompt needs them. The least recently used piece is dropped first.
    """

    def __init__(self, most: int) -> None:
        """Hold at most `most` token places; 0 keeps nothing."""
        self._most = most
        self._pieces: OrderedDict[int, _KeptRows] = OrderedDict()
        self._where: dict[tuple[str | None, int], tuple[int, int]] = {}
        """(adapter, hash of a text) → (piece, row); built on the first lookup."""
        self._made = 0
        self._indexed = 0

    @property
    def places(self) -> int:
        """Token places that are held."""
        return sum(piece.cache.places for piece in self._pieces.values())

    def put(self, cache: KVCache, rows: Sequence[int], texts: Sequence[Text]) -> None:
        """Keep rows (ascending) of a cache that have read these texts; as many as there is room for."""
        room = self._most // cache.places_of_a_row
        if not rows or not room:
            return
        kept = cache.kept(torch.tensor(rows[:room], device=cache.device))
        while self._pieces and self.places + kept.places > self._most:
            dropped, _ = self._pieces.popitem(last=False)
            self._where = {text: place for text, place in self._where.items() if place[0] != dropped}
        self._pieces[self._made] = _KeptRows(kept, texts[:room])
        self._made += 1

    def find(self, adapter: str | None, prompt: Sequence[int]) -> Tensor | None:
        """Return keys and values `(L, 2, J, n, E)` of the longest text that a prompt continues."""
        for number in range(self._indexed, self._made):
            kept = self._pieces.get(number)
            for row, (owner, ids) in enumerate(kept.texts if kept is not None else ()):
                *_, digest = _digests(ids)
                self._where[owner, digest] = (number, row)
        self._indexed = self._made
        if not self._where:
            return None
        found: tuple[int, int] | None = None
        for length, digest in enumerate(_digests(prompt[:-1]), 1):
            place = self._where.get((adapter, digest))
            if place is not None and self._pieces[place[0]].texts[place[1]][1] == prompt[:length]:
                found = place
        if found is None:
            return None
        piece, row = self._pieces[found[0]], found[1]
        self._pieces.move_to_end(found[0])
        return piece.cache.row(row, len(piece.texts[row][1]))

    def forget(self, adapter: str | None) -> None:
        """Drop what an adapter has read; everything for the bare base, which all adapters use."""
        pieces = self._pieces.values()
        self._pieces, self._where = OrderedDict(), {}
        for piece in pieces if adapter is not None else ():
            rows = [row for row, (owner, _) in enumerate(piece.texts) if owner != adapter]
            self.put(piece.cache, rows, [piece.texts[row] for row in rows])


def _digests(ids: Sequence[int]) -> Iterator[int]:
    """Return a hash of every beginning of a text, shortest first."""
    return accumulate(ids, lambda digest, token: hash((digest, token)))
