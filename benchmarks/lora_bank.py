"""N adapters on one base: forward and backward for the sequences of all agents.

Peer: PEFT on the same base, `set_adapter` and a pass for each agent in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import compare, single_thread
from benchmarks.subjects import model, prompt_ids, subject
from kapelle.models.fast.attention import AttentionPlan, plan_sequences
from kapelle.models.lora_bank import route_of
from kapelle.team import Lora

TOKENS = 96
MICROBATCH = 4096
"""Most tokens in one of our passes; the peer's hold one agent's sequences, at most 3,072 tokens."""
MANY, FEW = 3, 2
"""Rounds of the row that is asked for, and of the others."""


def run() -> dict[str, Any]:
    """Return the ratios over adapters and sequences per agent."""
    single_thread()
    results = {"8 adapters x 2 sequences": adapters("1M", 8, 2, MANY)}
    for count in (1, 2, 4, 16):
        results[f"{count} adapters x 2 sequences"] = adapters("1M", count, 2, FEW)
    for count, rows in ((1, 32), (2, 32), (8, 8), (16, 1), (16, 32)):
        results[f"{count} adapters x {rows} sequences"] = adapters("1M", count, rows, FEW)
    results["10M, 8 adapters x 2 sequences"] = adapters("10M", 8, 2, FEW)
    results["10M, 2 adapters x 16 sequences"] = adapters("10M", 2, 16, FEW)
    return {**results, "never below": min(entry["ratio"] for entry in results.values())}


def adapters(size: str, count: int, rows: int, rounds: int) -> dict[str, Any]:
    """Return the comparison for `count` adapters with `rows` sequences each."""
    import peft

    lora = Lora()
    ours = subject(size)
    names = [f"agent_{k}" for k in range(count)]
    for seed, name in enumerate(names):
        ours.bank.add(name, lora, seed)
    settings = peft.LoraConfig(r=lora.rank, lora_alpha=round(lora.alpha), target_modules=list(lora.targets))
    theirs = peft.get_peft_model(model(size), settings, adapter_name=names[0])
    for name in names[1:]:
        theirs.add_adapter(name, settings)
    theirs.train()
    tokens_ART = torch.tensor([[prompt_ids(k * rows + r, TOKENS) for r in range(rows)] for k in range(count)])
    passes = [_pass(tokens_ART, names, batch) for batch in _batches(count, rows)]
    own = [parameter for name in names for parameter in ours.bank.parameters(name).values()]

    def banked() -> None:
        for tokens_N, positions_N, plan, route in passes:
            with ours.computing(route):
                loss = ours.logits(ours.hidden(tokens_N, positions_N, plan)).logsumexp(-1).sum()
            loss.backward()
        assert all(p.grad is not None for p in own), "every adapter learns"
        for parameter in own:
            parameter.grad = None

    def switched() -> None:
        for k, name in enumerate(names):
            theirs.set_adapter(name)
            theirs(input_ids=tokens_ART[k], use_cache=False).logits.logsumexp(-1).sum().backward()
        learnt = [p for key, p in theirs.named_parameters() if "lora_" in key]
        assert all(p.grad is not None for p in learnt), "every adapter learns"
        for parameter in learnt:
            parameter.grad = None

    return compare(banked, switched, rounds)


def _batches(count: int, rows: int) -> Iterator[list[tuple[int, int]]]:
    """Split all sequences, (agent, number), into passes as large as the engine's."""
    every = [(agent, row) for agent in range(count) for row in range(rows)]
    size = MICROBATCH // TOKENS
    for first in range(0, len(every), size):
        yield every[first : first + size]


def _pass(
    tokens_ART: Tensor, names: Sequence[str], batch: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor, AttentionPlan, list[tuple[str | None, int, int]]]:
    tokens_N = torch.cat([tokens_ART[agent, row] for agent, row in batch])
    positions_N = torch.arange(TOKENS).repeat(len(batch))
    owners: list[str | None] = [names[agent] for agent, _ in batch for _ in range(TOKENS)]
    return tokens_N, positions_N, plan_sequences([TOKENS] * len(batch)), route_of(owners)
