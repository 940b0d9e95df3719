"""What a GPU does with kapelle, for a person who has one: `python -m benchmarks.gpu --out mine.json`, in fifteen minutes.

The parts run in order of worth, each in its own process and with its own limit of time:

1. `correctness`: the decoding kernels against a CPU, and log-probs of the trainer against the sampler and a CPU, for every type.
2. `models`: decoding steps, an update of 65,536 tokens and publishing, in the shapes of 0.6B and 4B with random weights.
3. `steps`: a whole step of GRPO beside TRL's `GRPOTrainer`, with vLLM where it is installed; each agent in turn.
4. `long`: updates of sequences of 16,384 tokens with adapters of rank 16, beside what prime-rl publishes for one H100.
5. `mismatch`: the KL divergence of sampler and trainer by the depth of the context.

The part `more` runs only if it is named: steps that are not recorded, conversations, transformers' `generate` with adapters of PEFT.

Seconds are wall time, the device waited for, the best of a few runs after one that does not count. FILE holds what is measured so
far. What does not fit into memory or fails is omitted and said; a part that exceeds its limit is stopped and noted in `parts`.
`python -m benchmarks.gpu --compare mine.json` prints what was measured beside what is estimated from counts (`gpu_counts.py`) and
beside peers. `--small` runs everything at a small size, `--cpu` does so on a CPU; this shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import gpu_work
from benchmarks.gpu_counts import AGENTS, CARDS, KEPT, STEPS, UPDATE_TOKENS, Card, Counted, estimate
from benchmarks.gpu_work import LENGTH, ROWS, SHAPES
from benchmarks.ours import grpo_trainer, take_step
from benchmarks.subjects import prompt_ids
from benchmarks.trl_peer import lora_settings, train_trl
from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.rollout.local.step_graphs import GraphRecorder, nowhere, on_cuda
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.models.fast import decode_ops
from kapelle.models.fast.decode_ops import LayerKind
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Sample
from kapelle.types import Sampling

DTYPES = ("float32", "bfloat16", "float16")
KINDS: Mapping[str, LayerKind] = {
    "Qwen3 0.6B": LayerKind(1024, 3072, 16, 8, 128, True, False, False, False, False, 0, 0.0),
    "Qwen3 4B": LayerKind(2560, 9728, 32, 8, 128, True, False, False, False, False, 0, 0.0),
    "Qwen2.5 0.5B": LayerKind(896, 4864, 14, 2, 64, False, False, False, False, True, 0, 0.0),
    "Gemma 2 2B": LayerKind(2304, 9216, 8, 4, 256, False, True, True, True, False, 100, 50.0),
}
"""Sizes from the `config.json` that the makers publish; the window is smaller, so that it hides tokens of 190."""
PRIME_RL: Mapping[str, int] = {"0.6B": 13_342, "4B": 6_229}
"""Tokens per second that prime-rl publishes for one H100 (2026-11): adapters of rank 16, sequences of 16,384 tokens, FlashAttention 3,
blocks computed again in the backward pass."""
DEPTHS = (64, 512, 1024, 2048, 4096, 8192)
"""The first tokens of the stretches of a context whose divergence is measured; tinker-cookbook names 2e-4 for dense models."""
PROMPT = 64
STEP = (4, 8, 128)
"""Tasks, answers to each and their tokens, of each agent in a step of GRPO; prompts have 64 tokens."""


class At(NamedTuple):
    """Where the work is done."""

    device: str
    small: bool
    """Whether only to show that it runs."""


GPU = At("cuda", small=False)


class Part(NamedTuple):
    """Measurements in one process."""

    limit: float
    """Seconds after which the process is stopped."""
    works: Mapping[tuple[str, ...], Callable[[], Mapping[str, Any]]]
    """Each measurement by its place in the results."""


def parts(at: At) -> Mapping[str, Part]:
    """Return what is measured, in order of worth."""
    sizes = ("tiny",) if at.small else ("0.6B", "4B")
    shapes = [(size, agents) for size in sizes for agents in ((2,) if at.small else AGENTS)]
    tokens = 1024 if at.small else UPDATE_TOKENS

    def decode(size: str, agents: int, recorder_on: gpu_work.Recorder) -> dict[str, float]:
        return decode_step(_model(size, at, agents), agents, at, recorder_on)

    def talk(size: str, agents: int, *, even: bool) -> dict[str, float]:
        return conversations(_model(size, at, agents), agents, at, even=even)

    def named(
        kind: str, work: str, of: Callable[[str, int], Any], pairs: Any = shapes
    ) -> dict[tuple[str, ...], Any]:
        return {(kind, f"{size}, {agents} agents", work): partial(of, size, agents) for size, agents in pairs}

    two = [(size, 2) for size in sizes]
    models = [
        named("models", "decode", partial(decode, recorder_on=on_cuda)),
        named("models", f"update, {UPDATE_TOKENS:,} tokens", partial(update, at=at, tokens=tokens)),
    ]
    with_vllm = (
        named("peers", "step with vLLM", partial(trl_step, at=at, vllm=True), two)
        if find_spec("vllm")
        else {}
    )
    return {
        "machine": Part(60, {("environment",): partial(environment, at), ("constants",): partial(constants, at)}),
        "correctness": Part(180, {
            **{("kernels", f"{name}, {dtype}"): partial(layer, kind, dtype, at) for name, kind in KINDS.items() for dtype in DTYPES},
            **{("log-probs", dtype): partial(log_probs, dtype, at) for dtype in DTYPES},
        }),
        "models": Part(240, {place: each[place] for own in zip(*models, strict=True) for each, place in zip(models, own, strict=True)}),
        "steps": Part(210, {
            **named("models", "step", partial(whole_step, at=at), two),
            **with_vllm,
            **named("peers", "step", partial(trl_step, at=at, vllm=False), two),
        }),
        "long": Part(120, {("long", size): partial(long_update, size, at) for size in sizes}),
        "mismatch": Part(90, {("mismatch", size): partial(mismatch, size, at) for size in sizes}),
        "more": Part(600, {
            **named("models", "decode, plain", partial(decode, recorder_on=nowhere)),
            **named("models", "conversations, even", partial(talk, even=True)),
            **named("models", "conversations, uneven", partial(talk, even=False)),
            **named("peers", "decode", partial(generate_step, at=at)),
        }),
    }  # fmt: skip


NAMED_ONLY = ("more",)
"""What runs only if it is named."""


def run(
    at: At = GPU,
    wanted: Sequence[str] = (),
    out: Path | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Return what the parts measure, all or those that are wanted; `out` holds it as soon as it is known.

    Each part runs in its own process, at most for `limit` seconds; by default for the limit of the part.
    """
    if at.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and torch sees none.")
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            return run(at, wanted, Path(folder) / "results.json", limit)
    _write(out, {"parts": {}})
    for name, part in parts(at).items():
        if name in wanted or name == "machine" or not (wanted or name in NAMED_ONLY):
            began, most = time.perf_counter(), part.limit if limit is None else limit
            ended = _in_a_process([name, at.device, str(int(at.small)), str(out)], most)
            found = json.loads(out.read_text("utf-8"))
            found["parts"][name] = {"seconds": time.perf_counter() - began, "limit": most, "ended": ended}
            _write(out, found)
    return dict(json.loads(out.read_text("utf-8")))


def _in_a_process(words: Sequence[str], limit: float) -> str:
    """Run a part in a process, and return how the process ended."""
    command = [sys.executable, "-m", "benchmarks.gpu", "part", *words]
    child = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)  # noqa: S603 - this module
    try:
        code = child.wait(limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit:g} s"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # vLLM has processes of its own
            child.wait()
    return "complete" if code == 0 else f"exit code {code}"


def run_part(name: str, device: str, small: str, out: str) -> None:
    """Run the measurements of a part, and write each into the file."""
    at, path = At(device, small == "1"), Path(out)
    for place, measure in parts(at)[name].works.items():
        began = time.perf_counter()
        measured = _tried(measure, at.device)
        found = json.loads(path.read_text("utf-8"))
        into = found
        for each in place[:-1]:
            into = into.setdefault(each, {})
        into[place[-1]] = measured
        _write(path, found)
        print(f"{time.perf_counter() - began:6.1f} s  {', '.join(place)}", file=sys.stderr, flush=True)


def _tried(measure: Callable[[], Mapping[str, Any]], device: str) -> dict[str, Any]:
    """Return what some work measures and the most bytes it held, or why it could not be done."""
    cuda = device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return dict(measure()) | ({"most bytes": torch.cuda.max_memory_allocated()} if cuda else {})
    except torch.OutOfMemoryError as error:
        return {"out of memory": str(error).split(".", maxsplit=1)[0]}
    except ImportError as error:
        return {"missing": str(error)}
    except Exception as error:  # noqa: BLE001 - the other measurements still run
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]}


def _write(out: Path, found: Mapping[str, Any]) -> None:
    """Replace the file at once: a part may be stopped at any time."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    part.replace(out)


def _model(size: str, at: At, agents: int = 0) -> LanguageModel:
    return gpu_work.ours(gpu_work.drawn(SHAPES[size], "bfloat16", at.device), "bfloat16", agents)


def environment(at: At) -> dict[str, Any]:
    """Return what ran this: card, driver, versions, commit."""
    import transformers

    card: dict[str, Any] = {}
    if at.device == "cuda":
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


def constants(at: At) -> dict[str, float]:
    """Return seconds of a launch and of a replayed kernel, memory in GB/s and bfloat16 products in TFLOP/s, as they are here."""
    device, large = at.device, at.device == "cuda" and not at.small
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
    size = 1 << (28 if large else 22)
    source, target = torch.randint(256, (2, size), dtype=torch.uint8, device=device)
    side = 8192 if large else 256
    a, b = torch.randn(2, side, side, dtype=torch.bfloat16, device=device)  # zeros would be faster
    return {
        "launch": launch,
        "kernel": kernel,
        "gb_s": 2 * size / seconds(lambda: target.copy_(source), device) / 1e9,
        "tflop_s": 2 * side**3 / seconds(lambda: torch.mm(a, b), device) / 1e12,
    }


def layer(kind: LayerKind, dtype: str, at: At) -> dict[str, float]:
    """Return how far the decoding kernels of a layer are from plain operations on a CPU, as a share of the largest value."""
    if at.small:
        kind = kind._replace(width=kind.width // 16, inner=kind.inner // 16, heads=4, key_heads=2, size=16)
    here, there = (
        decode_ops._small_layer(torch.device(device), getattr(torch, dtype), kind)
        for device in ("cpu", at.device)
    )
    far = [
        (one.cpu() - other).abs().max() / other.abs().max() for one, other in zip(there, here, strict=True)
    ]
    return {"largest": float(torch.stack(far).max())}


def log_probs(dtype: str, at: At) -> dict[str, float]:
    """Return how far log-probs of the trainer are from the sampler's, and both from those of a CPU in float32 (nats)."""
    shape = SHAPES["tiny" if at.small else "0.6B"]._replace(layers=2)
    model = gpu_work.ours(gpu_work.drawn(shape, dtype, "cpu"), dtype)
    reference = gpu_work.ours(gpu_work.drawn(shape, "float32", "cpu"), "float32")
    reference.model.load_state_dict(model.model.state_dict())
    torch.nn.Module.to(model.model, at.device)
    there, here = (_stirred(gpu_work.learner(each, 2, 4096), 2) for each in (model, reference))
    samples, sampled = _sampled(model, 2, rows=8, prompt=PROMPT, new=64)
    scored, exact = (torch.cat([each.cpu() for each in engine.score(samples)]) for engine in (there, here))

    def apart(one: Tensor, other: Tensor) -> dict[str, float]:
        far = (one - other).abs()
        return {"largest": float(far.max()), "mean": float(far.mean())}

    return {
        f"{what}, {kind}": value
        for what, far in (
            ("trainer and sampler", apart(scored, sampled)),
            ("trainer and a CPU in float32", apart(scored, exact)),
            ("sampler and a CPU in float32", apart(sampled, exact)),
        )
        for kind, value in far.items()
    }


def _stirred(engine: TorchTrainEngine, agents: int) -> TorchTrainEngine:
    """Draw the factors of all adapters again: at their start, they change nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in gpu_work.names(agents):
            for tensor in engine.weights(name).values():
                tensor.copy_(0.02 * torch.randn(tensor.shape, generator=generator))
    return engine


def _sampled(
    model: LanguageModel, agents: int, rows: int, prompt: int, new: int
) -> tuple[list[Sample], Tensor]:
    """Return completions of prompts, as samples for the trainer, and the log-probs of the sampler."""
    decoder, who = Decoder(model, agents), gpu_work.names(agents)
    jobs = [
        Job(who[row * agents // rows], prompt_ids(row, prompt), Sampling(max_tokens=new), row)
        for row in range(rows)
    ]
    told = decoder.join(jobs)
    while decoder.in_flight:
        decoder.advance(new)
    samples = [
        Sample(str(job.adapter), (*job.prompt, *one.ids), tuple(range(prompt, prompt + len(one.ids))), {})
        for job, one in zip(jobs, told, strict=True)
    ]
    return samples, torch.cat([torch.tensor(one.logprobs) for one in told])


def mismatch(size: str, at: At) -> dict[str, Any]:
    """Return estimates of KL(sampler ‖ trainer) in nats per token, by the depth of the sampled tokens in the context.

    The mean of log p − log q is unbiased and noisy; that of q/p − 1 − log(q/p) is unbiased and never negative
    (http://joschu.net/blog/kl-approx.html).
    """
    depths, rows, new = ((32, 256), 4, 8) if at.small else (DEPTHS, 16, 64)
    random = gpu_work.drawn(SHAPES[size], "bfloat16", at.device, context=16_384, tied=False)
    # Random weights give nearly equal logits. This gain makes their standard deviation about 4, as in a trained model.
    random.get_parameter("model.norm.weight").data.fill_(4 / (0.02 * SHAPES[size].hidden ** 0.5))
    model = gpu_work.ours(random, "bfloat16")
    engine = _stirred(gpu_work.learner(model, 2, 16_384), 2)
    found = {}
    for depth in depths:
        samples, sampled = _sampled(model, 2, rows, depth, new)
        ratio = torch.cat([each.cpu() for each in engine.score(samples)]).double() - sampled.double()
        found[f"from {depth:,}"] = {
            "kl": float(-ratio.mean()),
            "kl, not negative": float((ratio.expm1() - ratio).mean()),
            "largest": float(ratio.abs().max()),
            "entropy": float(-sampled.mean()),
            "tokens": len(ratio),
        }
    return found


def long_update(size: str, at: At) -> dict[str, Any]:
    """Return tokens per second of updates on sequences of 16,384 tokens, with an adapter of rank 16, as prime-rl measures them."""
    length, count = (256, 2) if at.small else (16_384, 4)
    model = gpu_work.ours(gpu_work.drawn(SHAPES[size], "bfloat16", at.device, context=2 * length), "bfloat16")
    engine = gpu_work.learner(model, 1, length, gradient_checkpointing=True)
    samples = gpu_work.samples(1, count, length)
    taken = seconds(lambda: engine.update(samples, gpu_work.OBJECTIVE), at.device, 2)
    return {
        "seconds": taken,
        "tokens a second": count * length / taken,
        "prime-rl, one H100": PRIME_RL.get(size),
    }


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
    model: LanguageModel, agents: int, at: At, recorder_on: gpu_work.Recorder
) -> dict[str, float]:
    """Return seconds of a decode step of 64 rows, tokens a second, and the share of replayed steps."""
    rows, steps = (8, 4) if at.small else (ROWS, STEPS)
    counting = _Counting(recorder_on)
    decoder = gpu_work.decoding(model, agents, rows, 8 * steps, counting)
    decoder.advance(2)
    step = seconds(lambda: decoder.advance(steps), at.device) / steps
    return {"seconds": step, "tokens a second": rows / step, "replayed": counting.share}


def conversations(model: LanguageModel, agents: int, at: At, *, even: bool) -> dict[str, float]:
    """Return seconds of 64 conversations of four turns, tokens a second, and the share of replayed steps."""
    said = gpu_work.lengths(4 if at.small else ROWS, even=even, median=4 if at.small else 32)
    counting = _Counting(on_cuda)
    engine = gpu_work.sampler(model, agents, counting)
    tokens = 0

    def talk() -> None:
        nonlocal tokens
        tokens = gpu_work.conversations(engine, gpu_work.names(agents), said)

    taken = seconds(talk, at.device, 1)
    return {"seconds": taken, "tokens a second": tokens / taken, "replayed": counting.share}


def update(size: str, agents: int, at: At, tokens: int) -> dict[str, float]:
    """Return seconds of an update, and of giving the sampler what was learned."""
    model, device = _model(size, at), at.device
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


def whole_step(size: str, agents: int, at: At) -> dict[str, float]:
    """Return seconds of a whole step of GRPO, and what its parts took."""
    prompts, group, new = (1, 2, 8) if at.small else STEP
    trainer = grpo_trainer(_model(size, at), {"agents": agents}, prompts, group, new)
    rows: list[Mapping[str, float]] = []
    taken = seconds(
        lambda: rows.append(take_step(trainer, agents * prompts * group, new, exact=False)), at.device, 2
    )
    return {"seconds": taken, **{name: value for name, value in rows[-1].items() if name.startswith("time/")}}


def generate_step(size: str, agents: int, at: At) -> dict[str, float]:
    """Return seconds of a step of transformers' `generate`, for the rows of each agent in turn."""
    import peft

    device = at.device
    rows, steps = (2, 4) if at.small else (ROWS // agents, STEPS)
    model: Any = peft.get_peft_model(gpu_work.drawn(SHAPES[size], "bfloat16", device), lora_settings())
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


def trl_step(size: str, agents: int, at: At, *, vllm: bool) -> dict[str, float]:
    """Return seconds of a step of TRL's `GRPOTrainer`, and of its sampling, for each agent in turn."""
    from trl import GRPOTrainer

    prompts, group, new = (1, 2, 8) if at.small else STEP
    model = gpu_work.drawn(SHAPES[size], "bfloat16", at.device)
    plain = GRPOTrainer._generate_and_score_completions
    begun: list[float] = []
    sampled: list[float] = []
    ended: list[float] = []

    def now(into: list[float]) -> None:
        _wait(at.device)
        into.append(time.perf_counter())

    def generated(*given: Any, **named: Any) -> Any:
        answer = plain(*given, **named)
        now(sampled)
        return answer

    with patch.object(GRPOTrainer, "_generate_and_score_completions", generated):
        begin, end = partial(now, begun), partial(now, ended)
        train_trl(model, "bfloat16", prompts, group, new, 64, 3, begin, end, lora_settings(), vllm=vllm)
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
    for model, works in measured.get("models", {}).items():
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
            mine = measured.get("models", {}).get(model, {}).get(work, {})
            if "seconds" in found and "seconds" in mine:
                one, other = mine["seconds"], found["seconds"]
                lines.append(
                    f"{f'{model}: {work}':44} {1e3 * one:10,.2f} {1e3 * other:10,.2f} {other / one:19.2f}"
                )
            else:
                said = found.get("missing") or found.get("out of memory") or "not measured by us"
                lines.append(f"{f'{model}: {work}':44} {said}")
    for size, found in measured.get("long", {}).items():
        theirs = PRIME_RL.get(size)
        lines.append(
            f"{size}: {found.get('tokens a second', 0):,.0f} tokens a second of 16,384 each; prime-rl {theirs or 0:,}"
        )
    for size, depths in measured.get("mismatch", {}).items():
        kls = (
            f"{depth} {found['kl, not negative']:.1e}" for depth, found in depths.items() if "from" in depth
        )
        lines.append(f"{size}: KL of sampler and trainer by depth: {', '.join(kls)}")
    return "\n".join(lines)


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


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(words: Sequence[str]) -> None:
    """Measure, or compare what was measured."""
    if words[:1] == ["part"]:
        run_part(*words[1:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    names = [name for name in parts(At("cpu", small=True)) if name != "machine"]
    parser.add_argument("parts", nargs="*", choices=[*names, []], help="what to measure; else all but `more`")
    parser.add_argument("--small", action="store_true", help="a small size, which shows that it runs")
    parser.add_argument("--cpu", action="store_true", help="a small size on the CPU")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="for each part, instead of its own limit"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where results go, one by one")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="print a file's results beside estimates"
    )
    asked = parser.parse_args(words)
    if asked.compare is not None:
        print(compare(json.loads(asked.compare.read_text("utf-8")), json.loads(KEPT.read_text("utf-8"))))
        return
    at = At("cpu" if asked.cpu else "cuda", asked.cpu or asked.small)
    found = run(at, asked.parts, asked.out, asked.limit)
    if asked.out is None:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
