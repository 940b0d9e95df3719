"""On a CUDA device: sampling, updates and whole runs come to what they come to on a CPU, and killed runs continue.

`pytest -m gpu` runs it on a real one; tests of two devices skip where there is one. The same file runs on the twin
(`tests/twin`). Numbers are compared with those of a CPU or of plain steps, whose tests are elsewhere.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.rank_kills import apart
from tests.support.killed_ranks import Kill, Way, said, train
from tests.support.killed_runs import Death
from tests.support.ranks import run_ranks
from tests.support.tiny import (
    LORA,
    SIZE,
    draw_samples,
    first_gradient,
    lora_policies,
    sections,
    stir,
    tiny_model,
    train_engine,
    with_behaviour,
)
from tests.training.test_ranks import FEW, SHARDED, Case, furthest, learn_all, learned
from torch import Tensor, nn

from kapelle.algorithms.grpo import GRPO
from kapelle.engines.rollout.local.decode_batch import Decoder, decode
from kapelle.engines.rollout.local.decode_strategies import Job, RowOutput
from kapelle.engines.rollout.local.step_graphs import CudaRecorder, nowhere, on_cuda
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.engines.train.torch import large_head
from kapelle.engines.train.torch.learner import Learner
from kapelle.models.fast import fused, kernels, routed_linear
from kapelle.models.fast.attention import Span, attend_by_plan, attention, plan_spans, takes_runs
from kapelle.models.finite import poisoned
from kapelle.models.language_model import LanguageModel, OutputHead
from kapelle.models.lora_bank import linear
from kapelle.models.weights import save_model, weights_hash
from kapelle.rows import Sample
from kapelle.settings.schema import OptimizerConfig
from kapelle.training.trainer import Trainer
from kapelle.types import Sampling

DEVICE = "cuda"

# Processes are forked from one that has asked for GPUs: asked in this way, it does not start CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device")

JOBS = [
    Job(name, tuple(range(7, 7 + length)), Sampling(max_tokens=70), length)
    for name in (None, "a", "b")
    for length in (5, 9, 9, 12)
]


def model_on_device(dtype: str = "float32", *, adapted: bool = True, device: str = DEVICE) -> LanguageModel:
    """A tiny base, with two adapters."""
    model = tiny_model(dtype=dtype)
    torch.nn.Module.to(model.model, device)
    for seed, name in enumerate(("a", "b") if adapted else ()):
        model.bank.add(name, LORA, seed)
        stir(model.bank.parameters(name), seed)
    return model


def finish(decoder: Decoder) -> None:
    while decoder.in_flight:
        decoder.advance(100)


def told_by(decoder: Decoder) -> list[RowOutput]:
    said = decoder.join(JOBS)
    finish(decoder)
    return said


@pytest.mark.sample(3)
@pytest.mark.parametrize("most", [fused.LARGEST, 0], ids=["fused", "flat"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_recorded_steps_say_the_same(
    dtype: str, bound: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "LARGEST", most)
    model = model_on_device(dtype)
    decoder = Decoder(model, 3, recorder_on=on_cuda)
    recorded, plain = told_by(decoder), told_by(Decoder(model, 3, recorder_on=nowhere))
    assert isinstance(decoder.recorder, CudaRecorder)
    assert decoder.recorder._last is not None
    for one, other in zip(recorded, plain, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=bound)


def test_sampler_and_trainer_agree() -> None:
    model = model_on_device(adapted=False)
    engine = train_engine(lora_policies("a", "b"), models={"base": model})
    jobs = [job for job in JOBS if job.adapter]
    decoder = Decoder(model, 2)
    said = decoder.join(jobs)
    finish(decoder)
    samples = [
        Sample(
            str(job.adapter),
            (*job.prompt, *one.ids),
            tuple(range(len(job.prompt), len(job.prompt) + len(one.ids))),
            {},
        )
        for job, one in zip(jobs, said, strict=True)
    ]
    for scored_T, one in zip(engine.score(samples), said, strict=True):
        assert scored_T.tolist() == pytest.approx(one.logprobs, abs=1e-4)


def test_grouped_adapters_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every type for which torch, or Triton if it is installed, has a kernel."""
    grouped = [dtype for dtype in kernels.BOUNDS if routed_linear.has_kernel(torch.device(DEVICE), dtype)]
    if not grouped:
        pytest.skip("this device has no kernel for grouped products")
    model = model_on_device()
    layer = model.model.model.layers[0].self_attn.q_proj
    x_NI = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    reads = [model.bank.parameters(name) for name in ("a", "b")]
    own = [p for each in reads for key, p in each.items() if "layers.0.self_attn.q_proj" in key]

    def learned(dtype: torch.dtype) -> list[Tensor]:
        x = x_NI.to(DEVICE, dtype).requires_grad_(True)
        with model.bank.routed([("a", 0, 13), (None, 13, 20), ("b", 20, 40)]):
            y_NO = linear(layer, x)
        return [y_NO.detach(), *torch.autograd.grad(y_NO.float().square().sum(), (x, *own))]

    together = [learned(dtype) for dtype in grouped]
    monkeypatch.setattr(routed_linear, "has_kernel", lambda _device, _dtype: False)
    for dtype, each in zip(grouped, together, strict=True):
        for one, other in zip(each, learned(dtype), strict=True):
            assert float((one - other).abs().max()) <= 0.02 * float(other.abs().max()), dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_kernel_attends_for_all_spans(dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention begins with compute capability 8")
    spans = [Span(0, 90, None), Span(90, 33, (0, 90)), Span(123, 1, (0, 90)), Span(124, 150, None)]
    generator = torch.Generator().manual_seed(3)
    q, k, v, given = (torch.randn(274, heads, 64, generator=generator) for heads in (8, 2, 2, 8))

    def gathered(device: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(device, dtype).requires_grad_(True) for x in (q, k, v)]
        out = attend_by_plan(plan_spans(spans, device), inputs[0], inputs[1], inputs[2], 0.125)
        return [out.detach(), *torch.autograd.grad(out, inputs, given.to(device, dtype))]

    assert takes_runs(q.to(DEVICE, dtype), 2)
    for one, other in zip(gathered(DEVICE, dtype), gathered("cpu", torch.float32), strict=True):
        assert float((one.cpu().float() - other).abs().max()) <= 0.02 * float(other.abs().max())


@pytest.mark.sample(2)
@pytest.mark.parametrize("learns", [False, True])
def test_larger_pieces_of_a_large_head_are_the_same(learns: bool) -> None:
    tokens, words = 2100, 18_000  # more than a piece has, of either
    assert tokens > large_head.DEVICE_ROWS
    assert words > large_head.DEVICE_PIECE // large_head.DEVICE_ROWS
    generator = torch.Generator().manual_seed(4)
    hidden_KD = torch.randn(tokens, 6, generator=generator)
    weight_VD = torch.randn(words, 6, generator=generator)
    token_K = torch.randint(words, (tokens,), generator=generator)

    def told(device: str) -> list[Tensor]:
        inputs = [hidden_KD.to(device).requires_grad_(), weight_VD.to(device).requires_grad_(learns)]
        asked = token_K.to(device), torch.full((tokens,), 0.7, device=device)
        found = large_head.statistics_in_pieces(
            OutputHead(inputs[1]), inputs[0], *asked, entropy=True, learned=True
        )
        slopes = torch.autograd.grad(found[0].sum() + found[1].sum(), inputs[: 1 + learns])
        return [each.detach().cpu() for each in (*found, *slopes)]

    for one, other in zip(told(DEVICE), told("cpu"), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def test_what_is_poisoned_is_reported_as_on_a_cpu() -> None:
    sound = {f"{k}.exp_avg_sq": torch.full((7, k + 1), 1e-3) for k in range(4)}
    sound |= {"w": torch.ones(5), "half": torch.ones(3, dtype=torch.bfloat16)}
    for name, value in (("2.exp_avg_sq", -1e-4), ("2.exp_avg_sq", math.nan), ("w", 1e38), ("half", math.inf)):
        spoiled = {**sound, name: sound[name].clone()}
        spoiled[name].view(-1)[1] = value
        said = poisoned(spoiled)
        assert said is not None
        assert name in said
        assert poisoned({key: tensor.to(DEVICE) for key, tensor in spoiled.items()}) == said
    assert poisoned({key: tensor.to(DEVICE) for key, tensor in sound.items()}) is None


def test_passes_are_as_large_as_memory_lets_them_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(free: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 80 << 30))
        torch.cuda.empty_cache()
        engine = train_engine(
            lora_policies("a"),
            models={"base": model_on_device(adapted=False)},
            limits=UpdateLimits(microbatch_tokens=None),
        )
        samples = draw_samples(["a"], [(90, 10)] * 200)  # 19,800 tokens
        return max(len(batch.tokens_N) for _, batch in engine.forward.batches(samples))

    assert largest(70 << 30) == 19_800
    few, more = largest(20 << 20), largest(80 << 20)
    assert 1000 < few <= 4096 < more < 19_800


@pytest.mark.parametrize("way", [("cpu", DEVICE), (DEVICE, "cpu")])
def test_an_optimiser_continues_from_a_state_of_another_device(way: tuple[str, str]) -> None:
    def learner_on(device: str) -> Learner:
        generator = torch.Generator().manual_seed(3)
        weights = {
            name: nn.Parameter(torch.randn(5, 3, generator=generator).to(device)) for name in ("v", "w")
        }
        return Learner(
            "a", weights, OptimizerConfig(lr=0.1, weight_decay=0.1, eps=1e-3), 0.1, 10, scaled=False
        )

    def push(one: Learner, by: float) -> None:
        sum((p * p * by).sum() for p in one.parameters.values()).backward()  # type: ignore[union-attr]
        assert one.step(2.0, "stop")["skipped"] == 0.0

    here, there = (learner_on(device) for device in way)
    for by in (1.0, -0.5):
        push(here, by)
    there.load_state(here.state())
    for one in (here, there):
        push(one, 2.0)
    assert {t.device.type for t in there.state()["optimizer"]["w"].values()} == {way[1]}
    for name, weight in here.parameters.items():
        assert torch.allclose(weight.cpu(), there.parameters[name].cpu(), atol=1e-6)
        for key, moment in here.state()["optimizer"][name].items():
            assert torch.allclose(moment.cpu(), there.state()["optimizer"][name][key].cpu(), atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_gathers_the_same(masked: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    q_BLHE = torch.randn(3, 9, 4, 16, generator=generator)
    k_BMJE, v_BMJE = torch.randn(2, 3, 9, 2, 16, generator=generator)
    mask_BLM = torch.ones(3, 9, 9, dtype=torch.bool).tril() if masked else None
    expected = attention(q_BLHE, k_BMJE, v_BMJE, mask_BLM, 0.3)
    there = [None if x is None else x.to(DEVICE) for x in (q_BLHE, k_BMJE, v_BMJE, mask_BLM)]
    q, k, v, mask = there
    assert q is not None
    assert k is not None
    assert v is not None
    assert torch.allclose(attention(q, k, v, mask, 0.3).cpu(), expected, atol=1e-4)


def test_a_rest_gives_the_memory_back() -> None:
    decoder = Decoder(model_on_device(), 3, kept_tokens=1 << 16)
    first = told_by(decoder)
    decoder.release_caches()
    rested = torch.cuda.memory_allocated()  # with what products keep as their workspace
    assert [one.ids for one in told_by(decoder)] == [one.ids for one in first]
    assert torch.cuda.memory_allocated() > rested
    decoder.release_caches()
    assert torch.cuda.memory_allocated() <= rested


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_weights_have_one_hash_wherever_they_lie(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = {str(k): (20 * torch.randn(1 + 301 * k, generator=generator)).to(dtype) for k in range(9)}
    there = {name: tensor.to(DEVICE) for name, tensor in weights.items()}
    assert weights_hash(there) == weights_hash(weights)
    assert weights_hash({**there, "4": weights["4"]}) == weights_hash(weights)  # on two devices


STOPPING = [
    Job(job.adapter, job.prompt, Sampling(max_tokens=70, stop=stop), job.seed)
    for job, stop in zip(JOBS, 3 * [("e",), (), ("zq", "t"), ("never said",)], strict=True)
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("recorder_on", [on_cuda, nowhere], ids=["recorded", "plain"])
@pytest.mark.parametrize("most", [fused.LARGEST, 0], ids=["fused", "flat"])
def test_rows_that_join_at_different_times_equal_rows_alone(
    most: float, recorder_on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "LARGEST", most)
    decoder = Decoder(model_on_device(), 3, kept_tokens=1 << 16, recorder_on=recorder_on)
    together: list[RowOutput] = []
    for k, job in enumerate(STOPPING):
        together += decoder.join([job])
        decoder.advance(1 + 5 * (k % 3))
    finish(decoder)
    # A turn that continues from what was said reads the cache that is kept of it.
    turns = [
        Job(job.adapter, (*job.prompt, *one.ids, 9, 8, 7), Sampling(max_tokens=20), job.seed)
        for job, one in zip(STOPPING, together, strict=True)
    ]
    assert decoder.kept_places > 0
    second = decoder.join(turns[:5])
    decoder.advance(3)
    second += decoder.join(turns[5:])
    finish(decoder)
    for job, one in zip((*STOPPING, *turns), (*together, *second), strict=True):
        alone = Decoder(model_on_device(device="cpu"), 3)
        (other,) = alone.join([job])
        finish(alone)
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def updated(device: str, dtype: str, adapters: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Take an update; return its metrics and the gradients of its adapters, one vector each."""
    model = model_on_device(dtype, adapted=False, device=device)
    engine = train_engine(lora_policies(*adapters), models={"base": model})
    samples = with_behaviour(engine, draw_samples([*adapters], [(9, 20), (5, 40), (30, 7), (12, 1)]))
    metrics = engine.update(samples, Objective(GRPO().build().policy_loss))
    gradients = {
        name: torch.cat([each.cpu().flatten() for each in first_gradient(engine, name).values()])
        for name in adapters
    }
    return metrics, gradients


@pytest.mark.parametrize("adapters", ["a", "abcd"], ids=["one adapter", "four adapters"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_an_update_is_that_of_a_cpu_in_float32(dtype: str, bound: float, adapters: str) -> None:
    expected, straight = updated("cpu", "float32", adapters)
    metrics, gradients = updated(DEVICE, dtype, adapters)  # compares its log-probs with the sampler's
    assert metrics.keys() == expected.keys()
    for name in adapters:
        length = float(straight[name].norm())
        assert length > 0
        assert float((gradients[name] - straight[name]).norm()) <= bound * length
    for name, value in metrics.items():
        if name.startswith(("loss", "gradient_norm", "entropy")):
            assert value == pytest.approx(expected[name], rel=bound, abs=bound), name


@pytest.mark.long
@pytest.mark.parametrize("place", ["in a rollout", "between updates", "state written"])
def test_a_killed_run_continues_to_the_same_result(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path / "cache"))
    way, run, whole = Way("ddp", steps=3, device=DEVICE), tmp_path / "run", tmp_path / "whole"
    assert train(way, whole, 1) == [0], said(whole)
    assert train(way, run, 1, Kill(Death(place, 2))) == [-9]
    assert train(way, run, 1) == [0], said(run)
    assert apart(run, whole) == []


@pytest.mark.long
@two_devices
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_run_on_two_gpus_continues_with_one(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path / "cache"))
    way, run, whole = Way(engine, steps=3, device=DEVICE), tmp_path / "run", tmp_path / "whole"
    assert train(way, whole, 2) == [0, 0], said(whole)
    assert train(way, run, 2, Kill(Death("in an update", 8))) == [-9, -9]
    assert train(way, run, 1) == [0], said(run)
    assert apart(run, whole) == []


@pytest.mark.long
@two_devices
@pytest.mark.parametrize("cases", [FEW, SHARDED], ids=["ddp", "fsdp"])
def test_two_gpus_learn_the_same_as_a_cpu(cases: list[Case]) -> None:
    on_gpus = [(name, {**over, "model": {"device": DEVICE}}) for name, over in cases]
    one, other = run_ranks(2, learn_all, on_gpus, start="spawn")
    assert not isinstance(one, str), one
    assert not isinstance(other, str), other
    for number, case in enumerate(cases):
        alone, rows = learned(case)
        for weights, theirs in (one[number], other[number]):
            assert furthest(weights, alone) <= 1e-4, case
            assert furthest(weights, one[number][0]) == 0, case
            for row, found in zip(rows, theirs, strict=True):
                assert found == pytest.approx(row, rel=1e-3, abs=1e-4), case


@pytest.mark.long
@two_devices
def test_models_on_two_gpus_and_the_cpu_learn_together(tmp_path: Path) -> None:
    save_model(tmp_path / "other", tiny_model(3))
    save_model(tmp_path / "third", tiny_model(4))

    def metrics(first: str, second: str) -> list[dict[str, float]]:
        weights = {
            "a": "lora",
            "b": {"model": str(tmp_path / "other"), "train": "lora", "device": second},
            "c": {"model": str(tmp_path / "third"), "train": "full", "device": "cpu"},
        }
        team = {
            "agents": [{"name": name, "weights": of} for name, of in weights.items()],
            "lora": {"rank": 2, "alpha": 4.0},
            "sampling": {"max_tokens": 4},
        }
        model = {"embedded": SIZE, "device": first}
        optimizer = {"lr": 1e-2, "eps": 1e-2}
        chosen = sections(algorithm={"name": "ippo"}, model=model, team=team, optimizer=optimizer)
        with Trainer(**chosen) as trainer:
            steps = trainer.steps(2)
            return [
                {k: v for k, v in step.metrics.items() if not k.startswith(("time/", "memory/"))}
                for step in steps
            ]

    here, there = metrics("cpu", "cpu"), metrics("cuda:0", "cuda:1")
    for one, other in zip(here, there, strict=True):
        assert other == pytest.approx(one, rel=1e-2, abs=1e-3)


def test_rows_have_a_part_of_the_memory_that_is_free() -> None:
    decoder = Decoder(model_on_device())
    job = Job("a", tuple(range(7, 16)), Sampling(max_tokens=70), 0)
    assert decoder.room([job] * 100) == 100
    _, total = torch.cuda.mem_get_info(DEVICE)
    assert decoder.most_bytes is not None
    assert 0 < decoder.most_bytes <= 0.4 * total
    assert decoder.most_bytes % (total // 16) == 0
    outputs = decoder.join([job._replace(seed=seed) for seed in range(4)])
    decoder.most_bytes = 200 * decoder._rows.place_bytes  # too little for four
    expected = decode(model_on_device(), [job._replace(seed=seed) for seed in range(4)])
    finish(decoder)
    assert [output.ids for output in outputs] == [output.ids for output in expected]
