"""Log-probs and entropies of 1,024 tokens over 152,000 words and their gradient: time and memory of the output head.

Peer: all logits at once through torch's `cross_entropy` or `log_softmax` and its autograd, in the same compute type.
Memory is the most that a process holds more during a forward and backward pass than before it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from benchmarks.measure import compare, single_thread
from kapelle.engines.train.torch.large_head import statistics_in_pieces
from kapelle.models.language_model import OutputHead

TOKENS, WORDS, ROUNDS = 1024, 152_000, 3


class Case(NamedTuple):
    """What is asked of a head."""

    size: int = 256
    """Of the hidden state."""
    entropy: str = "measured"
    """As well: "omitted", "measured" for a metric, or "learned"."""
    trained: bool = False
    """Whether the head itself has a gradient."""
    half: bool = False
    """bfloat16 instead of float32."""


_Asked = tuple[Tensor, Tensor, Tensor, Case]
"""The head's weight, hidden states, tokens, and what is wanted of them."""

CASES = {
    "log-prob": Case(entropy="left out"),
    "log-prob, entropy measured": Case(),
    "log-prob and entropy": Case(entropy="learned"),
    "log-prob, trained head": Case(entropy="left out", trained=True),
    "log-prob and entropy, trained head": Case(entropy="learned", trained=True),
    "log-prob, entropy measured, D 1024": Case(1024),
    "log-prob, entropy measured, D 1024, bfloat16": Case(1024, half=True),
}


def run() -> dict[str, Any]:
    """Return ratios of CPU time and of peak memory for every case."""
    single_thread()
    return {name: measured(case) for name, case in CASES.items()}


def measured(case: Case) -> dict[str, Any]:
    """Return one case; ratios are how many times less ours takes."""
    torch.manual_seed(0)
    weight_VD = (0.05 * torch.randn(WORDS, case.size)).requires_grad_(case.trained)
    hidden_KD = torch.randn(TOKENS, case.size, requires_grad=True)
    token_K = torch.randint(WORDS, (TOKENS,))
    asked = (weight_VD, hidden_KD, token_K, case)
    ours, theirs = partial(_gradient, asked, _in_pieces), partial(_gradient, asked, _at_once)
    memory = [peak_bytes(work) for work in (ours, theirs)]  # first: later, freed blocks would be used again
    off = float((ours() - theirs()).norm() / theirs().norm())
    assert off < (0.02 if case.half else 1e-4), f"both compute the same gradient, not one {off:.1e} away"
    return {
        **compare(ours, theirs, ROUNDS),
        "memory_share": memory[0] / memory[1],
        "ours_mb": memory[0] / 1e6,
        "theirs_mb": memory[1] / 1e6,
    }


def _gradient(asked: _Asked, way: Callable[[_Asked], tuple[Tensor, Tensor | None]]) -> Tensor:
    weight_VD, hidden_KD, _, case = asked
    logp_K, entropy_K = way(asked)
    weight_K = torch.linspace(-1, 1, TOKENS)  # advantages, say
    total = (logp_K * weight_K).sum()
    if case.entropy == "learned":
        assert entropy_K is not None
        total = total + 0.1 * entropy_K.sum()
    return torch.autograd.grad(total, [hidden_KD, weight_VD] if case.trained else [hidden_KD])[0]


def _in_pieces(asked: _Asked) -> tuple[Tensor, Tensor | None]:
    weight_VD, hidden_KD, token_K, case = asked
    with torch.autocast("cpu", torch.bfloat16, enabled=case.half):
        return statistics_in_pieces(
            OutputHead(weight_VD),
            hidden_KD,
            token_K,
            torch.ones(TOKENS),
            entropy=case.entropy != "left out",
            learned=case.entropy == "learned",
        )


def _at_once(asked: _Asked) -> tuple[Tensor, Tensor | None]:
    weight_VD, hidden_KD, token_K, case = asked
    with torch.autocast("cpu", torch.bfloat16, enabled=case.half):
        logits_KV = linear(hidden_KD, weight_VD).float()
    if case.entropy == "learned":
        every_KV = logits_KV.log_softmax(dim=-1)
        return every_KV.gather(1, token_K[:, None])[:, 0], -(every_KV.exp() * every_KV).sum(dim=-1)
    logp_K = -cross_entropy(logits_KV, token_K, reduction="none")
    if case.entropy == "left out":
        return logp_K, None
    with torch.no_grad():
        return logp_K, torch.special.entr(logits_KV.softmax(dim=-1)).sum(dim=-1)


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that `work` makes a copy of this process hold more."""
    forked = multiprocessing.get_context("fork")
    here, there = forked.Pipe()
    process = forked.Process(target=_watch, args=(work, there))
    process.start()
    held: int = here.recv()
    process.join()
    return held


def _watch(work: Callable[[], object], there: Connection) -> None:
    before = _held("VmHWM")  # of a new process: what it holds
    work()
    there.send(_held("VmHWM") - before)


def _held(what: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))
