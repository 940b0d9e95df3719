"""Four turns of one conversation: 32 tokens heard and 32 said in each, the context growing from 32 to 256.

Peer: transformers' `generate`, which reads the whole conversation anew in each turn, as trainers use it; and at its best,
with its cache carried over from turn to turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.measure import compare, single_thread
from benchmarks.subjects import model, prompt_ids, subject
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.rollout.protocol import Request
from kapelle.team import Policy
from kapelle.types import Sampling, Task

TURNS, HEARD, SAID = 4, 32, 32
TASK = Task("benchmark", "")


def run() -> dict[str, Any]:
    """Return the ratios for both sizes."""
    single_thread()
    return {
        "1M, 64 conversations": conversations("1M", 64, rounds=3),
        "1M, 8 prompts x 8 samples": conversations("1M", 64, rounds=2, samples=8),
        "10M, 16 conversations": conversations("10M", 16, rounds=2),
        "1M, 64 conversations, cache carried over": conversations("1M", 64, rounds=4, carried=True),
        "10M, 16 conversations, cache carried over": conversations("10M", 16, rounds=3, carried=True),
    }


def conversations(
    size: str, rows: int, rounds: int, samples: int = 1, *, carried: bool = False
) -> dict[str, Any]:
    """Return the comparison on `rows` conversations, `samples` of which begin alike.

    With `carried` the peer's cache lives through all turns of a conversation.
    """
    engine = LocalEngine({"base": subject(size)}, [Policy("agent", "base")])
    theirs = model(size).eval()
    heard = [
        [prompt_ids(1000 * turn + row // samples, HEARD) for row in range(rows)] for turn in range(TURNS)
    ]

    async def talk() -> None:
        async def one(row: int) -> None:
            tokens: tuple[int, ...] = ()
            for turn in range(TURNS):
                tokens += heard[turn][row]
                seed = TURNS * row + turn
                sampling = Sampling(max_tokens=SAID)
                said = await engine.generate(Request("agent", "agent", (), tokens, sampling, seed, TASK))
                tokens += said.ids
            assert len(tokens) == TURNS * (HEARD + SAID), "ours has full length"

        await asyncio.gather(*(one(row) for row in range(rows)))

    def talk_theirs() -> None:
        tokens: list[Sequence[int]] = [() for _ in range(rows)]
        cache = DynamicCache(config=theirs.config) if carried else None
        for turn in range(TURNS):
            prompts_RP = torch.tensor(
                [[*before, *now] for before, now in zip(tokens, heard[turn], strict=True)]
            )
            with torch.no_grad():
                told = theirs.generate(
                    prompts_RP,
                    past_key_values=cache,
                    attention_mask=torch.ones_like(prompts_RP),
                    max_new_tokens=SAID,
                    do_sample=True,
                    top_k=0,
                )
            tokens = told.tolist()
        assert {len(row) for row in tokens} == {TURNS * (HEARD + SAID)}, "theirs has full length"
        assert cache is None or cache.get_seq_length() == TURNS * (HEARD + SAID) - 1, "and was read once"

    return compare(lambda: asyncio.run(talk()), talk_theirs, rounds)
