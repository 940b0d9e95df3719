"""Sampling many prompts at once: tokens and their log-probs.

Peer: transformers' `generate` with sampling on the same weights and prompts. It returns tokens alone; the
log-probs that training needs are extra work on our side that it is not charged for.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.measure import compare, single_thread
from benchmarks.subjects import model, prompt_ids, subject
from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.types import Sampling

PROMPT = 64
BF16 = "bfloat16"


def run() -> dict[str, Any]:
    """Return the ratios in float32, with bfloat16 on both sides and on ours alone, and for groups."""
    single_thread()
    return {
        "1M, batch 128, 128 new": batch("1M", 128, 128, rounds=3),
        "1M, batch 128, 48 new": batch("1M", 128, 48, rounds=3),
        "10M, batch 32, 128 new": batch("10M", 32, 128, rounds=3),
        "10M, batch 32, 48 new": batch("10M", 32, 48, rounds=5),
        "10M, batch 32, 128 new, bfloat16 on both": batch("10M", 32, 128, 3, dtype=BF16, peer_dtype=BF16),
        "10M, batch 32, 48 new, bfloat16 on both": batch("10M", 32, 48, 5, dtype=BF16, peer_dtype=BF16),
        "10M, batch 32, 128 new, our bfloat16": batch("10M", 32, 128, rounds=3, dtype=BF16),
        "10M, batch 32, 48 new, our bfloat16": batch("10M", 32, 48, rounds=5, dtype=BF16),
        "1M, 16 prompts x 8 samples, 128 new": batch("1M", 128, 128, rounds=2, samples=8),
        "1M, batch 128, 48 of 64 prompt tokens alike, 48 new": batch("1M", 128, 48, rounds=2, alike=48),
    }


def batch(
    size: str,
    rows: int,
    new: int,
    rounds: int,
    samples: int = 1,
    dtype: str = "float32",
    peer_dtype: str = "float32",
    alike: int = 0,
) -> dict[str, Any]:
    """Return the comparison on `rows` sequences: `samples` of one prompt each, which begin with `alike` tokens."""
    ours, theirs = subject(size, dtype), model(size).eval().to(getattr(torch, peer_dtype))
    instructions = prompt_ids(rows, alike)
    prompts = [instructions + prompt_ids(row // samples, PROMPT - alike) for row in range(rows)]
    jobs = [Job(None, prompt, Sampling(max_tokens=new), seed) for seed, prompt in enumerate(prompts)]
    prompts_RP = torch.tensor(prompts)

    def sample_ours() -> None:
        said = decode(ours, jobs)
        assert all(len(one.ids) == new == len(one.logprobs) for one in said), "ours has full length"

    def sample_theirs() -> None:
        with torch.no_grad():
            told = theirs.generate(
                prompts_RP,
                attention_mask=torch.ones_like(prompts_RP),
                max_new_tokens=new,
                do_sample=True,
                top_k=0,
            )
        assert told.shape == (rows, PROMPT + new), "theirs has full length"

    return compare(sample_ours, sample_theirs, rounds)
