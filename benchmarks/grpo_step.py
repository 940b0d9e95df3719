"""One whole GRPO step of one agent that trains all weights: sampling, rewards, update.

Peer: TRL 1.16 `GRPOTrainer` on the same weights, prompts and lengths (`trl_peer.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.measure import cpu_seconds, single_thread, summary
from benchmarks.ours import grpo_trainer, take_step
from benchmarks.subjects import model, subject
from benchmarks.trl_peer import train_trl
from kapelle.training.trainer import Trainer

PROMPT, NEW, SAMPLES = 64, 64, 8


def run() -> dict[str, Any]:
    """Return the ratios for each size and compute type."""
    single_thread()
    small = _trl_against([_ours("1M", 16, "float32")], "1M", 16, "float32", rounds=4)
    half = _trl_against([_ours("10M", 4, "bfloat16")], "10M", 4, "bfloat16", rounds=2)
    mixed = _trl_against(
        [_ours("10M", 4, "bfloat16"), _ours("10M", 4, "float32")], "10M", 4, "float32", rounds=2
    )
    return {
        "1M float32, 16 x 8 x 64": small[0],
        "10M bfloat16 on both, 4 x 8 x 64": half[0],
        "10M our bfloat16, their float32": mixed[0],
        "10M float32 on both": mixed[1],
    }


def _ours(size: str, prompts: int, dtype: str) -> Trainer:
    return grpo_trainer(subject(size, dtype), {"sharing": "shared"}, prompts, SAMPLES, NEW, PROMPT)


def _trl_against(
    ours: Sequence[Trainer], size: str, prompts: int, dtype: str, rounds: int
) -> list[dict[str, Any]]:
    """Let TRL train; after each of its steps ours take one. The first round does not count."""
    completions, started = prompts * SAMPLES, 0.0
    times: list[tuple[float, list[float]]] = []

    def begin() -> None:
        nonlocal started
        started = time.process_time()

    def end() -> None:
        theirs = time.process_time() - started
        mine = [cpu_seconds(partial(take_step, trainer, completions, NEW)) for trainer in ours]
        times.append((theirs, mine))

    train_trl(model(size), dtype, prompts, SAMPLES, NEW, PROMPT, rounds + 1, begin, end)
    return [summary([(mine[k], theirs) for theirs, mine in times[1:]]) for k in range(len(ours))]
