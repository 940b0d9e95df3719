"""What `kapelle plan` says against what a step of training takes, on the CPU, for three sizes.

Models have random weights and are read from the disk; two agents answer questions of 64 tokens, four tasks with four episodes
each. The peak is that of all bytes that torch's allocator gave out during the second step, by phase, on top of weights
and moments; the process's own peak (resident memory) stands beside it. Each case runs in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import single_thread


class Case(NamedTuple):
    """A model and how it is trained."""

    hidden: int
    layers: int
    words: int = 32_000
    full: bool = False
    checkpointing: bool = False
    dtype: str = "float32"


CASES = {
    "5M, adapters": Case(128, 4),
    "5M, all weights": Case(128, 4, full=True),
    "50M, adapters": Case(512, 10),
    "50M, adapters, checkpointing": Case(512, 10, checkpointing=True),
    "50M, all weights": Case(512, 10, full=True),
    "220M, adapters": Case(1024, 15),
    "220M, adapters, bfloat16": Case(1024, 15, dtype="bfloat16"),
    "220M, all weights, checkpointing": Case(1024, 15, full=True, checkpointing=True),
}
MEASURED = ("sampling", "update")


def run() -> dict[str, Any]:
    """Return planned and measured peaks of every case, in MB."""
    return {name: in_a_process(case) for name, case in CASES.items()}


def in_a_process(case: Case) -> dict[str, Any]:
    """Return one case."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(case, there))
    process.start()
    there.close()
    answer: dict[str, Any] = here.recv()
    process.join()
    return answer


def _answer(case: Case, pipe: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipe.send(measured(case, Path(folder)))


def measured(case: Case, folder: Path) -> dict[str, Any]:
    """Plan a run of this case, take two steps of it, and return both in MB."""
    single_thread()
    _save_model(case, folder)
    from kapelle.cluster.planning import plan
    from kapelle.training.trainer import Trainer

    settings = _sections(case, str(folder))
    trainer = Trainer(**settings)
    found = plan(trainer.config)
    phases = {phase.name: phase for phase in found.processes[0].phases}
    list(trainer.steps(1))
    peaks, resident = _second_step(trainer), _resident_peak(trainer)
    held = sum(tensor.numel() * tensor.element_size() for tensor in _held(trainer))
    result: dict[str, Any] = {"parameters_m": found.weights.bases[0].parameters / 1e6}
    for name in MEASURED:
        kinds = phases[name].kinds
        planned = phases[name].total - kinds["process"]
        took = held + peaks[name]
        result[name] = {
            "planned_mb": planned / 1e6,
            "measured_mb": took / 1e6,
            "ratio": planned / took,
        }
    result["resident_mb"] = resident / 1e6
    result["planned_process_mb"] = max(phases[name].total for name in MEASURED) / 1e6
    return result


def _save_model(case: Case, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from kapelle.models.embedded import build_tokenizer

    words = build_tokenizer(512)
    config = Qwen3Config(
        vocab_size=case.words,
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 64,
        num_key_value_heads=case.hidden // 128,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype)).save_pretrained(folder)
    words.save_pretrained(folder)


def _sections(case: Case, path: str) -> dict[str, Any]:
    return {
        "model": {"path": path, "dtype": case.dtype, "device": "cpu"},
        "team": {
            "agents": 1 if case.full else 2,
            "sharing": "shared" if case.full else "lora",
            "sampling": {"max_tokens": 48},
        },
        "environment": {"name": "benchmarks.subjects:FixedTasks"},
        "workflow": {"name": "parallel"},
        "algorithm": {"name": "grpo", "group_size": 4},
        "training": {
            "steps": 4,
            "tasks_per_step": 4,
            "microbatch_tokens": 1024,
            "gradient_checkpointing": case.checkpointing,
        },
        "evaluation": {"before_and_after": False},
    }


def _held(trainer: Any) -> list[Any]:
    """Return every tensor that stays from step to step: weights, adapters, moments, and the head's merged copy."""
    import torch

    engine = trainer.engine
    found = [parameter for model in engine._models for parameter in model.model.parameters()]
    for learner in engine.learners.values():
        for entry in learner.optimizer.state.values():
            found += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    for queue in trainer.setup.engine.queues:
        fused = queue.decoder._fused
        copies = () if fused is None or fused._head is None else (fused._head._packed, fused._head._weight_IO)
        found += [copy for copy in copies if copy is not None]
    return found


def _resident_peak(trainer: Any) -> int:
    """Take a step without the profiler, which takes memory too; return the most bytes that the process had."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    list(trainer.steps(1))
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _second_step(trainer: Any) -> Mapping[str, int]:
    """Take a step; return the peaks of its two phases over what was there before."""
    from torch.profiler import ProfilerActivity, profile

    began: list[int] = []
    update = trainer.engine.update

    def noted(*given: Any) -> Any:
        began.append(time.time_ns())
        return update(*given)

    trainer.engine.update = noted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        list(trainer.steps(1))
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    live, peaks = 0, dict.fromkeys(MEASURED, 0)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        phase = MEASURED[event.start_ns() >= began[0]]
        peaks[phase] = max(peaks[phase], live)
    return peaks
