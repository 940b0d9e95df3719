"""What a decode step and an update ask of a GPU, counted on its twin (`tests/twin`), and what that takes on some cards by a formula.

Counts are exact for two and three layers of a model in its full width; their difference is a layer, and all else what remains, so
that the whole model follows. Results of large operations are not computed, since counts need no more than their shapes. Peers are
counted alike: transformers' `generate` with PEFT's adapters, which stand one after another, and the update of TRL's
`GRPOTrainer` where it is installed (without its Triton kernel of log-probs). vLLM's kernels need a GPU: the twin cannot count them.

Seconds are estimates: launches × launch + replayed kernels × kernel + waits × wait + bytes / bandwidth + operations / peak, which
adds up what a GPU overlaps in part. One number comes from a measurement (`KERNEL`); `gpu.py` measures, and its `compare` puts both
side by side. The bytes of the KV cache in a decode step are added, because its kernel reads them from an address that the twin does
not see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import gpu_work
from benchmarks.gpu_work import LENGTH, PROMPT, ROWS, SHAPES, Shape
from benchmarks.subjects import prompt_ids
from benchmarks.trl_peer import lora_settings, train_trl
from kapelle.engines.rollout.local.step_graphs import nowhere, on_cuda
from kapelle.models.fast import fused, kernels
from kapelle.models.language_model import LanguageModel

KEPT = Path(__file__).parent / "results" / "gpu_counts.json"
ROOT = Path(__file__).parents[1]

AGENTS = (2, 8)
FEW_LAYERS = (2, 3)
STEPS = 32
COMPUTED = 1 << 18
"""Most bytes of an operation that is computed."""
PASS_TOKENS, UPDATE_TOKENS = 4096, 65_536
"""Tokens of a pass, and of a large update."""

Counted = Mapping[str, float]
"""`launches` from Python, `replays` of graphs and `kernels` in them, `waits`, `copies` up and across, `bytes`, `flops`."""


class Card(NamedTuple):
    """What a card does at best, as its maker says: memory in GB/s, dense bfloat16 products in TFLOP/s."""

    gb_s: float
    tflop_s: float
    source: str


CARDS: Mapping[str, Card] = {
    "RTX 4090": Card(1008, 165.2, "NVIDIA Ada GPU Architecture whitepaper, appendix A"),
    "L40S": Card(864, 362, "NVIDIA L40S data sheet"),
    "A100": Card(2039, 312, "NVIDIA A100 80GB SXM data sheet"),
    "H100": Card(3350, 989, "NVIDIA H100 SXM data sheet"),
}
LAUNCH, KERNEL, WAIT = 6e-6, 2.7e-6, 2e-5
"""Seconds for a launch from Python, for a kernel of a replayed graph, and to be told that the device is done. The second follows
from a decode step of 9.30 ms on an H100 (0.6B, two agents, 2,589 replayed kernels); the others are assumed, not a maker's figures."""


def estimate(counts: Counted, card: Card, launch: float = LAUNCH, kernel: float = KERNEL) -> float:
    """Return seconds by the formula above."""
    return (
        counts["launches"] * launch
        + counts["kernels"] * kernel
        + counts["waits"] * WAIT
        + counts["bytes"] / (card.gb_s * 1e9)
        + counts["flops"] / (card.tflop_s * 1e12)
    )


def run() -> dict[str, Any]:
    """Count everything, peers too (ten minutes; needs g++)."""
    return count_all(peers=True)


def count_all(*, peers: bool) -> dict[str, Any]:
    """Count every part in a process of its own that has the twin."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    twin, before = str(ROOT / "tests" / "twin" / "site"), os.environ.get("PYTHONPATH")
    environ["PYTHONPATH"] = os.pathsep.join([twin, *filter(None, [before]), str(ROOT)])
    found: dict[str, Any] = {}
    for what in PARTS:
        with tempfile.NamedTemporaryFile("r") as answer:
            with_peers = ["peers"] if peers else []
            command = [sys.executable, "-m", "benchmarks.gpu_counts", "part", what, answer.name, *with_peers]
            subprocess.run(command, env=environ, check=True, stdout=sys.stderr)  # noqa: S603 - this module
            found |= json.load(answer)
    return found


# -------- What is counted, in a process that has the twin


def counted(work: Callable[[], object], number: int = 1) -> dict[str, float]:
    """Return what some work asks the device for, divided by a number of steps or tokens."""
    from tests.twin import cuda

    with cuda.counted() as counts:
        work()
    return times(told(counts), 1 / number)


def told(counts: Any) -> dict[str, float]:
    """Return what `tests.twin.cuda` has counted, by the names of `Counted`."""
    assert not counts["refused"], counts.lines
    return {
        "launches": counts["launches"],
        "replays": counts["replays"],
        "kernels": counts["replayed"],
        "waits": counts["waits"] + counts["down"],
        "copies": counts["up"] + counts["across"],
        "bytes": sum(counts.bytes.values()),
        "flops": counts.flops,
    }


def plus(one: Counted, other: Counted, factor: float = 1) -> dict[str, float]:
    """Return one plus the other times a factor."""
    return {name: one[name] + factor * other[name] for name in one}


def times(counts: Counted, factor: float) -> dict[str, float]:
    """Return counts times a factor."""
    return {name: factor * value for name, value in counts.items()}


def whole(of_layers: Callable[[Shape], Counted], shape: Shape) -> dict[str, float]:
    """Return the counts of a model from those of two and three of its layers."""
    few, more = (of_layers(shape._replace(layers=layers)) for layers in FEW_LAYERS)
    return plus(few, plus(more, few, -1), shape.layers - FEW_LAYERS[0])


def drawn(shape: Shape) -> Any:
    """Return a model whose large weights are zero; norms that divide by little would make its gradients grow without bounds."""
    return gpu_work.drawn(shape, "bfloat16", "cuda", epsilon=1.0)


def made(shape: Shape, agents: int = 0) -> LanguageModel:
    """Return such a model as kapelle holds it, without the comparison of logits, which are not computed."""
    with patch.object(LanguageModel, "_checked_head", lambda _: (1.0, None)):
        return gpu_work.ours(drawn(shape), "bfloat16", agents)


def decode_step(name: str, agents: int) -> dict[str, dict[str, float]]:
    """Count a decode step of 64 rows, plain and as it is replayed; bytes and operations are those of the plain one."""

    def of(recorder_on: gpu_work.Recorder) -> Callable[[Shape], Counted]:
        def count(shape: Shape) -> Counted:
            decoder = gpu_work.decoding(made(shape, agents), agents, ROWS, 2 * STEPS, recorder_on)
            decoder.advance(2)
            return counted(lambda: decoder.advance(STEPS), STEPS)

        return count

    shape = SHAPES[name]
    plain, recorded = whole(of(nowhere), shape), whole(of(on_cuda), shape)
    kept = 2 * shape.kv_heads * shape.head * shape.layers * torch.bfloat16.itemsize
    plain["bytes"] += ROWS * (PROMPT + 2 + STEPS / 2) * kept
    return {
        "decode, plain": plain,
        "decode": recorded | {"bytes": plain["bytes"], "flops": plain["flops"]},
    }


def update(name: str, agents: int) -> dict[str, dict[str, float]]:
    """Count an update of one pass, and one of sixteen."""

    def of(tokens: int) -> Callable[[Shape], Counted]:
        def work(shape: Shape) -> Counted:
            engine = gpu_work.learner(made(shape), agents, PASS_TOKENS)
            asked = gpu_work.samples(agents, tokens // LENGTH)
            # The first one makes the optimisers' moments and what is kept for other updates.
            engine.update(gpu_work.samples(agents, PASS_TOKENS // LENGTH), gpu_work.OBJECTIVE)
            return counted(lambda: engine.update(asked, gpu_work.OBJECTIVE))

        return work

    return {
        f"update, {tokens:,} tokens": whole(of(tokens), SHAPES[name])
        for tokens in (PASS_TOKENS, UPDATE_TOKENS)
    }


def publish(name: str, agents: int) -> dict[str, dict[str, float]]:
    """Count what it takes to give the sampler all adapters that learned."""

    def work(shape: Shape) -> Counted:
        engine = gpu_work.learner(made(shape), agents, PASS_TOKENS)
        player = gpu_work.sampler(engine.model_of("agent_0"), agents, nowhere)
        engine.update(gpu_work.samples(agents, agents), gpu_work.OBJECTIVE)

        def give() -> None:
            for policy, published in engine.publish().items():
                player.load(policy, published.weights, published.version)

        return counted(give)

    return {"publish": whole(work, SHAPES[name])}


def conversations() -> dict[str, Any]:
    """Count 64 conversations of four turns by two agents, for each token said, in the layers of 0.6B; launches do not depend on width."""

    def of(recorder_on: gpu_work.Recorder, said: list[list[int]]) -> Callable[[Shape], Counted]:
        def count(shape: Shape) -> Counted:
            model = gpu_work.ours(gpu_work.drawn(shape, "bfloat16", "cuda"), "bfloat16", 2)
            player = gpu_work.sampler(model, 2, recorder_on)
            tokens = sum(map(sum, said))
            return counted(lambda: gpu_work.conversations(player, gpu_work.names(2), said), tokens)

        return count

    shape = SHAPES["tiny"]._replace(layers=SHAPES["0.6B"].layers)
    found = {}
    with patch.object(fused, "LARGEST", 0):  # the pass of real models
        # Kernels are tested before their first use.
        of(nowhere, gpu_work.lengths(8, even=True, median=2))(shape._replace(layers=FEW_LAYERS[0]))
        for kind, even in (("even", True), ("uneven", False)):
            for mode, recorder_on in (("", on_cuda), (", plain", nowhere)):
                each = whole(of(recorder_on, gpu_work.lengths(ROWS, even=even)), shape)
                found[f"{kind}{mode}"] = {key: each[key] for key in ("launches", "kernels", "waits")}
    return {"conversations": found}


# -------- Peers


def generate_step(name: str, agents: int) -> dict[str, dict[str, float]]:
    """Count a step of transformers' `generate` for the rows of each agent in turn, with adapters of PEFT."""
    import peft

    def work(shape: Shape) -> Counted:
        model: Any = peft.get_peft_model(drawn(shape), lora_settings())
        rows = ROWS // agents
        prompts_RP = torch.tensor([prompt_ids(row, PROMPT) for row in range(rows)]).to("cuda")

        def sample(new: int) -> dict[str, float]:
            def generate() -> None:
                with torch.no_grad():
                    said = model.generate(
                        input_ids=prompts_RP,
                        attention_mask=torch.ones_like(prompts_RP),
                        max_new_tokens=new,
                        do_sample=True,
                        top_k=0,
                    )
                assert said.shape[1] == PROMPT + new

            return counted(generate)

        sample(2)
        first, last = 4, 4 + STEPS
        return times(plus(sample(last), sample(first), -1), agents / (last - first))

    return {"decode, generate": whole(work, SHAPES[name])}


def trl_update(name: str, agents: int) -> dict[str, dict[str, float]]:
    """Count an update of TRL's trainer for each agent in turn, together as long as ours; nothing where TRL is not installed."""
    try:
        from trl import GRPOTrainer
    except ImportError:
        return {}
    from tests.twin import cuda

    plain = GRPOTrainer._generate_and_score_completions

    def of(count: int) -> Callable[[Shape], Counted]:
        def work(shape: Shape) -> Counted:
            model = drawn(shape)
            found: list[Any] = []
            block = ExitStack()

            def generated(*given: Any, **named: Any) -> Any:
                answer = plain(*given, **named)
                found.append(block.enter_context(cuda.counted()))
                return answer

            with (
                patch.object(GRPOTrainer, "_generate_and_score_completions", generated),
                patch.object(torch.cuda, "device_count", lambda: 1),  # with two it wants a launcher
            ):
                half, lora = LENGTH // 2, lora_settings()
                train_trl(model, "bfloat16", 1, count, half, half, 2, lambda: None, block.close, lora)
            return told(found[-1])

        return work

    # The tokens of our pass are shared out over the agents, each of whom trains by itself.
    each = whole(of(PASS_TOKENS // LENGTH // agents), SHAPES[name])
    return {f"update of TRL, {PASS_TOKENS:,} tokens": times(each, agents)}


def part(what: str, *, peers: bool) -> dict[str, Any]:
    """Count one of `PARTS`."""
    from tests.twin.cuda import compute_at_most

    if what == "conversations":
        return conversations()
    compute_at_most(COMPUTED)
    name, _, agents = what.partition(", ")
    works = (decode_step, update, publish, *((generate_step, trl_update) if peers else ()))
    number, multinomial = int(agents.split()[0]), torch.multinomial

    def drawn_tokens(probabilities_RV: Tensor, num_samples: int) -> Tensor:
        """Draw from two words of a peer's, whose probabilities are not computed: as many operations."""
        return multinomial(probabilities_RV.new_ones(len(probabilities_RV), 2), num_samples)

    tried = kernels._tried

    def computed(*given: Any) -> bool:
        """Try a kernel: whether it is right must be computed."""
        compute_at_most(sys.maxsize)
        try:
            return tried(*given)
        finally:
            compute_at_most(COMPUTED)

    with patch.object(torch, "multinomial", drawn_tokens), patch.object(kernels, "_tried", computed):
        return {what: {key: value for work in works for key, value in work(name, number).items()}}


PARTS = ("conversations", *(f"{name}, {agents} agents" for name in ("0.6B", "4B") for agents in AGENTS))


# -------- What is kept, and the tables of docs/performance.md


HIDDEN = ("decode, plain", f"update, {UPDATE_TOKENS:,} tokens")
"""Work that the tables omit: `gpu.py` compares with it."""


def rows(kept: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Counted]]:
    """Yield (model, work, whose, counts) of what the tables show, peers once."""
    for model in [model for model in PARTS[1:] if model in kept["now"]]:
        for work in [work for work in kept["now"][model] if work not in HIDDEN]:
            theirs = "generate" in work or "TRL" in work
            for version in ("now",) if theirs else kept:
                yield model, work, "theirs" if theirs else version, kept[version][model][work]


def table(kept: Mapping[str, Any]) -> str:
    """Return all counts and estimates in Markdown."""
    columns = " | ".join(f"{name}, ms" for name in CARDS)
    lines = [
        f"| model | work | code | launches | replayed kernels | waits | copies | GB | TFLOP | {columns} |",
        f"|{'---|' * (9 + len(CARDS))}",
    ]
    for model, work, whose, counts in rows(kept):
        numbers = " | ".join(f"{counts[key]:,.0f}" for key in ("launches", "kernels", "waits", "copies"))
        sizes = f"{counts['bytes'] / 1e9:,.2f} | {counts['flops'] / 1e12:,.3g}"
        estimated = " | ".join(f"{1e3 * estimate(counts, card):,.3g}" for card in CARDS.values())
        lines.append(f"| {model} | {work} | {whose} | {numbers} | {sizes} | {estimated} |")
    lines += [
        "",
        "| 64 conversations of 4 turns | code | launches a token | replayed kernels a token | waits a token |",
        "|---|---|---|---|---|",
    ]
    for work in kept["now"]["conversations"]:
        for version in kept:
            counts = kept[version]["conversations"][work]
            numbers = " | ".join(f"{counts[key]:,.3g}" for key in ("launches", "kernels", "waits"))
            lines.append(f"| {work} | {version} | {numbers} |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    """Count and keep the result as `now`, or under another name and without peers; or print the tables of what is kept."""
    match words:
        case ["part", what, answer, *peers]:
            Path(answer).write_text(json.dumps(part(what, peers=bool(peers))), "utf-8")
        case ["table"]:
            print(table(json.loads(KEPT.read_text("utf-8"))))
        case [] | [_]:
            kept = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
            kept[words[0] if words else "now"] = count_all(peers=not words)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
            print(table(kept))
        case _:
            raise SystemExit("python -m benchmarks.gpu_counts [NAME | table]")


if __name__ == "__main__":
    main(sys.argv[1:])
