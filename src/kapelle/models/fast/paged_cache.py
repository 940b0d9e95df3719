"""The KV cache of a batch that kapelle's decoding kernels read: blocks in any order, found through a table.

Each row has a list of blocks of `BLOCK` token slots. The first blocks may belong to a prompt that several rows share;
all later tokens are in the row's own blocks. A kernel receives the memory address of the blocks and the table
`rows_SW`, and reads both when it runs. A recorded step therefore stays valid when rows join, grow and leave, and when
the blocks receive new memory.

The table changes when rows join or leave, and when a row needs another block. Rows receive a block up to `AHEAD` tokens
early, so between these changes the host sends nothing to the device.

In tensor shapes, S is the number of slots of the batch (rows and idle slots), W the width of the table, L of layers, n
of blocks, J of key heads, B = `BLOCK` and E the head size; R is the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kapelle.models.fast.flat import FlatModel
from kapelle.models.fast.kv_cache import BLOCK, SHARED_ROWS, KeptRow, PromptBlock, StoredRows

AHEAD = 16
"""The number of tokens for which every row has room after the table has changed."""

LEAST_BLOCKS = 64
"""The initial number of blocks, and the initial number of blocks of a row for which the table has columns."""

ADAPTER, LIVE, SHARED, PREFIX, COUNT, BLOCKS = range(6)
"""The columns of the table: the number of the row's adapter or −1, whether the row grows (1 or 0), the number of its
shared blocks, the number of tokens in them, the number of tokens in its own blocks, and the first of its blocks."""


@dataclass(slots=True, eq=False)
class _PagedPrompt:
    blocks: list[int]
    length: int
    rows: int
    """The number of rows that read this prompt."""


@dataclass(slots=True, eq=False)
class _PagedRow:
    prompt: _PagedPrompt | None
    blocks: list[int]
    """The blocks that belong only to this row."""
    count: int
    """The number of tokens in these blocks at the last change of the table."""
    adapter: int = -1

    @property
    def shared(self) -> list[int]:
        """The blocks of the shared prompt."""
        return [] if self.prompt is None else self.prompt.blocks


class RowTable:
    """The memory of the table, which recorded steps read. The memory outlives the rows of a batch."""

    def __init__(self, device: torch.device) -> None:
        """Create an empty table on a device."""
        self.rows_SW = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self.where_1 = torch.zeros(1, dtype=torch.long, device=device)
        """The memory address of the blocks."""

    def fill(self, rows: Tensor) -> None:
        """Copy the table of a batch from the host. The memory is replaced only if it is too small."""
        slots, width = rows.shape
        held, wide = self.rows_SW.shape
        if slots > held or width > wide:
            self.rows_SW = self.rows_SW.new_zeros(max(slots, held), max(width, wide))
        self.rows_SW[:slots, :width].copy_(rows)


class PagedCache:
    """The KV cache of all rows in the batch."""

    def __init__(self, flat: FlatModel, table: RowTable, dtype: torch.dtype) -> None:
        """Create an empty cache of a flat model. Block 0 belongs to idle slots."""
        self._table, self.device = table, table.where_1.device
        shape = (1, len(flat.layers), 2, flat.key_heads, BLOCK, flat.head_size)
        # Masked slots have weight 0, and 0 times their content must be 0, so the content must be finite.
        self._kv = torch.zeros(shape, dtype=dtype, device=self.device)
        self._free: list[int] = []
        self._rows: list[_PagedRow] = []
        self._left = self._taken = 0
        """The number of steps until the table must change, and the number of steps since it changed."""

    @property
    def slots(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def places_next(self) -> int:
        """The number of token slots in use after the next step. The allocated memory is up to a quarter larger."""
        full = sum(row.count + self._taken == BLOCK * len(row.blocks) for row in self._rows)
        return BLOCK * (len(self._kv) - 1 - len(self._free) + full)

    def join(self, prompts: PromptBlock, prompt_R: Sequence[int], adapters: Sequence[int]) -> None:
        """Append rows for processed prompts, given the index of each row's prompt and the number of its adapter."""
        self._settle()
        if len(prompt_R) >= SHARED_ROWS * len(prompts.lengths):
            counts = [-(-length // BLOCK) for length in prompts.lengths]
            blocks = self._take(prompts.blocks(range(len(counts)), counts))
            ends = [0, *accumulate(counts)]
            shared = [
                _PagedPrompt(blocks[first:last], length, 0)
                for first, last, length in zip(ends, ends[1:], prompts.lengths, strict=False)
            ]
            rows = [_PagedRow(shared[prompt], [], 0) for prompt in prompt_R]
            for prompt in prompt_R:
                shared[prompt].rows += 1
        else:
            lengths = [prompts.lengths[prompt] for prompt in prompt_R]
            counts = [-(-length // BLOCK) for length in lengths]
            taken = iter(self._take(prompts.blocks(prompt_R, counts)))
            rows = [
                _PagedRow(None, [next(taken) for _ in range(count)], length)
                for count, length in zip(counts, lengths, strict=True)
            ]
        for row, adapter in zip(rows, adapters, strict=True):
            row.adapter = adapter
        self._rows += rows

    def arrange(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices, in this order, and free the blocks of all other rows."""
        self._settle()
        staying = set(rows)
        for number, row in enumerate(self._rows):
            if number not in staying:
                self._free += row.blocks
                if row.prompt is not None:
                    row.prompt.rows -= 1
                    self._free += [] if row.prompt.rows else row.prompt.blocks
        self._rows = [self._rows[number] for number in rows]

    def open(self, slots: int) -> None:
        """Make room for one more token of every row, in a table with this number of slots."""
        if not self._left:
            self._look_up(slots)
        self._left -= 1
        self._taken += 1

    def kept(self, rows: Sequence[int]) -> StoredRows:
        """Return copies of the keys and values of the rows at these indices."""
        self._settle()
        chosen = [self._rows[number] for number in rows]
        shared = dict.fromkeys(block for row in chosen for block in row.shared)
        own = [block for row in chosen for block in row.blocks[: row.count // BLOCK]]
        number = {block: place for place, block in enumerate((*shared, *own))}
        # The block that is not full, if there is one.
        newest = [row.blocks[row.count // BLOCK] if row.count % BLOCK else 0 for row in chosen]
        longest = max((row.count % BLOCK for row in chosen), default=0)
        return StoredRows(
            self._copied([*shared, *own]),
            self._copied(newest)[..., :longest, :],
            [
                KeptRow(
                    [number[block] for block in row.shared],
                    0 if row.prompt is None else row.prompt.length,
                    [number[block] for block in row.blocks[: row.count // BLOCK]],
                    row.count % BLOCK,
                )
                for row in chosen
            ],
        )

    def places_of(self, row: int) -> int:
        """Return the number of token slots of a row, including its whole prompt."""
        self._settle()
        return BLOCK * len(self._rows[row].shared) + self._rows[row].count

    def _settle(self) -> None:
        """Add the steps since the last change of the table to the lengths of rows."""
        for row in self._rows:
            row.count += self._taken
        self._left = self._taken = 0

    def _look_up(self, slots: int) -> None:
        """Give every row room for `AHEAD` tokens, and fill the table."""
        self._settle()
        for row in self._rows:
            missing = -(-(row.count + AHEAD) // BLOCK) - len(row.blocks)
            if missing > 0:
                row.blocks += self._allocated(missing)
        self._left = min(BLOCK * len(row.blocks) - row.count for row in self._rows)
        most = max(len(row.shared) + len(row.blocks) for row in self._rows)
        width = BLOCKS + max(LEAST_BLOCKS, 1 << (most - 1).bit_length())
        idle = [-1, 0, 0, 0, 1]
        lines = [
            [
                row.adapter,
                1,
                len(row.shared),
                0 if row.prompt is None else row.prompt.length,
                row.count,
                *row.shared,
                *row.blocks,
            ]
            for row in self._rows
        ] + [idle] * (slots - len(self._rows))
        self._table.fill(
            torch.tensor([line + [0] * (width - len(line)) for line in lines], dtype=torch.int32)
        )

    def _allocated(self, blocks: int) -> list[int]:
        """Return the numbers of free blocks, after growing the memory if there are too few."""
        if blocks > len(self._free):
            held = len(self._kv)
            more = max(blocks - len(self._free), held // 4, LEAST_BLOCKS)
            larger = self._kv.new_zeros(held + more, *self._kv.shape[1:])
            larger[:held] = self._kv
            self._kv = larger
            self._table.where_1.fill_(larger.data_ptr())
            self._free += range(held + more - 1, held - 1, -1)
        return [self._free.pop() for _ in range(blocks)]

    def _take(self, kv: Tensor) -> list[int]:
        """Store blocks of shape (L, 2, n, J, B, E)."""
        taken = self._allocated(kv.shape[2])
        self._kv[torch.tensor(taken, dtype=torch.long, device=self.device)] = kv.permute(2, 0, 1, 3, 4, 5)
        return taken

    def _copied(self, blocks: Sequence[int]) -> Tensor:
        """Return copies of blocks, of shape (L, 2, n, J, B, E)."""
        index_n = torch.tensor(blocks, dtype=torch.long, device=self.device)
        return self._kv[index_n].permute(1, 2, 0, 3, 4, 5)
