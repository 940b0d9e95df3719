"""One update on sequences of 32 to 256 tokens, most of them short: packing against padding.

Peer: what trainers do, written plainly: microbatches of 8, padded to the longest, the same clipped loss on the
completion's tokens, gradients accumulated, clipped, one step of AdamW. Once in the order given, and once at its best:
sorted by length, so that little is padding.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import compare, single_thread
from benchmarks.subjects import model, prompt_ids, subject
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.train.protocol import Objective, TrainSetup, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.rows import Sample
from kapelle.settings.schema import OptimizerConfig
from kapelle.team import Policy

SEQUENCES, SHORTEST, LONGEST, MICROBATCH, PROMPT = 64, 32, 256, 8, 16


def run() -> dict[str, Any]:
    """Return the ratios for both sizes and compute types."""
    single_thread()
    return {
        "1M float32": update("1M", "float32", "float32", rounds=3),
        "10M float32": update("10M", "float32", "float32", rounds=1),
        "10M bfloat16 on both": update("10M", "bfloat16", "bfloat16", rounds=1),
        "10M our bfloat16, their float32": update("10M", "bfloat16", "float32", rounds=1),
        "1M float32, sorted by length": update("1M", "float32", "float32", rounds=4, by_length=True),
        "10M float32, sorted by length": update("10M", "float32", "float32", rounds=2, by_length=True),
        "tokens": {
            "real": sum(lengths()),
            "padded": _padded_tokens(lengths()),
            "padded, sorted by length": _padded_tokens(sorted(lengths())),
        },
    }


def lengths() -> list[int]:
    """Return the sequences' lengths: uniform in the logarithm, so that short ones are common."""
    draw = random.Random(0)
    span = LONGEST / SHORTEST
    return [round(SHORTEST * span ** draw.random()) for _ in range(SEQUENCES)]


def _padded_tokens(every: Sequence[int]) -> int:
    return sum(MICROBATCH * max(every[k : k + MICROBATCH]) for k in range(0, SEQUENCES, MICROBATCH))


def update(
    size: str, dtype: str, their_dtype: str, rounds: int, *, by_length: bool = False
) -> dict[str, Any]:
    """Return the comparison for one size."""
    settings = OptimizerConfig(lr=1e-5)
    base = {"base": subject(size, dtype)}
    engine = TorchTrainEngine(
        TrainSetup(base, [Policy("agent", "base")], [], settings, UpdateLimits(), seed=0)
    )
    counts = sorted(lengths()) if by_length else lengths()
    sequences = [prompt_ids(k, n) for k, n in enumerate(counts)]
    samples = _samples(sequences)
    objective = Objective(SurrogateConfig().build(), parity=False)
    theirs = model(size).train()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=settings.lr, weight_decay=0.0, fused=True)

    def ours() -> None:
        metrics = engine.update(samples, objective)
        assert metrics["grad_norm/agent"] > 0, "our step moved"

    def padded() -> None:
        _padded_update(theirs, optimizer, sequences, torch.bfloat16 if their_dtype == "bfloat16" else None)

    return compare(ours, padded, rounds)


def _samples(sequences: Sequence[tuple[int, ...]]) -> list[Sample]:
    samples = []
    for k, tokens in enumerate(sequences):
        count = len(tokens) - PROMPT
        columns = {
            "behaviour": torch.full((count,), -5.5),
            "advantage": torch.full((count,), float(k % 2) - 0.5),
        }
        samples.append(Sample("agent", tokens, tuple(range(PROMPT, len(tokens))), columns))
    return samples


def _padded_update(
    theirs: Any,
    optimizer: torch.optim.Optimizer,
    sequences: Sequence[tuple[int, ...]],
    half: torch.dtype | None,
) -> None:
    total = sum(len(tokens) - PROMPT for tokens in sequences)
    for first in range(0, len(sequences), MICROBATCH):
        rows = sequences[first : first + MICROBATCH]
        longest = max(len(tokens) for tokens in rows)
        ids_RT = torch.tensor([[*tokens, *([0] * (longest - len(tokens)))] for tokens in rows])
        length_R1 = torch.tensor([[len(tokens)] for tokens in rows])
        seen_RT = (torch.arange(longest)[None] < length_R1).long()
        advantage_R1 = torch.tensor([[float((first + k) % 2) - 0.5] for k in range(len(rows))])
        with torch.autocast("cpu", torch.bfloat16, enabled=half is not None):
            logits_RTV = theirs(input_ids=ids_RT, attention_mask=seen_RT, use_cache=False).logits[
                :, PROMPT - 1 : -1
            ]
        loss = _clipped(logits_RTV.float(), ids_RT[:, PROMPT:], advantage_R1, seen_RT[:, PROMPT:]) / total
        loss.backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _clipped(logits_RTV: Tensor, token_RT: Tensor, advantage_R1: Tensor, mask_RT: Tensor) -> Tensor:
    logp_RT = logits_RTV.log_softmax(-1).gather(2, token_RT[..., None]).squeeze(2)
    ratio_RT = (logp_RT + 5.5).exp()
    worst_RT = torch.minimum(ratio_RT * advantage_R1, ratio_RT.clamp(0.8, 1.2) * advantage_R1)
    return -(worst_RT * mask_RT).sum()
