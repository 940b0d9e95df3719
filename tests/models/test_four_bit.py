"""Adapters on layers that keep their weights as codes, as those of bitsandbytes do.

The library needs CUDA. Here a layer of our own takes its place: bytes and a scale for each row, which its forward pass
turns into weights again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import (
    frozen_copy,
    tiny_model,
    train_engine,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.rollout.local.decode_batch import decode
from kapelle.engines.rollout.local.decode_strategies import Job
from kapelle.engines.train.protocol import Objective
from kapelle.errors import ModelError
from kapelle.models.language_model import LanguageModel, load_language_model
from kapelle.models.weights import save_model
from kapelle.rows import Sample
from kapelle.settings.schema import ModelConfig
from kapelle.team import Lora, Policy
from kapelle.types import Sampling


class Codes(nn.Linear):
    """Weights of one byte, packed into a column as those of four bits are."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        weight_OI = plain.weight.detach()
        self.scale_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
        codes_OI = (weight_OI / self.scale_O1).round().to(torch.int8).view(torch.uint8)
        self.weight = nn.Parameter(codes_OI.reshape(-1, 1), requires_grad=False)
        self.bias = plain.bias

    def read(self) -> Tensor:
        return self.weight.view(torch.int8).view(self.out_features, self.in_features) * self.scale_O1

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.read().to(x.dtype), self.bias)


def pair() -> tuple[LanguageModel, LanguageModel]:
    """A model of codes, and one of the weights that they stand for, which `transformers` computes too."""
    models = []
    for coded in (True, False):
        bare = tiny_model(size=0.1).model
        for path, layer in list(bare.named_modules()):
            if isinstance(layer, nn.Linear) and ".layers." in path:
                codes = Codes(layer)
                if coded:
                    bare.set_submodule(path, codes)
                else:
                    layer.weight.data = codes.read()
        models.append(LanguageModel(bare, tiny_model().tokenizer))
    models[1].flat = None
    return models[0], models[1]


def learned(model: LanguageModel) -> tuple[list[Any], dict[str, Tensor]]:
    """What two adapters say on a model, and one's weights after learning from it."""
    policies = [Policy(name, lora=Lora(rank=2, alpha=4.0, targets=("all-linear",))) for name in ("a", "b")]
    engine = train_engine(policies, models={"base": model}, eps=1e-3)
    jobs = [
        Job(name, (7, 8, 9, *range(10, 10 + k)), Sampling(max_tokens=6), k) for name in "ab" for k in (1, 4)
    ]
    said = decode(model, jobs)
    samples = [
        Sample(
            str(job.adapter),
            job.prompt + tuple(row.ids),
            tuple(range(len(job.prompt), len(job.prompt) + len(row.ids))),
            {"behaviour": torch.tensor(row.logprobs), "advantage": torch.ones(len(row.ids))},
        )
        for job, row in zip(jobs, said, strict=True)
    ]
    engine.update(
        samples, Objective(SurrogateConfig().build())
    )  # rejects samples of other weights by 1e-4 nats
    return [(row.ids, row.logprobs) for row in said], frozen_copy(engine.weights("a"))


@pytest.mark.slow
def test_adapters_on_codes_sample_and_learn_as_on_the_weights() -> None:
    coded, plain = pair()
    assert coded.flat is None
    (said, codes), (expected, weights) = learned(coded), learned(plain)
    assert [ids for ids, _ in said] == [ids for ids, _ in expected]
    for key, weight in weights.items():
        torch.testing.assert_close(codes[key], weight, rtol=0, atol=1e-5)


class TestSettings:
    def test_a_frozen_base_is_requested_as_nf4_and_one_that_trains_is_not(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        asked: list[dict[str, Any]] = []

        def read(path: str, **given: Any) -> None:
            asked.append(given)
            raise OSError("enough")

        save_model(tmp_path, tiny_model())
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
        config = ModelConfig(path=str(tmp_path), dtype="bfloat16", device="cuda:1", quantization="nf4")
        for trained in (True, False):
            with pytest.raises(ModelError, match="enough"):
                load_language_model(config, trained=trained)
        whole, frozen = asked
        assert "quantization_config" not in whole
        assert frozen["device_map"] == {"": "cuda:1"}
        codes = frozen["quantization_config"]
        assert (codes.load_in_4bit, codes.bnb_4bit_quant_type) == (True, "nf4")
        assert codes.bnb_4bit_compute_dtype == torch.bfloat16
