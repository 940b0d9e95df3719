"""On a CUDA device: recorded steps, grouped adapters, fused attention and given-back memory change no number.

Everything here has a twin that runs on a CPU, where torch computes the same in another way.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.tiny import LORA, lora_policies, stir, tiny_model, train_engine
from torch import Tensor

from kapelle.engines.rollout.local.decode_batch import Decoder
from kapelle.engines.rollout.local.decode_strategies import Job, RowOutput
from kapelle.engines.rollout.local.step_graphs import CudaRecorder, nowhere, on_cuda
from kapelle.models.fast import fused, routed_linear
from kapelle.models.fast.attention import attention
from kapelle.models.language_model import LanguageModel
from kapelle.models.lora_bank import linear
from kapelle.models.weights import weights_hash
from kapelle.rows import Sample
from kapelle.types import Sampling

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

JOBS = [
    Job(name, tuple(range(7, 7 + length)), Sampling(max_tokens=70), length)
    for name in (None, "a", "b")
    for length in (5, 9, 9, 12)
]


def model_on_device(dtype: str = "float32", *, adapted: bool = True) -> LanguageModel:
    """A tiny base, with two adapters."""
    model = tiny_model(dtype=dtype)
    torch.nn.Module.to(model.model, DEVICE)
    for seed, name in enumerate(("a", "b") if adapted else ()):
        model.bank.add(name, LORA, seed)
        stir(model.bank.parameters(name), seed)
    return model


def told_by(decoder: Decoder) -> list[RowOutput]:
    said = decoder.join(JOBS)
    while decoder.in_flight:
        decoder.advance(100)
    return said


@pytest.mark.parametrize("most", [fused.LARGEST, 0], ids=["fused", "flat"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_recorded_steps_say_the_same(
    dtype: str, bound: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "LARGEST", most)
    model = model_on_device(dtype)
    decoder = Decoder(model, 3, recorder_on=on_cuda)
    recorded, plain = told_by(decoder), told_by(Decoder(model, 3, recorder_on=nowhere))
    assert isinstance(decoder._recorder, CudaRecorder)
    assert decoder._recorder._last is not None
    for one, other in zip(recorded, plain, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=bound)


def test_sampler_and_trainer_agree() -> None:
    model = model_on_device(adapted=False)
    engine = train_engine(lora_policies("a", "b"), models={"base": model})
    jobs = [job for job in JOBS if job.adapter]
    decoder = Decoder(model, 2)
    said = decoder.join(jobs)
    while decoder.in_flight:
        decoder.advance(100)
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
    if not routed_linear.has_kernel(torch.device(DEVICE), torch.bfloat16):
        pytest.skip("this device has no kernel for grouped products")
    model = model_on_device()
    layer = model.model.model.layers[0].self_attn.q_proj
    x_NI = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    reads = [model.bank.parameters(name) for name in ("a", "b")]
    own = [p for each in reads for key, p in each.items() if "layers.0.self_attn.q_proj" in key]

    def learned() -> list[Tensor]:
        x = x_NI.to(DEVICE, torch.bfloat16).requires_grad_(True)
        with model.bank.routed([("a", 0, 13), (None, 13, 20), ("b", 20, 40)]):
            y_NO = linear(layer, x)
        return [y_NO.detach(), *torch.autograd.grad(y_NO.float().square().sum(), (x, *own))]

    together = learned()
    monkeypatch.setattr(routed_linear, "has_kernel", lambda _device, _dtype: False)
    for one, other in zip(together, learned(), strict=True):
        assert float((one - other).abs().max()) <= 0.02 * float(other.abs().max())


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
