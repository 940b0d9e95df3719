"""Four turns of one conversation: 32 tokens heard in each and 32 said, or uneven numbers with a median of 32 (lognormal, at most 192).

Peer: transformers' `generate`, which reads the whole conversation again in each turn, as trainers use it; and at its best,
with its cache carried over from turn to turn. It samples until the longest answer of a turn is over; ours lets each row continue
with its next turn. In uneven turns the peer's shorter answers are padded, and what is padded is masked for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from benchmarks.gpu_work import lengths
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
        "1M, 64 uneven conversations": uneven_conversations("1M", 64, rounds=3),
        "1M, 64 uneven conversations, cache carried over": uneven_conversations(
            "1M", 64, rounds=3, carried=True
        ),
        "10M, 16 uneven conversations": uneven_conversations("10M", 16, rounds=2),
    }


def conversations(
    size: str, rows: int, rounds: int, samples: int = 1, *, carried: bool = False
) -> dict[str, Any]:
    """Return the comparison on `rows` conversations, `samples` of which begin alike.

    With `carried` the peer's cache lives through all turns of a conversation.
    """
    engine = LocalEngine({"base": subject(size)}, [Policy("agent", "base")])
    theirs = model(size).eval()
    new_messages = [
        [prompt_ids(1000 * turn + row // samples, HEARD) for row in range(rows)] for turn in range(TURNS)
    ]

    async def talk() -> None:
        async def one(row: int) -> None:
            tokens: tuple[int, ...] = ()
            for turn in range(TURNS):
                tokens += new_messages[turn][row]
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
                [[*before, *now] for before, now in zip(tokens, new_messages[turn], strict=True)]
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


class _Lengths(StoppingCriteria):
    """Ends each row after as many tokens as it has to say."""

    def __init__(self, begun: int, said_R: Tensor) -> None:
        self._begun, self._said_R = begun, said_R

    def __call__(self, tokens_RT: Tensor, scores: Any, **_: Any) -> Tensor:
        return tokens_RT.shape[1] - self._begun >= self._said_R


def uneven_conversations(size: str, rows: int, rounds: int, *, carried: bool = False) -> dict[str, Any]:
    """Return the comparison on `rows` conversations whose turns have lengths of their own."""
    engine = LocalEngine({"base": subject(size)}, [Policy("agent", "base")])
    theirs = model(size).eval()
    said = lengths(rows, even=False, median=SAID)
    new_messages = [[prompt_ids(1000 * turn + row, HEARD) for row in range(rows)] for turn in range(TURNS)]

    async def talk() -> None:
        async def one(row: int) -> None:
            tokens: tuple[int, ...] = ()
            for turn in range(TURNS):
                tokens += new_messages[turn][row]
                sampling = Sampling(max_tokens=said[row][turn])
                request = Request("agent", "agent", (), tokens, sampling, TURNS * row + turn, TASK)
                tokens += (await engine.generate(request)).ids
            assert len(tokens) == TURNS * HEARD + sum(said[row]), "ours has full length"

        await asyncio.gather(*(one(row) for row in range(rows)))

    def talk_theirs() -> None:
        tokens_RT = mask_RT = torch.empty(rows, 0, dtype=torch.long)
        cache = DynamicCache(config=theirs.config) if carried else None
        for turn in range(TURNS):
            new_R = torch.tensor([each[turn] for each in said])
            tokens_RT = torch.cat([tokens_RT, torch.tensor(new_messages[turn])], 1)
            mask_RT = torch.cat([mask_RT, torch.ones(rows, HEARD, dtype=torch.long)], 1)
            if not carried:  # no hole is read: what there is of each row stands at the right
                longest = int(mask_RT.sum(1).max())
                order_RT = mask_RT.sort(dim=1, stable=True).indices[:, -longest:]
                tokens_RT, mask_RT = tokens_RT.gather(1, order_RT), mask_RT.gather(1, order_RT)
            begun = tokens_RT.shape[1]
            with torch.no_grad():
                tokens_RT = theirs.generate(
                    tokens_RT,
                    past_key_values=cache,
                    attention_mask=mask_RT,
                    max_new_tokens=int(new_R.max()),
                    do_sample=True,
                    top_k=0,
                    stopping_criteria=StoppingCriteriaList([_Lengths(begun, new_R)]),
                )
            said_RT = torch.arange(tokens_RT.shape[1] - begun)[None] < new_R[:, None]
            mask_RT = torch.cat([mask_RT, said_RT.long()], 1)
        assert mask_RT.sum(1).tolist() == [TURNS * HEARD + sum(each) for each in said], (
            "theirs has full length"
        )

    return compare(lambda: asyncio.run(talk()), talk_theirs, rounds)
