"""Every architecture of docs/models.md samples and learns on the twin of a GPU as on the CPU, and in half precision."""

from __future__ import annotations

import pytest
import torch
from tests.models.test_families import JOBS, LORA, PLAYING
from tests.support.families import build, tokenizer
from tests.support.tiny import draw_samples, lora_policies, stir, train_engine, with_behaviour

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.train.protocol import Objective
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.models.fast import fused
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Sample

OBJECTIVE = Objective(SurrogateConfig().build())


def engine_of(family: str, device: str, dtype: str = "float32") -> tuple[TorchTrainEngine, LanguageModel]:
    """Return a family's model on a device, with two adapters that learn."""
    model = LanguageModel(build(family), tokenizer(), dtype, family)
    torch.nn.Module.to(model.model, device)
    engine = train_engine(lora_policies("a", "b", lora=LORA), models={"base": model}, stirred=False, eps=1e-2)
    for seed, name in enumerate("ab"):
        stir(model.bank.parameters(name), seed, 0.1)
    return engine, model


@pytest.mark.parametrize("family", PLAYING)
def test_a_gpu_samples_and_learns_as_a_cpu(family: str) -> None:
    (here, on_cpu), (there, on_gpu) = (engine_of(family, device) for device in ("cpu", "cuda"))
    for one, other in zip(decode(on_cpu, JOBS), decode(on_gpu, JOBS), strict=True):
        assert one.ids == other.ids
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    samples = with_behaviour(here, draw_samples(["a", "b"], [(3, 5), (7, 2), (12, 4)]))
    expected = here.update(samples, OBJECTIVE)
    assert there.update(samples, OBJECTIVE) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    for name in "ab":
        for tensor, same in zip(here.weights(name).values(), there.weights(name).values(), strict=True):
            assert torch.allclose(same.cpu(), tensor, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", PLAYING)
def test_half_precision_keeps_parity(family: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "LARGEST", 0)  # the pass of real models
    engine, model = engine_of(family, "cuda", dtype)
    outputs = decode(model, JOBS)
    samples = [
        Sample(
            str(job.adapter),
            (*job.prompt, *output.ids),
            tuple(range(len(job.prompt), len(job.prompt) + len(output.ids))),
            {"advantage": torch.ones(len(output.ids)), "behaviour": torch.tensor(output.logprobs)},
        )
        for job, output in zip(JOBS, outputs, strict=True)
    ]
    metrics = engine.update(samples, OBJECTIVE)  # compares its log-probs with the sampler's
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
