"""The KV cache of the rows in the batch, attention of one new token per row over the cache, and the cache of finished rows.

All rows share one cache, whatever their length and the time at which they join. The tokens of a row are stored in three
places:

- The prompt of a row, if rows share it, is stored in blocks of `BLOCK` token slots that all these rows read (`_BlockPool`).
- The tokens that belong only to this row are stored in the row's own blocks, as far as these tokens fill blocks.
- The newest tokens of a row are stored in the row's *tail* of at most `BLOCK + TAIL` slots, in one tensor with the tails of
  other rows.

Blocks are stored densely in a pool, in any order, and a step reads a whole pool in one batched product. Tables map
blocks to rows. A step therefore starts the same number of operations for any number of rows, and reads each slot once.
Tables change when rows join, leave or fill a block, at most once in `TAIL / 2` steps. Between two changes (a *window*),
only tensors change, in place.

If steps are recorded (engines/rollout/local/step_graphs.py), the cache is *steady*: sizes are rounded up and every
table keeps its memory, so that one recording is valid for many windows. `KVCache.shape` identifies the recording.

In tensor shapes, S is the number of rows in the batch and idle slots between them, Q of prompts, P of tokens of the
longest prompt, L of layers, H of query heads, J of key heads, T of slots of a tail, n of blocks of a pool, and N of
flat tokens. E is the head size, U = H / J, B = `BLOCK`, G the maximum number of readers of a block, and M the maximum
number of blocks of a row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kapelle.models.fast.attention import attention, capped, fused_attention
from kapelle.models.fast.flat import Attend, FlatModel

BLOCK = 64
"""The number of token slots in a block, which is a compromise between few products and little wasted computation."""

TAIL = 16
"""The number of token slots by which tails grow."""

SHARED_ROWS = 2
"""The average number of rows per prompt from which a shared copy of the prompt is faster than one copy per row."""

Text = tuple[str | None, tuple[int, ...]]
"""An adapter (None for the bare base model) and the token ids that have been processed with it."""


class _Block:
    """A block in a pool. The position of the block in the pool may change."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


@dataclass(slots=True, eq=False)
class _SharedPrompt:
    blocks: list[_Block]
    length: int
    rows: int
    """The number of rows that read this prompt."""


@dataclass(slots=True, eq=False)
class _CachedRow:
    prompt: _SharedPrompt | None
    blocks: list[_Block]
    """The blocks that belong only to this row. All of these blocks are full."""
    tail: int
    """The number of tokens in the row's tail at the beginning of the window."""

    @property
    def length(self) -> int:
        """The number of tokens that the row had processed at the beginning of the window."""
        shared = 0 if self.prompt is None else self.prompt.length
        return shared + BLOCK * len(self.blocks) + self.tail


class _BlockPool:
    """Blocks of keys and values of shape (L, 2, n, J, B, E), with the used blocks before the free blocks."""

    def __init__(self, empty: Tensor) -> None:
        """Create a pool without blocks. The tensor `empty` has the shape of the blocks, with n = 0."""
        self.kv = empty
        self._blocks: list[_Block] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, kv: Tensor) -> list[_Block]:
        """Store blocks of shape (L, 2, n, J, B, E)."""
        first = len(self._blocks)
        self.reserve(first + kv.shape[2])
        self.kv[:, :, first : first + kv.shape[2]] = kv
        taken = [_Block(first + number) for number in range(kv.shape[2])]
        self._blocks += taken
        return taken

    def reserve(self, blocks: int) -> None:
        """Allocate memory for this many blocks."""
        held = self.kv.shape[2]
        if blocks > held:
            shape = (*self.kv.shape[:2], max(blocks, held + held // 4), *self.kv.shape[3:])
            # Masked places have weight 0, and 0 times their content must be 0, so the content must be finite.
            larger = self.kv.new_zeros(shape)
            larger[:, :, : len(self)] = self.kv[:, :, : len(self)]
            self.kv = larger

    def free(self, blocks: Sequence[_Block]) -> None:
        """Free blocks, and move the last used blocks to the freed positions."""
        gone = {block.place for block in blocks}
        left = len(self._blocks) - len(gone)
        holes = sorted(place for place in gone if place < left)
        moved = [block for block in self._blocks[left:] if block.place not in gone]
        if holes:
            index = torch.tensor([[block.place for block in moved], holes], device=self.kv.device)
            self.kv.index_copy_(2, index[1], self.kv.index_select(2, index[0]))
        for hole, block in zip(holes, moved, strict=True):
            block.place = hole
            self._blocks[hole] = block
        del self._blocks[left:]

    def copy(self, blocks: Sequence[_Block]) -> Tensor:
        """Return copies of blocks."""
        places = torch.tensor([block.place for block in blocks], dtype=torch.long, device=self.kv.device)
        return self.kv.index_select(2, places)


class CacheShape(NamedTuple):
    """The sizes of everything that a step uses. Steps of equal shape execute the same operations on the same memory."""

    slots: int
    tail: int
    most: int
    """The number of blocks of a row."""
    pools: tuple[tuple[int, int], ...]
    """The numbers of blocks and of readers of a block, for the pool of shared prompts and for the pool of the rows' own
    blocks."""
    memory: int
    """The number of times that tails or blocks have received new memory."""


class _Tables:
    """The index tables of a step for one shape, which are filled again for each window.

    An *item* is one query at one block and one key head. Items are indexed by pool, block, key head and reader.
    """

    def __init__(self, shape: CacheShape, heads: int, empty: Tensor) -> None:
        """Allocate the tables. The tensor `empty`, of shape (L, 2, 0, J, B, E), is on the device and in the compute type."""
        key_heads, size = empty.shape[3], empty.shape[5]
        per_key, places = heads // key_heads, shape.most * BLOCK + shape.tail
        self._shape, self._per_key, self._key_heads = shape, per_key, key_heads
        self.ends = list(accumulate(blocks * key_heads * readers for blocks, readers in shape.pools))
        """The index after the last item of each pool."""
        items = self.ends[-1]

        def places_of(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.long, device=empty.device)

        self.query_s = places_of(items)
        """The query of each item."""
        self.score_SHM = places_of(shape.slots * heads * shape.most)
        """The scores of each block of a row."""
        self.weight_sU = places_of(items * per_key)
        """The weights of each item."""
        self.part_SMJ = places_of(shape.slots * shape.most * key_heads)
        """The part of the output of each block of a row. The last part is 0."""
        self.score_sUB = empty.new_zeros(items, per_key, BLOCK)
        """A buffer for the scores of all items, which is reused by each layer."""
        self.part_sUE = empty.new_zeros(items + 1, per_key, size)
        """A buffer for the parts that items contribute to the outputs of their rows, followed by a part of zeros."""
        self.mask_S1W = empty.new_zeros(shape.slots, 1, places)
        """A mask that is −∞ for slots that contain no token of a row."""
        self.near_S1W = torch.zeros_like(self.mask_S1W)
        """A mask that is −∞ for slots that contain no token of a row and for slots outside of a layer's sliding window."""
        self.where_S1W = places_of(shape.slots, 1, places)
        """The position of each slot in the tokens of its row."""
        self.place_S1 = places_of(shape.slots, 1)
        """The slot of the next token of each row in the row's tail."""
        self.tail_SJ = places_of(shape.slots, key_heads)
        """The first slot of each tail in the list of slots of all rows and key heads."""
        self.write_SJ = torch.zeros_like(self.tail_SJ)
        """The slot of the newest token in the list of slots of all rows and key heads."""
        self.position_S = places_of(shape.slots)
        """The position of the newest token in its row."""
        self.keys: list[list[Tensor]] = []
        """The keys of each pool by layer, of shape (n·J, E, B)."""
        self.values: list[list[Tensor]] = []

    def fill(self, rows: Sequence[_CachedRow | None], entries: Sequence[Sequence[int]]) -> None:
        """Fill the tables for these rows.

        An entry is a tuple of pool, block, reader, slot, block number in the row, number of visible tokens, and
        position.
        """
        shape, key_heads, per_key = self._shape, self._key_heads, self._per_key
        pool_e, block_e, reader_e, slot_e, number_e, seen_e, position_e = (
            torch.tensor(entries, dtype=torch.long).view(-1, 7).unbind(1)
        )
        head_J, each_U = torch.arange(key_heads), torch.arange(per_key)
        first_p = torch.tensor([0, *self.ends[:-1]])
        readers_e = torch.tensor([readers for _, readers in shape.pools])[pool_e]
        role_eJ = first_p[pool_e] + block_e * key_heads * readers_e + reader_e
        role_eJ = role_eJ[:, None] + head_J * readers_e[:, None]
        query_eJ = slot_e[:, None] * key_heads + head_J

        query_s = torch.zeros(self.ends[-1], dtype=torch.long)
        query_s[role_eJ] = query_eJ
        weight_sU = torch.zeros(self.ends[-1], per_key, dtype=torch.long)
        weight_sU[role_eJ] = (query_eJ[..., None] * per_key + each_U) * shape.most + number_e[:, None, None]
        score_SMJU = torch.zeros(shape.slots, shape.most, key_heads, per_key, dtype=torch.long)
        score_SMJU[slot_e, number_e] = role_eJ[..., None] * per_key + each_U
        part_SMJ = torch.full((shape.slots, shape.most, key_heads), self.ends[-1])
        part_SMJ[slot_e, number_e] = role_eJ
        seen_SM = torch.zeros(shape.slots, shape.most, dtype=torch.long)
        seen_SM[slot_e, number_e] = seen_e
        position_SM = torch.zeros_like(seen_SM)
        position_SM[slot_e, number_e] = position_e
        tail_S1, length_S = torch.tensor(
            [(0, 0) if row is None else (row.tail, row.length) for row in rows]
        ).split(1, dim=1)
        hidden_SW = torch.cat(
            (
                (torch.arange(BLOCK) >= seen_SM[..., None]).flatten(1),
                torch.arange(shape.tail) >= tail_S1,
            ),
            1,
        )
        self.query_s.copy_(query_s)
        self.weight_sU.copy_(weight_sU.flatten())
        self.score_SHM.copy_(score_SMJU.permute(0, 2, 3, 1).flatten())
        self.part_SMJ.copy_(part_SMJ.flatten())
        self.mask_S1W.zero_().masked_fill_(hidden_SW[:, None].to(self.mask_S1W.device), -torch.inf)
        places = (
            (position_SM[..., None] + torch.arange(BLOCK)).flatten(1),
            length_S - tail_S1 + torch.arange(shape.tail),
        )
        self.where_S1W.copy_(torch.cat(places, 1)[:, None])
        self.place_S1.copy_(tail_S1)
        self.tail_SJ.copy_((torch.arange(shape.slots)[:, None] * key_heads + head_J) * shape.tail)
        self.position_S.copy_(length_S.flatten() - 1)  # a step advances first

    def products(self, items: Tensor, matrices: Sequence[Tensor], out: Tensor) -> Tensor:
        """Fill `out_sUY` with the products of the items of each block (`_sUX`) and the block's matrix, and return it."""
        first, ends = (
            0,
            [end for end, before in zip(self.ends, (0, *self.ends), strict=False) if end > before],
        )
        for end, matrix in zip(ends, matrices, strict=True):
            rows, into = (x[first:end].view(matrix.shape[0], -1, x.shape[2]) for x in (items, out))
            torch.bmm(rows, matrix, out=into)
            first = end
        return out


class KVCache:
    """The KV cache of all rows in the batch."""

    def __init__(
        self, flat: FlatModel, device: torch.device, dtype: torch.dtype, *, steady: bool = False
    ) -> None:
        """Create an empty cache. With `steady`, memory and sizes stay unchanged for as long as possible."""
        self.device = device
        self._steady = steady
        self._heads, self._key_heads, self._size = flat.heads, flat.key_heads, flat.head_size
        self._windows, self._cap = flat.windows, flat.cap
        self._window = next((window for window in flat.windows if window is not None), None)
        """The size of the sliding window, which is the same for all layers that have a window."""
        layers = len(flat.layers)
        empty = torch.empty(layers, 2, 0, self._key_heads, BLOCK, self._size, device=device, dtype=dtype)
        self._shared, self._own = _BlockPool(empty), _BlockPool(empty)
        self._tail = empty[..., :0, :]
        """The keys and values of tails, of shape (L, 2, S, J, T, E)."""
        self._rows: list[_CachedRow | None] = []
        """The rows by slot. An idle slot contains None."""
        self._left = self._taken = 0
        """The number of steps left in the window, and the number of steps already taken in the window."""
        self._addresses: tuple[int, ...] = ()
        """The memory addresses of tails and blocks."""
        self._memory = 0
        self._tables: _Tables
        self._tables_of: dict[CacheShape, _Tables] = {}
        self._sizes: dict[str, int] = {}
        """The current sizes after rounding up."""
        self._room = self._tail
        """The memory for the tails of a steady cache."""
        self.shape = CacheShape(0, 0, 0, (), 0)
        """The shape of the current window."""

    @property
    def places(self) -> int:
        """The number of allocated token slots."""
        tails = self._tail.shape[2] * self._tail.shape[4]
        return BLOCK * (self._shared.kv.shape[2] + self._own.kv.shape[2]) + tails

    @property
    def places_next(self) -> int:
        """The number of token slots in use after the next step. The allocated memory is up to a quarter larger."""
        used = BLOCK * (len(self._shared) + len(self._own))
        if self._left:
            return used + self._tail.shape[2] * self._tail.shape[4]
        there = [row.tail + self._taken for row in self._rows if row is not None]
        filled = BLOCK * sum(tail // BLOCK for tail in there)
        longest = max((tail % BLOCK for tail in there), default=0)
        return used + filled + len(self._rows) * (longest + TAIL)

    @property
    def slots(self) -> int:
        """The number of rows in the batch and idle slots between them."""
        return len(self._rows)

    def join(self, prompts: PromptBlock, prompt_R: Sequence[int]) -> None:
        """Append rows for prompts that have been processed. The sequence `prompt_R` contains the prompt index of each row."""
        self._end_window()
        if len(prompt_R) >= SHARED_ROWS * len(prompts.lengths):
            counts = [-(-length // BLOCK) for length in prompts.lengths]
            blocks = self._shared.take(prompts.blocks(range(len(counts)), counts))
            ends = [0, *accumulate(counts)]
            shared = [
                _SharedPrompt(blocks[first:last], length, 0)
                for first, last, length in zip(ends, ends[1:], prompts.lengths, strict=False)
            ]
            rows = [_CachedRow(shared[prompt], [], 0) for prompt in prompt_R]
            for prompt in prompt_R:
                shared[prompt].rows += 1
            tail = prompts.tails(prompt_R, 0)
        else:
            counts = [prompts.lengths[prompt] // BLOCK for prompt in prompt_R]
            taken = iter(self._own.take(prompts.blocks(prompt_R, counts)))
            rows = [
                _CachedRow(None, [next(taken) for _ in range(count)], prompts.lengths[prompt] % BLOCK)
                for prompt, count in zip(prompt_R, counts, strict=True)
            ]
            tail = prompts.tails(prompt_R, max(row.tail for row in rows))
        first, places = len(self._rows), max(self._tail.shape[4], tail.shape[4])
        self._rows += rows
        tails = self._tail.new_zeros(
            *self._tail.shape[:2], len(self._rows), self._key_heads, places, self._size
        )
        tails[:, :, :first, :, : self._tail.shape[4]] = self._tail
        tails[:, :, first:, :, : tail.shape[4]] = tail
        self._tail = tails

    def arrange(self, slots: Sequence[int | None]) -> None:
        """Keep the rows in these slots, in this order, and free the memory of all other rows. None stands for an idle slot."""
        self._end_window()
        staying = {slot for slot in slots if slot is not None}
        own: list[_Block] = []
        shared: list[_Block] = []
        for slot, row in enumerate(self._rows):
            if row is None or slot in staying:
                continue
            own += row.blocks
            if row.prompt is not None:
                row.prompt.rows -= 1
                shared += [] if row.prompt.rows else row.prompt.blocks
        self._own.free(own)
        self._shared.free(shared)
        self._rows = [None if slot is None else self._rows[slot] for slot in slots]
        index_S = torch.tensor([slot or 0 for slot in slots], dtype=torch.long, device=self.device)
        self._tail = self._tail.index_select(2, index_S)

    def open(self) -> None:
        """Make room for one more token of every row."""
        if not self._left:
            self._begin_window()
        self._left -= 1
        self._taken += 1

    def advance(self) -> Tensor:
        """Advance every row to the slot that `open` made, using only tensor operations, and return the positions of the new tokens.

        The result has shape (S,) and is valid until the next call.
        """
        tables, tail = self._tables, self.shape.tail
        tables.mask_S1W[:, 0, -tail:].scatter_(1, tables.place_S1, 0.0)
        torch.add(tables.tail_SJ, tables.place_S1, out=tables.write_SJ)
        tables.place_S1.add_(1)
        position_S = tables.position_S.add_(1)
        if self._window is not None:
            far_S1W = tables.where_S1W <= (position_S - self._window)[:, None, None]
            tables.near_S1W.copy_(tables.mask_S1W).masked_fill_(far_S1W, -torch.inf)
        return position_S

    def attend(self, layer: int, q_SHE: Tensor, k_SJE: Tensor, v_SJE: Tensor) -> Tensor:
        """Store one new token per row and compute the attention of the new token to its row (see `flat.Attend`)."""
        slots, heads, size = q_SHE.shape
        tables, most, pairs = self._tables, self.shape.most, slots * self._key_heads
        keys, values = self._tail[layer]
        keys.view(-1, size).index_copy_(0, tables.write_SJ.view(-1), k_SJE.reshape(-1, size))
        values.view(-1, size).index_copy_(0, tables.write_SJ.view(-1), v_SJE.reshape(-1, size))
        q_pUE, first = q_SHE.reshape(pairs, -1, size), most * BLOCK
        mask_S1W = tables.mask_S1W if self._windows[layer] is None else tables.near_S1W
        score_SHW = q_SHE.new_empty(slots, heads, tables.mask_S1W.shape[2])
        if most:
            role_sUE = q_pUE.index_select(0, tables.query_s)
            in_blocks = tables.products(role_sUE, tables.keys[layer], tables.score_sUB)
            in_blocks = in_blocks.view(-1, BLOCK).index_select(0, tables.score_SHM).view(slots, heads, -1)
            torch.add(capped(in_blocks, self._cap), mask_S1W[..., :first], out=score_SHW[..., :first])
        in_tails = torch.bmm(q_pUE, keys.flatten(0, 1).transpose(1, 2)).view(slots, heads, -1)
        torch.add(capped(in_tails, self._cap), mask_S1W[..., first:], out=score_SHW[..., first:])
        # CUDA's autocast computes softmax and sums in float32 but skips in-place products, which need equal types.
        weight_SHW = torch.softmax(score_SHW, dim=-1).to(v_SJE.dtype)
        tail_pUT = weight_SHW[..., first:].view(pairs, -1, self.shape.tail)
        if not most:
            return torch.bmm(tail_pUT, values.flatten(0, 1)).view(slots, heads, size)
        role_sUB = weight_SHW[..., :first].reshape(-1, BLOCK).index_select(0, tables.weight_sU)
        part_sUE = tables.products(role_sUB.view_as(tables.score_sUB), tables.values[layer], tables.part_sUE)
        out_SMJUE = part_sUE.index_select(0, tables.part_SMJ).view(slots, most, -1)
        out_pUE = out_SMJUE.sum(1, dtype=v_SJE.dtype).view(pairs, -1, size)
        return out_pUE.baddbmm_(tail_pUT, values.flatten(0, 1)).view(slots, heads, size)

    def kept(self, slots: Sequence[int]) -> StoredRows:
        """Return copies of the keys and values of the rows in these slots."""
        self._end_window()
        rows = [row for row in (self._rows[slot] for slot in slots) if row is not None]
        shared = dict.fromkeys(block for row in rows if row.prompt is not None for block in row.prompt.blocks)
        own = [block for row in rows for block in row.blocks]
        number = {block: place for place, block in enumerate((*shared, *own))}
        longest = max((row.tail for row in rows), default=0)
        index_S = torch.tensor(slots, dtype=torch.long, device=self.device)
        return StoredRows(
            torch.cat((self._shared.copy(list(shared)), self._own.copy(own)), 2),
            self._tail[..., :longest, :].index_select(2, index_S),
            [
                KeptRow(
                    [] if row.prompt is None else [number[block] for block in row.prompt.blocks],
                    0 if row.prompt is None else row.prompt.length,
                    [number[block] for block in row.blocks],
                    row.tail,
                )
                for row in rows
            ],
        )

    def places_of(self, slot: int) -> int:
        """Return the number of token slots of a row, including its whole prompt."""
        self._end_window()
        row = self._rows[slot]
        assert row is not None
        shared = 0 if row.prompt is None else len(row.prompt.blocks)
        return BLOCK * (shared + len(row.blocks)) + row.tail

    def _end_window(self) -> None:
        """End the window: add the steps of the window to the lengths of tails."""
        for row in self._rows if self._taken else ():
            if row is not None:
                row.tail += self._taken
        self._left = self._taken = 0

    def _begin_window(self) -> None:
        """Begin a window: move full tails to blocks, make room in tails, and fill the tables."""
        self._end_window()
        full = [slot for slot, row in enumerate(self._rows) if row is not None and row.tail >= BLOCK]
        if full:
            index_s = torch.tensor(full, device=self.device)
            tails = self._tail.index_select(2, index_s)
            blocks = self._own.take(tails[..., :BLOCK, :])
            self._tail.index_copy_(2, index_s, tails.roll(-BLOCK, 4))
            for slot, block in zip(full, blocks, strict=True):
                row = self._rows[slot]
                assert row is not None
                row.blocks.append(block)
                row.tail -= BLOCK
        longest = max((row.tail for row in self._rows if row is not None), default=0)
        places = BLOCK + TAIL if self._steady else TAIL * -(-(longest + TAIL // 2) // TAIL)
        self._have_tails(places)
        self._left = places - longest
        self._look_up()

    def _have_tails(self, places: int) -> None:
        """Give each tail this many token slots. A steady cache reuses its memory."""
        held, slots = self._tail, len(self._rows)
        shape = (*held.shape[:2], slots, held.shape[3], places, held.shape[5])
        if not self._steady:
            if held.shape == shape:
                return
            tails = held.new_zeros(shape)
        else:
            if self._room.shape[2] < slots or self._room.shape[4] != places:
                self._room = held.new_zeros(shape)
            tails = self._room[:, :, :slots]
            if held.data_ptr() == tails.data_ptr() and held.shape == shape:
                return
        least = min(places, held.shape[4])
        tails[..., :least, :] = held[..., :least, :]
        self._tail = tails

    def _look_up(self) -> None:
        """Fill the tables for the window that begins."""
        read: dict[_Block, int] = {}
        """The number of the last reader of each block of a shared prompt."""
        entries: list[tuple[int, int, int, int, int, int, int]] = []
        most = 0
        for slot, row in enumerate(self._rows):
            if row is None:
                continue
            shared = [] if row.prompt is None else row.prompt.blocks
            for number, block in enumerate(shared):
                reader = read[block] = read.get(block, -1) + 1
                seen = 0 if row.prompt is None else min(BLOCK, row.prompt.length - BLOCK * number)
                entries.append((0, block.place, reader, slot, number, seen, BLOCK * number))
            own = row.length - row.tail - BLOCK * len(row.blocks)
            for number, block in enumerate(row.blocks):
                position = own + BLOCK * number
                entries.append((1, block.place, 0, slot, len(shared) + number, BLOCK, position))
            most = max(most, len(shared) + len(row.blocks))
        readers = max(read.values(), default=-1) + 1
        pools = ((self._shared, "shared", "readers", readers), (self._own, "own", "reader", 1))
        sizes = tuple(
            (self._rounded(name, len(pool), 16), self._rounded(each, count, 1))
            for pool, name, each, count in pools
        )
        for (pool, *_), (blocks, _) in zip(pools, sizes, strict=True):
            pool.reserve(blocks)
        addresses = tuple(each.data_ptr() for each in (self._tail, self._shared.kv, self._own.kv))
        if not self._steady or addresses != self._addresses:
            self._tables_of, self._addresses = {}, addresses
            self._memory += 1
        self.shape = CacheShape(
            len(self._rows), self._tail.shape[4], self._rounded("most", most, 1), sizes, self._memory
        )
        tables = self._tables_of.get(self.shape)
        if tables is None:
            tables = _Tables(self.shape, self._heads, self._shared.kv[:, :, :0])
            used = [
                [
                    pool.kv[layer, :, :blocks]
                    for (pool, *_), (blocks, _) in zip(pools, sizes, strict=True)
                    if blocks
                ]
                for layer in range(len(self._tail))
            ]
            tables.keys = [[kv[0].flatten(0, 1).transpose(1, 2) for kv in layer] for layer in used]
            tables.values = [[kv[1].flatten(0, 1) for kv in layer] for layer in used]
            self._tables_of[self.shape] = tables
        tables.fill(self._rows, entries)
        self._tables = tables

    def _rounded(self, name: str, size: int, least: int) -> int:
        """Return a size, rounded up in a steady cache. The previous size is kept if it suffices and is at most twice as large."""
        if not self._steady or not size:
            return size
        step = max(least, 1 << max(0, size.bit_length() - 3))
        rounded = step * -(-size // step)
        if not size <= self._sizes.get(name, 0) <= 2 * rounded:
            self._sizes[name] = rounded
        return self._sizes[name]


class KeptRow(NamedTuple):
    """The place of one row in `StoredRows`."""

    prompt: list[int]
    """The indices of the blocks of a shared prompt."""
    prompt_length: int
    own: list[int]
    tail: int


class StoredRows:
    """Copies of the keys and values of finished rows."""

    def __init__(self, blocks: Tensor, tails: Tensor, rows: Sequence[KeptRow]) -> None:
        """Take blocks of shape (L, 2, n, J, B, E), tails of shape (L, 2, R, J, T, E), and the block indices of each row."""
        self._blocks, self._tails, self._rows = blocks, tails, rows

    @property
    def places(self) -> int:
        """The number of allocated token slots."""
        return BLOCK * self._blocks.shape[2] + self._tails.shape[2] * self._tails.shape[4]

    def row(self, number: int, tokens: int) -> Tensor:
        """Return the keys and values of the first `tokens` tokens of a row, of shape (L, 2, J, n, E)."""
        row = self._rows[number]
        parts = [self._joined(row.prompt)[:, :, :, : row.prompt_length], self._joined(row.own)]
        parts.append(self._tails[:, :, number, :, : row.tail])
        return torch.cat(parts, dim=3)[:, :, :, :tokens]

    def chosen(self, rows: Sequence[int]) -> StoredRows:
        """Return copies of the rows at these indices."""
        chosen = [self._rows[number] for number in rows]
        used = list(dict.fromkeys(block for row in chosen for block in (*row.prompt, *row.own)))
        number = {block: place for place, block in enumerate(used)}
        index_n, index_R = (
            torch.tensor(each, dtype=torch.long, device=self._tails.device) for each in (used, rows)
        )
        longest = max((row.tail for row in chosen), default=0)
        return StoredRows(
            self._blocks.index_select(2, index_n),
            self._tails[..., :longest, :].index_select(2, index_R),
            [
                row._replace(prompt=[number[b] for b in row.prompt], own=[number[b] for b in row.own])
                for row in chosen
            ],
        )

    def _joined(self, blocks: Sequence[int]) -> Tensor:
        index_n = torch.tensor(blocks, dtype=torch.long, device=self._blocks.device)
        return self._blocks.index_select(2, index_n).transpose(2, 3).flatten(3, 4)


class StoresRows(Protocol):
    """A KV cache whose rows can be kept."""

    def places_of(self, slot: int, /) -> int:
        """Return the number of token slots of a row, including its whole prompt."""
        ...

    def kept(self, slots: Sequence[int], /) -> StoredRows:
        """Return copies of the keys and values of rows."""
        ...


class PromptBlock:
    """The keys and values of prompts, of shape (L, 2, Q, J, P, E). Each prompt is right-aligned in its own row."""

    def __init__(
        self, flat: FlatModel, lengths: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Allocate memory for prompts of these lengths in tokens."""
        self.lengths, self.longest = lengths, max(lengths)
        self._windows, self._cap = flat.windows, flat.cap
        shape = (len(flat.layers), 2, len(lengths), flat.key_heads, self.longest, flat.head_size)
        # Masked places have weight 0, and 0 times their content must be 0, so the content must be finite.
        make = torch.empty if min(lengths) == self.longest else torch.zeros
        self.kv = make(shape, device=device, dtype=dtype)

    def put(self, prompt: int, kv: Tensor) -> int:
        """Store the keys and values of the first tokens of a prompt, which then need no forward pass.

        The tensor `kv` has shape (L, 2, J, n, E). Returns the number of these tokens.
        """
        first = self.longest - self.lengths[prompt]
        self.kv[:, :, prompt, :, first : first + kv.shape[3]] = kv
        return kv.shape[3]

    def of(self, prompt: int) -> Tensor:
        """Return the keys and values of a prompt, of shape (L, 2, J, n, E)."""
        return self.kv[:, :, prompt, :, self.longest - self.lengths[prompt] :]

    def attention(self, spans: Sequence[tuple[int, int, int]]) -> Attend:
        """Return an attention function that stores the last tokens of prompts and computes their attention to their prompts.

        A span consists of the index of the first prompt, the index after the last prompt, and the number of new tokens
        of each prompt. If there is one query per prompt, the query belongs to the last token.
        """
        masks = {window: [self._mask(*span, window) for span in spans] for window in set(self._windows)}

        def attend(layer: int, q_NHE: Tensor, k_NJE: Tensor, v_NJE: Tensor) -> Tensor:
            outputs, key, query = [], 0, 0
            for (first, last, new), mask in zip(spans, masks[self._windows[layer]], strict=True):
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
                    outputs.append(attention(q, k, v, None, 1.0, self._cap).flatten(0, 1))
                    continue
                if mask is not None and self._cap is not None:
                    k, v = self.kv[layer, :, first:last, :, self.longest - mask.shape[2] :].transpose(2, 3)
                    outputs.append(attention(q, k, v, mask, 1.0, self._cap).flatten(0, 1))
                    continue
                # The queries belong to the last tokens of prompts; they also attend to tokens that were read earlier.
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                looks = None if mask is None else mask[:, None, -queries:]
                if looks is not None:
                    k, v = self.kv[layer, :, first:last, :, self.longest - looks.shape[3] :]
                out = fused_attention(q, k, v, looks, causal=False, scale=1.0)
                outputs.append(out.transpose(1, 2).flatten(0, 1))
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return attend

    def _mask(self, first: int, last: int, new: int, window: int | None) -> Tensor | None:
        """Return the attention mask of the new tokens of a span, or None if attention is plain causal."""
        lengths = self.lengths[first:last]
        most = max(lengths)
        if min(lengths) == new == most <= (window or most):
            return None
        place_P = torch.arange(self.longest - most, self.longest)
        before = place_P[-new:, None] >= place_P
        if window is not None:
            before &= place_P[-new:, None] - place_P < window
        there = place_P >= self.longest - torch.tensor(lengths)[:, None]
        return (before & there[:, None]).to(self.kv.device)

    def blocks(self, prompts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the first `counts[k]` blocks of each prompt k, of shape (L, 2, n, J, B, E).

        The slots of a block after the last token of a prompt contain some token of this prompt.
        """
        starts = [BLOCK * block for count in counts for block in range(count)]
        return self._copied(
            [q for q, count in zip(prompts, counts, strict=True) for _ in range(count)], starts, BLOCK
        )

    def tails(self, prompts: Sequence[int], places: int) -> Tensor:
        """Return the keys and values after the last full block of each prompt, of shape (L, 2, R, J, places, E)."""
        return self._copied(prompts, [self.lengths[q] // BLOCK * BLOCK for q in prompts], places)

    def _copied(self, prompts: Sequence[int], starts: Sequence[int], places: int) -> Tensor:
        """Return `places` token slots of each prompt, beginning at the tokens `starts`."""
        first_n = torch.tensor([self.longest - self.lengths[q] for q in prompts]) + torch.tensor(starts)
        place_nB = (first_n.long()[:, None] + torch.arange(places)).clamp_(max=self.longest - 1)
        prompt_n = torch.tensor(prompts, dtype=torch.long)
        head_J = torch.arange(self.kv.shape[3])
        index = (prompt_n[:, None, None], head_J[None, :, None], place_nB[:, None])
        q_n11, j_1J1, p_n1B = (each.to(self.kv.device) for each in index)
        return self.kv[:, :, q_n11, j_1J1, p_n1B]


class Prefixes:
    """KV caches of finished rows, which are kept for prompts that continue these rows. A prompt is looked up by its prefixes.

    The next prompt of an agent consists of its previous prompt, the token ids that the agent sampled, and the messages
    since then. The keys and values of the first two parts already exist when the row ends. These keys and values are
    kept unchanged, with many rows in one piece, and are copied only when a prompt needs them. The least recently used
    piece is dropped first.
    """

    def __init__(self, most: int) -> None:
        """Create an empty store for at most `most` token slots. With 0, nothing is stored."""
        self._most = most
        self._pieces: OrderedDict[int, tuple[StoredRows, Sequence[Text]]] = OrderedDict()
        """The stored rows of each piece, and the tokens of each row."""
        self._where: dict[tuple[str | None, int], tuple[int, int]] = {}
        """Mapping from an adapter and the hash of a token sequence to a piece and a row. The mapping is built on the
        first lookup."""
        self._made = 0
        self._indexed = 0

    @property
    def places(self) -> int:
        """The number of token slots that are stored."""
        return sum(rows.places for rows, _ in self._pieces.values())

    def shrink(self, most: int) -> None:
        """Drop the least recently used pieces until at most `most` token slots are stored."""
        while self._pieces and self.places > most:
            dropped, _ = self._pieces.popitem(last=False)
            self._where = {text: place for text, place in self._where.items() if place[0] != dropped}

    def put(self, cache: StoresRows, rows: Sequence[int], texts: Sequence[Text]) -> None:
        """Store rows of a cache (by ascending index) with these token sequences, as many as fit."""
        room = sum(1 for held in accumulate(map(cache.places_of, rows)) if held <= self._most)
        if room:
            self._keep(cache.kept(rows[:room]), texts[:room])

    def _keep(self, kept: StoredRows, texts: Sequence[Text]) -> None:
        self.shrink(self._most - kept.places)
        self._pieces[self._made] = (kept, texts)
        self._made += 1

    def find(self, adapter: str | None, prompt: Sequence[int]) -> Tensor | None:
        """Return the keys and values of the longest stored token sequence that a prompt continues, of shape (L, 2, J, n, E), or None."""
        for number in range(self._indexed, self._made):
            _, texts = self._pieces.get(number, (None, ()))
            for row, (owner, ids) in enumerate(texts):
                self._where[owner, _digests(ids)[-1]] = (number, row)
        self._indexed = self._made
        if not self._where:
            return None
        found: tuple[int, int] | None = None
        for length, digest in enumerate(_digests(prompt[:-1]), 1):
            place = self._where.get((adapter, digest))
            if place is not None and self._pieces[place[0]][1][place[1]][1] == prompt[:length]:
                found = place
        if found is None:
            return None
        (kept, texts), row = self._pieces[found[0]], found[1]
        self._pieces.move_to_end(found[0])
        return kept.row(row, len(texts[row][1]))

    def forget(self, adapter: str | None) -> None:
        """Drop the rows of an adapter. For the bare base model (None), which all adapters use, drop all rows."""
        pieces = self._pieces.values()
        self._pieces, self._where = OrderedDict(), {}
        for kept, texts in pieces if adapter is not None else ():
            rows = [row for row, (owner, _) in enumerate(texts) if owner != adapter]
            if rows:
                self._keep(kept.chosen(rows), [texts[row] for row in rows])


def _digests(ids: Sequence[int]) -> list[int]:
    """Return a hash of every prefix of a token sequence, shortest first."""
    digest = 0
    return [digest := hash((digest, token)) for token in ids]
