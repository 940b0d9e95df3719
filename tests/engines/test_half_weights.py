"""A base that nothing trains is held in two bytes a weight; what learns on it, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import (
    LORA,
    SIZE,
    draw_samples,
    frozen_copy,
    lora_policies,
    same_bits,
    sections,
    tiny_model,
    train_engine,
    with_adapters,
    with_behaviour,
    with_columns,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from kapelle.algorithms.shared.surrogate import SurrogateConfig, ValueLossConfig
from kapelle.engines.rollout.local import decode_strategies
from kapelle.engines.rollout.local.decode_batch import Decoder, decode
from kapelle.engines.rollout.local.decode_strategies import Job, RowOutput
from kapelle.engines.rollout.local.engine import LocalEngine
from kapelle.engines.train.protocol import Objective
from kapelle.models.fast import fused
from kapelle.models.language_model import DTYPES, LanguageModel, hold_in, load_language_model
from kapelle.models.weights import hash_of_base, save_model
from kapelle.rows import Sample
from kapelle.settings.schema import ModelConfig
from kapelle.team import Critic, Policy
from kapelle.training.trainer import Trainer
from kapelle.types import Sampling

OBJECTIVE = Objective(SurrogateConfig().build(), ValueLossConfig().build(), 0.5)
HALVES = ["bfloat16", "float16"]

# torch tells that it has no fused norm for mixed types; the plain one is what runs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


def pair(dtype: str) -> tuple[LanguageModel, LanguageModel]:
    """The same weights, all of them numbers of the type: held in four bytes each, and in two."""
    wide, narrow = (tiny_model(dtype=dtype, size=0.1) for _ in range(2))
    for model in (wide, narrow):
        hold_in(model.model, DTYPES[dtype])
    hold_in(wide.model, torch.float32)
    return wide, narrow


class TestNumbers:
    @pytest.mark.sample(3)
    @pytest.mark.slow
    @pytest.mark.parametrize("copied", [True, False], ids=["prepared copies", "the base itself"])
    @pytest.mark.parametrize("dtype", HALVES)
    def test_weights_of_that_type_stay_bitwise_the_same(
        self, dtype: str, copied: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Today's open models are published in bfloat16: they compute as they did when held in float32."""
        monkeypatch.setattr(fused, "LARGEST", fused.LARGEST if copied else 0)
        found = []
        for model in pair(dtype):
            engine = train_engine(
                lora_policies("a", "b"), [Critic("v", lora=LORA)], models={"base": model}, eps=1e-3
            )
            jobs = [Job(name, (7, 8, 9, 10), Sampling(max_tokens=12), 3) for name in (None, "a", "b")]
            said = [(row.ids, row.logprobs) for row in decode(model, jobs)]
            samples = draw_samples(["a", "b"], [(3, 5), (7, 2)])
            values = with_columns(
                draw_samples(["v"], [(3, 5)]), **{"return": [torch.ones(5)], "value": [torch.zeros(5)]}
            )
            metrics = [engine.update(with_behaviour(engine, samples) + values, OBJECTIVE) for _ in range(2)]
            found.append([said, metrics, frozen_copy(engine.weights("a")), frozen_copy(engine.weights("v"))])
        assert same_bits(found[0], found[1])

    def test_weights_that_are_not_of_that_type_are_rounded(self) -> None:
        config = ModelConfig.model_validate({"embedded": SIZE, "dtype": "bfloat16"})
        wide, narrow = load_language_model(config), load_language_model(config, trained=False)
        for name, weight in narrow.base_parameters().items():
            assert torch.equal(weight, wide.base_parameters()[name].bfloat16())
        assert hash_of_base(narrow) != hash_of_base(wide)
        hold_in(narrow.model, torch.float32)
        assert hash_of_base(narrow) == hash_of_base(load_language_model(config, trained=False))


class TestRounded:
    """Weights in float32 that sampling rounds once."""

    @pytest.fixture
    def model(self, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
        monkeypatch.setattr(fused, "LARGEST", 0)
        monkeypatch.setattr(decode_strategies, "keeps_rounded", lambda _model: True)
        return with_adapters("a", dtype="bfloat16")

    def said(self, decoder: Decoder) -> list[RowOutput]:
        outputs = decoder.join(
            [Job(name, tuple(range(7, 30)), Sampling(max_tokens=30), k) for k, name in enumerate(("a", None))]
        )
        while decoder.in_flight:
            decoder.advance(8)
        return outputs

    def test_tokens_are_the_same_exactly(self, model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
        before = [id(weight) for weight in model.model.parameters()]
        rounded = self.said(Decoder(model))
        assert [id(weight) for weight in model.model.parameters()] == before
        monkeypatch.setattr(decode_strategies, "keeps_rounded", lambda _model: False)
        assert rounded == self.said(Decoder(model))

    def test_a_step_rounds_no_weight_of_the_base(self, model: LanguageModel) -> None:
        decoder = Decoder(model)
        decoder.join([Job("a", (7, 8, 9), Sampling(max_tokens=30), 0)])
        sizes = {weight.numel() for weight in model.base_parameters().values() if weight.dim() == 2}
        with Casts() as casts:
            decoder.advance(4)
        assert not sizes & casts.sizes


class Casts(TorchDispatchMode):
    """Notes the sizes of tensors that change their type."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype != args[0].dtype:
            self.sizes.add(out.numel())
        return out


def settings(dtype: str, **over: Any) -> dict[str, Any]:
    """A tiny run with an adapter for each of two agents and a critic."""
    return sections(
        **{"algorithm": {"name": "mappo"}, "model": {"embedded": SIZE, "dtype": dtype}, "seed": 5, **over}
    )


class TestARun:
    @pytest.mark.slow
    def test_peft_computes_the_same_with_the_saved_adapter(self, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        save_model(tmp_path / "model", tiny_model(size=0.1))
        model = {"path": str(tmp_path / "model"), "dtype": "bfloat16"}
        with Trainer(**settings("bfloat16", model=model, optimizer={"lr": 0.05})) as trainer:
            trainer.train()
            trainer.save_policies(tmp_path / "saved")
            samples = draw_samples(["agent_0"], [(3, 9)])
            ours_T = trainer.engine.score(samples)[0]
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "saved/policies/agent_0")
        assert {p.dtype for name, p in theirs.named_parameters() if "lora_" in name} == {torch.float32}
        adapted_T = logp_of(theirs, samples[0])
        assert float((ours_T - adapted_T).abs().max()) < 0.05
        with theirs.disable_adapter():
            assert float((logp_of(theirs, samples[0]) - adapted_T).abs().max()) > 0.2, "nobody would miss it"


@torch.no_grad()
def logp_of(model: Any, sample: Sample) -> Tensor:
    """Log-probs `_T` of a sample's targets, by `transformers`."""
    tokens = torch.tensor([sample.tokens])
    with torch.autocast("cpu", torch.bfloat16):
        logits_LV: Tensor = model(input_ids=tokens).logits[0].float()
    targets_T = torch.tensor(sample.targets)
    logp_TV = logits_LV[targets_T - 1].log_softmax(-1)
    return logp_TV.gather(1, tokens[0, targets_T, None])[:, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_type_that_this_processor_emulates_is_noted(dtype: str) -> None:
    model = load_language_model(ModelConfig(dtype=dtype))
    notes = LocalEngine({"base": model}, [Policy("a", trained=False)]).notes
    computed = dtype == "float32" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert any("`model.dtype: float32`" in note for note in notes) is not computed
