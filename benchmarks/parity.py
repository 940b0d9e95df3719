"""How far the trainer's log-probs are from the sampler's on fresh weights, prompts of many lengths."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.measure import single_thread
from benchmarks.subjects import prompt_ids, subject
from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.train.protocol import TrainSetup, UpdateLimits
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.rows import Sample
from kapelle.settings.schema import OptimizerConfig
from kapelle.team import Lora, Policy
from kapelle.types import Sampling

LENGTHS = (3, 9, 17, 40, 64, 65, 130)


def run() -> dict[str, Any]:
    """Return the largest and the mean difference in nats for each size and compute type."""
    single_thread()
    return {
        f"{size} {dtype}": gap(size, dtype) for size in ("1M", "10M") for dtype in ("float32", "bfloat16")
    }


def gap(size: str, dtype: str) -> dict[str, float]:
    """Return the differences for two adapters whose weights are not zero."""
    model = subject(size, dtype)
    policies = [Policy("a", "base", Lora()), Policy("b", "base", Lora())]
    engine = TorchTrainEngine(
        TrainSetup({"base": model}, policies, [], OptimizerConfig(), UpdateLimits(), seed=0)
    )
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for policy in policies:
            for parameter in engine.weights(policy.name).values():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise))
    jobs = [
        Job(name, prompt_ids(n, n), Sampling(max_tokens=64), seed)
        for name in ("a", "b")
        for n in LENGTHS
        for seed in (n, n + 1000)
    ]
    said = decode(model, jobs)
    samples = [
        Sample(
            str(job.adapter),
            job.prompt + tuple(one.ids),
            tuple(range(len(job.prompt), len(job.prompt) + len(one.ids))),
            {"behaviour": torch.tensor(one.logprobs)},
        )
        for job, one in zip(jobs, said, strict=True)
    ]
    scored = engine.score(samples)
    gap_K = torch.cat(
        [(s - sample.columns["behaviour"]).abs() for s, sample in zip(scored, samples, strict=True)]
    )
    return {"max": float(gap_K.max()), "mean": float(gap_K.mean())}
