"""One cache for all rows: each attends to what it has read, whatever the others do."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kapelle.models.fast.kv_cache import BLOCK, TAIL, KVCache, PromptBlock

LAYERS, HEADS, KEY_HEADS, SIZE = 2, 6, 2, 4
WINDOWS, CAP = (None, 30), 1.5
FLAT: Any = SimpleNamespace(
    layers=range(LAYERS), heads=HEADS, key_heads=KEY_HEADS, head_size=SIZE, windows=WINDOWS, cap=CAP
)
CPU = torch.device("cpu")


class Read:
    """What a row has read, each token's keys and values `(L, 2, J, n, E)`."""

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv

    def attended(self, layer: int, q_HE: Tensor) -> Tensor:
        """Attention by its definition."""
        seen = self.kv[layer, :, :, -(WINDOWS[layer] or self.kv.shape[3]) :].double()
        keys, values = (side.repeat_interleave(HEADS // KEY_HEADS, 0) for side in seen)
        score = CAP * (torch.einsum("he,hne->hn", q_HE.double(), keys) / CAP).tanh()
        return torch.einsum("hn,hne->he", score.softmax(-1), values)


class Player:
    """Rows that join, read and leave, with what each has read beside the cache."""

    def __init__(self, seed: int, steady: bool) -> None:
        self.random = random.Random(seed)
        self.made = torch.Generator().manual_seed(seed)
        self.cache = KVCache(FLAT, CPU, torch.float32, steady=steady)
        self.rows: list[Read | None] = []

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.made)

    def join(self, lengths: list[int], prompt_R: list[int]) -> None:
        block = PromptBlock(FLAT, lengths, CPU, torch.float32)
        prompts = [self.drawn(LAYERS, 2, KEY_HEADS, length, SIZE) for length in lengths]
        for number, kv in enumerate(prompts):
            assert block.put(number, kv) == lengths[number]
        self.cache.join(block, prompt_R)
        self.rows += [Read(prompts[prompt]) for prompt in prompt_R]
        self.arrange(list(range(len(self.rows))))

    def arrange(self, order: list[int | None]) -> None:
        self.cache.arrange(order)
        self.rows = [None if slot is None else self.rows[slot] for slot in order]

    def step(self) -> None:
        """Let every row read a token; each has to attend to all that it has read."""
        slots = len(self.rows)
        self.cache.open()
        position_S = self.cache.advance()
        new = self.drawn(LAYERS, 2, slots, KEY_HEADS, SIZE)
        for slot, row in enumerate(self.rows):
            if row is not None:
                assert position_S[slot] == row.kv.shape[3]
                row.kv = torch.cat((row.kv, new[:, :, slot, :, None]), 3)
        for layer in range(LAYERS):
            q_SHE = self.drawn(slots, HEADS, SIZE)
            found = self.cache.attend(layer, q_SHE, *new[layer])
            assert found.isfinite().all()
            for slot, row in enumerate(self.rows):
                if row is not None:
                    torch.testing.assert_close(
                        found[slot].double(), row.attended(layer, q_SHE[slot]), atol=1e-5, rtol=1e-5
                    )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def there(self) -> list[int]:
        return [slot for slot, row in enumerate(self.rows) if row is not None]


@pytest.mark.sample(9)
@pytest.mark.parametrize("steady", [False, True], ids=["plain", "steady"])
@pytest.mark.parametrize("seed", range(6))
@torch.inference_mode()
def test_rows_attend_to_their_earlier_tokens(seed: int, steady: bool) -> None:
    player = Player(seed, steady)
    for _ in range(7):
        prompts = [
            player.random.choice((1, 20, BLOCK, BLOCK + 1, 150)) for _ in range(player.random.randint(1, 4))
        ]
        each = player.random.choice((1, 2, 3))
        player.join(prompts, [number for number in range(len(prompts)) for _ in range(each)])
        player.steps(player.random.choice((1, TAIL, TAIL + 3)))
        staying: list[int | None] = [slot for slot in player.there() if player.random.random() < 0.7]
        player.random.shuffle(staying)
        if player.random.random() < 0.5:
            staying.insert(player.random.randint(0, len(staying)), None)
        player.arrange(staying)
        if player.there():
            player.steps(player.random.choice((1, 5, 70)))


@pytest.mark.parametrize("steady", [False, True], ids=["plain", "steady"])
@torch.inference_mode()
def test_stored_rows_equal_the_tokens_that_were_read(steady: bool) -> None:
    player = Player(0, steady)
    player.join([70, 5], [0, 0, 1, 1])
    player.steps(90)
    player.join([130], [0])
    player.steps(3)
    kept = player.cache.kept([0, 3, 4])
    some = kept.chosen([2, 0])
    assert kept.places >= some.places > 0
    for rows, slots in ((kept, (0, 3, 4)), (some, (4, 0))):
        for number, slot in enumerate(slots):
            read = player.rows[slot]
            assert read is not None
            assert torch.equal(rows.row(number, read.kv.shape[3]), read.kv)
            assert torch.equal(rows.row(number, 4), read.kv[:, :, :, :4])
    player.step()  # looking changes nothing


@torch.inference_mode()
def test_memory_is_freed_with_its_rows() -> None:
    player = Player(0, steady=False)
    player.join([200, 10], [0, 0, 0, 1, 1])
    player.join([200], [0])
    player.steps(2)
    held = player.cache.places
    player.arrange([5])
    player.steps(2)
    assert player.cache.places < held
    seen = set()
    for _ in range(6):  # rows come and go: blocks are used again
        player.join([200], [0])
        player.arrange([0])
        player.step()
        seen.add(player.cache.places)
    assert len(seen) == 1
