"""What is made for a GPU, against the same work without it: recorded steps, grouped adapters, kernels, memory given back.

There is no peer: each pair is kapelle with and without one of the four. Wall time, the device waited for, the best of
a few runs after one that does not count. `python -m benchmarks.gpu cpu` runs all of it at a small size on a CPU, where
none of the four is at work; it shows that the benchmark runs, and nothing else.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.subjects import MODELS, prompt_ids, tokenizer
from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.rollout.local.step_graphs import GraphRecorder, on_cuda
from kapelle.models.embedded import build_model
from kapelle.models.fast import routed_linear
from kapelle.models.fast.attention import Span, plan_sequences, plan_spans
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import route_of
from kapelle.settings.schema import EmbeddedConfig
from kapelle.team import Lora
from kapelle.types import Sampling

LARGE = EmbeddedConfig(hidden=1024, layers=16, heads=16, kv_heads=4, intermediate=4096, context=1024)
"""Too many weights for copies with merged adapters: it samples through its own layers."""

TOKENS = 96
PROMPT = 64


def run(device: str = "cuda") -> dict[str, Any]:
    """Return seconds with and without each of the four, and bytes before and after a rest."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and torch sees none.")
    small, middle, large = MODELS["1M"], MODELS["10M"], LARGE
    if device == "cpu":
        small = middle = large = MODELS["1M"].model_copy(update={"layers": 1})
    rows, new = (128, 256) if device == "cuda" else (8, 24)
    return {
        "sampling": {
            f"{name}, {dtype}, {adapters} adapters": sampling(size, dtype, device, adapters, rows, new)
            for name, size in (("1M", small), ("10M", middle), ("large", large))
            for dtype, adapters in (("float32", 1), ("bfloat16", 1), ("bfloat16", 4))
        },
        "adapters": {
            f"{name}, {count} adapters x {each} sequences": adapters_pass(size, device, count, each)
            for name, size in (("10M", middle), ("large", large))
            for count, each in ((2, 2), (8, 2), (16, 1), (16, 8), (2, 32))
        },
        "kernels": {
            f"{name}, {dtype}, {answers} answers to each prompt": kernels_pass(size, dtype, device, answers)
            for name, size in (("10M", middle), ("large", large))
            for dtype, answers in (("float32", 1), ("bfloat16", 1), ("bfloat16", 8))
        },
        "rest": rest(middle, device, rows, new),
    }


def sampling(
    size: EmbeddedConfig, dtype: str, device: str, adapters: int, rows: int, new: int
) -> dict[str, float]:
    """Return tokens per second without and with recorded steps."""
    model, names = _subject(size, dtype, device, adapters)
    jobs = _jobs(names, rows, new)

    def sample(recorder_on: Callable[[torch.device], GraphRecorder | None]) -> float:
        decoder = Decoder(model, adapters, recorder_on=recorder_on)

        def work() -> None:
            decoder.join(jobs)
            while decoder.in_flight:
                decoder.advance(new)

        return rows * new / seconds(work, device)

    plain, recorded = sample(lambda _device: None), sample(on_cuda)
    return {"plain": plain, "recorded": recorded, "ratio": recorded / plain}


def adapters_pass(size: EmbeddedConfig, device: str, count: int, each: int) -> dict[str, float]:
    """Return seconds of a forward and backward pass one adapter after another, and by the rule."""
    model, names = _subject(size, "bfloat16", device, count)
    lengths = [TOKENS] * (count * each)
    tokens_N = torch.tensor([token for row in range(len(lengths)) for token in prompt_ids(row, TOKENS)])
    position_N = torch.arange(TOKENS).repeat(len(lengths)).to(device)
    tokens_N, plan = tokens_N.to(device), plan_sequences(lengths, device)
    route = route_of([name for name in names for _ in range(each * TOKENS)])

    def work() -> None:
        with model.computing(route):
            loss = model.logits(model.hidden(tokens_N, position_N, plan)).logsumexp(-1).sum()
        loss.backward()

    with patch.object(routed_linear, "has_kernel", lambda _device, _dtype: False):
        apart = seconds(work, device)
    by_rule = seconds(work, device)
    return {"one after another": apart, "by the rule": by_rule, "ratio": apart / by_rule}


def kernels_pass(size: EmbeddedConfig, dtype: str, device: str, answers: int) -> dict[str, float]:
    """Return seconds of a forward and backward pass by plain operations, and by every kernel that passes its trial.

    Prompts of four lengths, with so many answers that share each; two adapters.
    """
    spans: list[Span] = []
    for length in (16, TOKENS // 2, TOKENS, 2 * TOKENS):
        start = sum(span.length for span in spans)
        if answers == 1:
            spans.append(Span(start, length + TOKENS, None))
            continue
        spans.append(Span(start, length, None))
        starts = range(start + length, start + length + answers * TOKENS, TOKENS)
        spans += [Span(first, TOKENS, (start, length)) for first in starts]
    count = sum(span.length for span in spans)
    tokens_N = torch.tensor(
        [token for row in range(-(-count // TOKENS)) for token in prompt_ids(row, TOKENS)]
    )
    positions = [torch.arange(span.length) + (span.prefix[1] if span.prefix else 0) for span in spans]
    tokens_N, position_N = tokens_N[:count].to(device), torch.cat(positions).to(device)

    def taken(*, kernels: bool) -> float:
        model, names = _subject(size, dtype, device, 2, kernels=kernels)
        plan = plan_spans(spans, device)
        route = route_of([names[n >= count // 2] for n in range(count)])

        def work() -> None:
            with model.computing(route):
                loss = model.hidden(tokens_N, position_N, plan).square().sum()
            loss.backward()

        return seconds(work, device)

    plain, by_kernels = taken(kernels=False), taken(kernels=True)
    return {"plain": plain, "kernels": by_kernels, "ratio": plain / by_kernels}


def rest(size: EmbeddedConfig, device: str, rows: int, new: int) -> dict[str, int]:
    """Return the bytes that torch holds before a rollout, after it, and after the rest."""
    model, names = _subject(size, "bfloat16", device, 2)
    decoder = Decoder(model, 2, kept_tokens=1 << 20)
    held = [_reserved(device)]
    decoder.join(_jobs(names, rows, new))
    while decoder.in_flight:
        decoder.advance(new)
    held.append(_reserved(device))
    decoder.release_caches()
    if device == "cuda":
        torch.cuda.empty_cache()
    held.append(_reserved(device))
    return dict(zip(("before", "after the rollout", "after the rest"), held, strict=True))


def seconds(work: Callable[[], None], device: str, times: int = 3) -> float:
    """Return the least wall time of a few runs, after one that does not count."""
    taken = []
    for _ in range(times + 1):
        _wait(device)
        before = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - before)
    return min(taken[1:])


def _subject(
    size: EmbeddedConfig, dtype: str, device: str, adapters: int, *, kernels: bool = True
) -> tuple[LanguageModel, list[str]]:
    words = tokenizer()
    reachable = len(words) - 1
    made = build_model(size, reachable, reachable, int(words.pad_token_id))
    model = LanguageModel(torch.nn.Module.to(made, device), words, dtype, "gpu", kernels=kernels)
    names = [f"agent_{k}" for k in range(adapters)]
    for seed, name in enumerate(names):
        model.bank.add(name, Lora(), seed)
    return model, names


def _jobs(names: list[str], rows: int, new: int) -> list[Job]:
    return [
        Job(names[row * len(names) // rows], prompt_ids(row, PROMPT), Sampling(max_tokens=new), row)
        for row in range(rows)
    ]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _reserved(device: str) -> int:
    return torch.cuda.memory_reserved() if device == "cuda" else 0


if __name__ == "__main__":
    print(json.dumps(run(*sys.argv[1:]), indent=2))
