"""One GRPO step in Qwen3-0.6B's shape (random weights, 151,936 words): time for each agent, and peak memory.

Ours trains two agents, an adapter each on one base; the peer is TRL's `GRPOTrainer` with one agent's adapter (PEFT). Both hold
the base in the same type, sample 2 x 4 answers of 16 tokens for an agent and take one optimiser step. Each runs in
a process of its own, one step in turn.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import cpu_seconds, single_thread, summary
from benchmarks.subjects import tokenizer
from benchmarks.trl_peer import lora_settings, train_trl

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PROMPTS, SAMPLES, NEW, PROMPT, AGENTS, ROUNDS = 2, 4, 16, 64, 2, 2


def run() -> dict[str, Any]:
    """Return for both types of a base how many times faster an agent is, and the share of the peer's memory."""
    return {kind: against_trl(kind, Work(qwen)) for kind in ("bfloat16", "float32")}


@dataclass(frozen=True)
class Work:
    """What both do."""

    model: Callable[[str], PreTrainedModel]
    """Type of the base → the model, the same in both processes."""
    words: Callable[[], PreTrainedTokenizerFast] = tokenizer
    agents: int = AGENTS
    """Ours; the peer trains one."""
    prompts: int = PROMPTS
    samples: int = SAMPLES
    new: int = NEW
    prompt: int = PROMPT


def against_trl(dtype: str, work: Work) -> dict[str, Any]:
    """Let both take steps in turn, after one round that does not count."""
    spawned = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for side in (_ours, _theirs):
        here, there = spawned.Pipe()
        processes.append(spawned.Process(target=side, args=(dtype, work, there)))
        pipes.append(here)
        processes[-1].start()
        there.close()  # so that a process that dies ends the benchmark
    times = []
    for _ in range(ROUNDS + 1):
        both = []
        for pipe in pipes:
            pipe.send("step")
            both.append(pipe.recv())
        times.append((both[0] / work.agents, both[1]))
    peaks = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return {
        **summary(times[1:]),
        "memory_share": peaks[0] / peaks[1],
        "ours_mb": peaks[0] / 1e6,
        "theirs_mb": peaks[1] / 1e6,
    }


def qwen(dtype: str) -> PreTrainedModel:
    """Return the model with its weights in a type; the same in both processes."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    single_thread()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer().eos_token_id,  # one of 151,936: no one says it
        pad_token_id=tokenizer().pad_token_id,
    )
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    forget_peak()
    return made


def forget_peak() -> None:
    """Begin to measure the peak of memory: what is held now, and not what making it took."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _ours(dtype: str, work: Work, pipe: Connection) -> None:
    from benchmarks.ours import grpo_trainer, take_step
    from kapelle.models.language_model import LanguageModel

    base = LanguageModel(work.model(dtype), work.words(), dtype, "base")
    trainer = grpo_trainer(base, {"agents": work.agents}, work.prompts, work.samples, work.new, work.prompt)
    for _ in range(ROUNDS + 1):
        pipe.recv()
        step = partial(take_step, trainer, work.agents * work.prompts * work.samples, work.new)
        pipe.send(cpu_seconds(step))
    pipe.send(_peak())


def _theirs(dtype: str, work: Work, pipe: Connection) -> None:
    started = 0.0

    def begin() -> None:
        nonlocal started
        pipe.recv()
        started = time.process_time()

    def end() -> None:
        pipe.send(time.process_time() - started)

    train_trl(
        work.model(dtype),
        dtype,
        work.prompts,
        work.samples,
        work.new,
        work.prompt,
        ROUNDS + 1,
        begin,
        end,
        lora_settings(),
        work.words(),
    )
    pipe.send(_peak())
