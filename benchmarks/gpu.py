"""What a GPU does with kapelle, for a person who has one: `python -m benchmarks.gpu --out mine.json`, in a quarter of an hour.

First whether it is right: log-probs of the trainer against those of the sampler, and of a CPU, for every type. Then how fast, in
the shapes of 0.6B and 4B with random weights: decode steps, conversations of even and uneven turns, an update of 65,536 tokens,
publishing, a whole step, and the most bytes that torch held. Beside it what peers take for the same work: transformers' `generate`
with adapters of PEFT, and a step of TRL's `GRPOTrainer`, each agent in turn. Last what recorded steps, grouped adapters, kernels and
given-back memory change: each pair is kapelle with and without one of the four.

Seconds are wall time, the device waited for, the best of a few runs after one that does not count. What does not fit into the
card's memory is omitted and said. Sections can be named (`python -m benchmarks.gpu models peers`), and FILE holds what is measured so
far. `python -m benchmarks.gpu --compare mine.json` prints what was measured beside what is estimated from counts (`gpu_counts.py`) and
beside the peers. `python -m benchmarks.gpu --cpu` runs all of it at a small size on a CPU, which shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import gpu_work
from benchmarks.gpu_counts import AGENTS, CARDS, KEPT, STEPS, UPDATE_TOKENS, Card, Counted, estimate
from benchmarks.gpu_work import LENGTH, ROWS, SHAPES
from benchmarks.ours import grpo_trainer, take_step
from benchmarks.subjects import MODELS, prompt_ids, tokenizer
from benchmarks.trl_peer import lora_settings, train_trl
from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.rollout.local.step_graphs import GraphRecorder, nowhere, on_cuda
from kapelle.models.embedded import build_model
from kapelle.models.fast import routed_linear
from kapelle.models.fast.attention import Span, plan_sequences, plan_spans
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import route_of
from kapelle.rows import Sample
from kapelle.settings.schema import EmbeddedConfig
from kapelle.team import Lora
from kapelle.types import Sampling

LARGE = EmbeddedConfig(hidden=1024, layers=16, heads=16, kv_heads=4, intermediate=4096, context=1024)
"""Too many weights for copies with merged adapters: it samples through its own layers."""

TOKENS = 96
PROMPT = 64
STEP = (4, 8, 128)
"""Tasks, answers to each and their tokens, of each agent in a step of GRPO; prompts have 64 tokens."""


def sections(device: str) -> Mapping[str, Callable[[], Any] | Mapping[str, Callable[[], Any]]]:
    """Return what is measured: sections by name, most of them of several measurements."""
    cuda = device == "cuda"
    small, middle, large = MODELS["1M"], MODELS["10M"], LARGE
    if not cuda:
        small = middle = large = MODELS["1M"].model_copy(update={"layers": 1})
    rows, new = (128, 256) if cuda else (8, 24)
    shapes = [(name, agents) for name in ("0.6B", "4B") for agents in AGENTS] if cuda else [("tiny", 2)]
    return {
        "environment": partial(environment, device),
        "constants": partial(constants, device),
        "log-probs": {
            dtype: partial(log_probs, dtype, device) for dtype in ("float32", "bfloat16", "float16")
        },
        "models": {
            f"{name}, {agents} agents": partial(shaped, name, agents, device) for name, agents in shapes
        },
        "peers": {
            f"{name}, {agents} agents": partial(peers, name, agents, device) for name, agents in shapes
        },
        "sampling": {
            f"{name}, {dtype}, {adapters} adapters": partial(
                sampling, size, dtype, device, adapters, rows, new
            )
            for name, size in (("1M", small), ("10M", middle), ("large", large))
            for dtype, adapters in (("float32", 1), ("bfloat16", 1), ("bfloat16", 4))
        },
        "adapters": {
            f"{name}, {count} adapters x {each} sequences": partial(adapters_pass, size, device, count, each)
            for name, size in (("10M", middle), ("large", large))
            for count, each in ((2, 2), (8, 2), (16, 1), (16, 8), (2, 32))
        },
        "kernels": {
            f"{name}, {dtype}, {answers} answers to each prompt": partial(
                kernels_pass, size, dtype, device, answers
            )
            for name, size in (("10M", middle), ("large", large))
            for dtype, answers in (("float32", 1), ("bfloat16", 1), ("bfloat16", 8))
        },
        "rest": partial(rest, middle, device, rows, new),
    }


def run(device: str = "cuda", wanted: Sequence[str] = (), out: Path | None = None) -> dict[str, Any]:
    """Return what the sections measure, all or those that are wanted; `out` holds it as soon as it is known."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and torch sees none.")
    found: dict[str, Any] = {}

    def kept(into: dict[str, Any], name: str, measure: Callable[[], Any]) -> None:
        began = time.perf_counter()
        into[name] = measure()
        print(f"{time.perf_counter() - began:6.1f} s  {name}", file=sys.stderr, flush=True)
        if out is not None:
            out.write_text(json.dumps(found, indent=2) + "\n", "utf-8")

    for section, measured in sections(device).items():
        if wanted and section not in wanted and section not in ("environment", "constants"):
            continue
        if callable(measured):
            kept(found, section, measured)
            continue
        found[section] = {}
        for name, measure in measured.items():
            kept(found[section], name, measure)
    return found


def environment(device: str) -> dict[str, Any]:
    """Return what ran this: card, driver, versions, commit."""
    import transformers

    card: dict[str, Any] = {}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        card = {"card": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}
        card |= {
            "capability": list(torch.cuda.get_device_capability()),
            "driver": _said_by("nvidia-smi", *_ASK),
        }
    return card | {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "commit": _said_by("git", "rev-parse", "HEAD"),
    }


_ASK = ("--query-gpu=driver_version", "--format=csv,noheader")


def _said_by(*command: str) -> str | None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603 - git and nvidia-smi
    except OSError:
        return None
    return ended.stdout.split("\n", maxsplit=1)[0] or None


def constants(device: str) -> dict[str, float]:
    """Return seconds of a launch and of a replayed kernel, memory in GB/s and bfloat16 products in TFLOP/s, as they are here."""
    x = torch.zeros(16, device=device)

    def launches(count: int = 2000) -> None:
        for _ in range(count):
            x.add_(1)

    launch = seconds(launches, device) / 2000
    kernel = launch
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launches()
        kernel = seconds(graph.replay, device) / 2000
    size = 1 << (28 if device == "cuda" else 22)
    source, target = torch.randint(256, (2, size), dtype=torch.uint8, device=device)
    side = 8192 if device == "cuda" else 256
    a, b = torch.randn(2, side, side, dtype=torch.bfloat16, device=device)  # zeros would be faster
    return {
        "launch": launch,
        "kernel": kernel,
        "gb_s": 2 * size / seconds(lambda: target.copy_(source), device) / 1e9,
        "tflop_s": 2 * side**3 / seconds(lambda: torch.mm(a, b), device) / 1e12,
    }


def log_probs(dtype: str, device: str) -> dict[str, float]:
    """Return how far log-probs of the trainer are from the sampler's, and from those of a CPU in float32 (nats)."""
    shape = SHAPES["0.6B" if device == "cuda" else "tiny"]._replace(layers=2)
    if device == "cpu" and dtype == "float16":
        return {}  # not every CPU computes in it
    model = gpu_work.ours(gpu_work.drawn(shape, dtype, "cpu"), dtype)
    reference = gpu_work.ours(gpu_work.drawn(shape, "float32", "cpu"), "float32")
    reference.model.load_state_dict(model.model.state_dict())
    torch.nn.Module.to(model.model, device)
    there, here = (gpu_work.learner(each, 2, 4096) for each in (model, reference))
    decoder = Decoder(model, 2)
    jobs = _jobs(gpu_work.names(2), 8, 64)
    told = decoder.join(jobs)
    while decoder.in_flight:
        decoder.advance(64)
    samples = [
        Sample(str(job.adapter), (*job.prompt, *one.ids), tuple(range(PROMPT, PROMPT + len(one.ids))), {})
        for job, one in zip(jobs, told, strict=True)
    ]
    sampled = torch.cat([torch.tensor(one.logprobs) for one in told])
    scored, exact = (torch.cat([each.cpu() for each in engine.score(samples)]) for engine in (there, here))

    def apart(one: Tensor, other: Tensor) -> dict[str, float]:
        far = (one - other).abs()
        return {"largest": float(far.max()), "mean": float(far.mean())}

    return {
        f"{what}, {kind}": value
        for what, far in (
            ("trainer and sampler", apart(scored, sampled)),
            ("trainer and a CPU in float32", apart(scored, exact)),
        )
        for kind, value in far.items()
    }


def shaped(name: str, agents: int, device: str) -> dict[str, Any]:
    """Return times and most bytes of every kind of work on a model; what runs out of memory says so."""
    shape, cuda = SHAPES[name], device == "cuda"

    def fresh() -> LanguageModel:
        return gpu_work.ours(gpu_work.drawn(shape, "bfloat16", device), "bfloat16", agents)

    def bare() -> LanguageModel:
        return gpu_work.ours(gpu_work.drawn(shape, "bfloat16", device), "bfloat16")

    works: Mapping[str, Callable[[], dict[str, float]]] = {
        "decode": lambda: decode_step(fresh(), agents, device, on_cuda),
        "decode, plain": lambda: decode_step(fresh(), agents, device, nowhere),
        "conversations, even": lambda: conversations(fresh(), agents, device, even=True),
        "conversations, uneven": lambda: conversations(fresh(), agents, device, even=False),
        f"update, {UPDATE_TOKENS:,} tokens": lambda: update(
            bare(), agents, device, UPDATE_TOKENS if cuda else 1024
        ),
        "step": lambda: whole_step(bare(), agents, device),
    }
    return _each(works, device)


def _each(works: Mapping[str, Callable[[], dict[str, float]]], device: str) -> dict[str, Any]:
    """Return what each kind of work measures and the most bytes it held, or why it could not be done."""
    cuda, found = device == "cuda", dict[str, Any]()
    for work, measure in works.items():
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            found[work] = measure() | ({"most bytes": torch.cuda.max_memory_allocated()} if cuda else {})
        except torch.OutOfMemoryError as error:
            found[work] = {"out of memory": str(error).split(".", maxsplit=1)[0]}
        except ImportError as error:
            found[work] = {"missing": str(error)}
    return found


class _Counting:
    """Makes recorders that note how many steps they replay, of all that they see."""

    def __init__(self, recorder_on: gpu_work.Recorder) -> None:
        self._recorder_on = recorder_on
        self.warm = self.recorded = self.replayed = 0

    def __call__(self, device: torch.device) -> GraphRecorder | None:
        """Return a recorder for a device, if one is used there."""
        made = self._recorder_on(device)
        if made is None:
            return None
        warm, record = made.warm, made.record

        def counted_warm(step: Callable[[], Tensor]) -> Tensor:
            self.warm += 1
            return warm(step)

        def counted_record(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
            self.recorded += 1
            replay = record(step)

            def replayed() -> Tensor:
                self.replayed += 1
                return replay()

            return replayed

        made.warm, made.record = counted_warm, counted_record  # type: ignore[method-assign]
        return made

    @property
    def share(self) -> float:
        """Share of the steps that were replayed."""
        return self.replayed / max(1, self.warm + self.replayed)


def decode_step(
    model: LanguageModel, agents: int, device: str, recorder_on: gpu_work.Recorder
) -> dict[str, float]:
    """Return seconds of a decode step of 64 rows, tokens a second, and the share of replayed steps."""
    rows, steps = (ROWS, STEPS) if device == "cuda" else (8, 4)
    counting = _Counting(recorder_on)
    decoder = gpu_work.decoding(model, agents, rows, 8 * steps, counting)
    decoder.advance(2)
    step = seconds(lambda: decoder.advance(steps), device) / steps
    return {"seconds": step, "tokens a second": rows / step, "replayed": counting.share}


def conversations(model: LanguageModel, agents: int, device: str, *, even: bool) -> dict[str, float]:
    """Return seconds of 64 conversations of four turns, tokens a second, and the share of replayed steps."""
    said = gpu_work.lengths(ROWS if device == "cuda" else 4, even=even, median=32 if device == "cuda" else 4)
    counting = _Counting(on_cuda)
    engine = gpu_work.sampler(model, agents, counting)
    tokens = 0

    def talk() -> None:
        nonlocal tokens
        tokens = gpu_work.conversations(engine, gpu_work.names(agents), said)

    taken = seconds(talk, device, 1)
    return {"seconds": taken, "tokens a second": tokens / taken, "replayed": counting.share}


def update(model: LanguageModel, agents: int, device: str, tokens: int) -> dict[str, float]:
    """Return seconds of an update, and of giving the sampler what was learned."""
    engine = gpu_work.learner(model, agents, 4096)
    player = gpu_work.sampler(model, agents, on_cuda)
    samples = gpu_work.samples(agents, tokens // LENGTH)
    given: list[float] = []

    def learn() -> None:
        engine.update(samples, gpu_work.OBJECTIVE)

    def give() -> None:
        for policy, published in engine.publish().items():
            player.load(policy, published.weights, published.version)

    updated = seconds(learn, device, 2)
    for _ in range(3):
        engine.update(samples[:: len(samples) // agents], gpu_work.OBJECTIVE)
        given.append(seconds(give, device, 0))
    return {"seconds": updated, "tokens a second": tokens / updated, "publish seconds": min(given)}


def whole_step(model: LanguageModel, agents: int, device: str) -> dict[str, float]:
    """Return seconds of a whole step of GRPO, and what its parts took."""
    prompts, group, new = STEP if device == "cuda" else (1, 2, 8)
    trainer = grpo_trainer(model, {"agents": agents}, prompts, group, new)
    rows: list[Mapping[str, float]] = []
    taken = seconds(
        lambda: rows.append(take_step(trainer, agents * prompts * group, new, exact=False)), device, 2
    )
    return {"seconds": taken, **{name: value for name, value in rows[-1].items() if name.startswith("time/")}}


def peers(name: str, agents: int, device: str) -> dict[str, Any]:
    """Return what peers take for the work of `shaped`, where they are installed; each agent has its turn.

    A decode step of transformers' `generate` with adapters of PEFT, and a whole step of TRL's `GRPOTrainer` with its parts.
    """
    works: Mapping[str, Callable[[], dict[str, float]]] = {
        "decode": lambda: generate_step(name, agents, device),
        "step": lambda: trl_step(name, agents, device),
    }
    return _each(works, device)


def generate_step(name: str, agents: int, device: str) -> dict[str, float]:
    """Return seconds of a step of transformers' `generate`, for the rows of each agent in turn."""
    import peft

    rows, steps = (ROWS // agents, STEPS) if device == "cuda" else (2, 4)
    model: Any = peft.get_peft_model(gpu_work.drawn(SHAPES[name], "bfloat16", device), lora_settings())
    prompts_RP = torch.tensor([prompt_ids(row, gpu_work.PROMPT) for row in range(rows)]).to(device)

    def sample(new: int) -> None:
        with torch.no_grad():
            model.generate(
                input_ids=prompts_RP,
                attention_mask=torch.ones_like(prompts_RP),
                max_new_tokens=new,
                do_sample=True,
                top_k=0,
            )

    first, last = (seconds(lambda count=count: sample(count), device) for count in (4, 4 + steps))  # type: ignore[misc]
    step = agents * (last - first) / steps
    return {"seconds": step, "tokens a second": agents * rows / step}


def trl_step(name: str, agents: int, device: str) -> dict[str, float]:
    """Return seconds of a step of TRL's `GRPOTrainer`, and of its sampling, for each agent in turn."""
    from trl import GRPOTrainer

    prompts, group, new = STEP if device == "cuda" else (1, 2, 8)
    model = gpu_work.drawn(SHAPES[name], "bfloat16", device)
    plain = GRPOTrainer._generate_and_score_completions
    begun: list[float] = []
    sampled: list[float] = []
    ended: list[float] = []

    def now(into: list[float]) -> None:
        _wait(device)
        into.append(time.perf_counter())

    def generated(*given: Any, **named: Any) -> Any:
        answer = plain(*given, **named)
        now(sampled)
        return answer

    with patch.object(GRPOTrainer, "_generate_and_score_completions", generated):
        begin, end = partial(now, begun), partial(now, ended)
        train_trl(model, "bfloat16", prompts, group, new, 64, 3, begin, end, lora_settings())
    whole = min(after - before for before, after in zip(begun[1:], ended[1:], strict=True))
    sampling = min(after - before for before, after in zip(begun[1:], sampled[1:], strict=True))
    return {"seconds": agents * whole, "sampling": agents * sampling}


def compare(measured: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """Return what a run measured beside its estimates, from a maker's figures and from what the card did in `constants`."""
    here = measured["constants"]
    name = measured["environment"].get("card", "")
    makers = next((card for title, card in CARDS.items() if title.split()[-1] in name), None)
    own = Card(here["gb_s"], here["tflop_s"], "measured")
    lines = [f"{name or 'a CPU'}: {measured['environment']['torch']}", ""]
    lines += [f"{'work':44} {'measured':>10} {'estimated':>10} {'by its own figures':>19}  (ms)"]
    for model, works in measured["models"].items():
        counts: Mapping[str, Counted] = kept["now"].get(model, {})
        for work, found in works.items():
            for title, key in ((work, "seconds"), ("publish", "publish seconds")):
                if key in found:
                    counted = counts.get(title)
                    by_maker = None if counted is None or makers is None else estimate(counted, makers)
                    by_own = (
                        None if counted is None else estimate(counted, own, here["launch"], here["kernel"])
                    )
                    numbers = " ".join(
                        f"{'–' if value is None else f'{1e3 * value:,.2f}':>{width}}"
                        for value, width in ((found[key], 10), (by_maker, 10), (by_own, 19))
                    )
                    lines.append(f"{f'{model}: {title}':44} {numbers}")
            if "out of memory" in found:
                lines.append(f"{f'{model}: {work}':44} out of memory")
    lines += ["", f"{'beside peers':44} {'ours':>10} {'theirs':>10} {'theirs / ours':>19}  (ms)"]
    for model, works in measured.get("peers", {}).items():
        for work, found in works.items():
            mine = measured["models"].get(model, {}).get(work, {})
            if "seconds" in found and "seconds" in mine:
                one, other = mine["seconds"], found["seconds"]
                lines.append(
                    f"{f'{model}: {work}':44} {1e3 * one:10,.2f} {1e3 * other:10,.2f} {other / one:19.2f}"
                )
            else:
                said = found.get("missing") or found.get("out of memory") or "not measured by us"
                lines.append(f"{f'{model}: {work}':44} {said}")
    return "\n".join(lines)


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


def seconds(work: Callable[[], object], device: str, times: int = 3) -> float:
    """Return the least wall time of a few runs, after one that does not count; of a single one where `times` is 0."""
    taken = []
    for _ in range(times + 1):
        _wait(device)
        before = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - before)
    return min(taken[1:] or taken)


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


def main(words: Sequence[str]) -> None:
    """Measure, or compare what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument(
        "sections", nargs="*", choices=[*sections("cpu"), []], help="what to measure; else all"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="a small size on the CPU, which shows that it runs"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where results go, one by one")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="print a file's results beside estimates"
    )
    asked = parser.parse_args(words)
    if asked.compare is not None:
        print(compare(json.loads(asked.compare.read_text("utf-8")), json.loads(KEPT.read_text("utf-8"))))
        return
    found = run("cpu" if asked.cpu else "cuda", asked.sections, asked.out)
    if asked.out is None:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
