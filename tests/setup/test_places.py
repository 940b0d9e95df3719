"""A device and a compute type for each model, critic, verifier and reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import (
    LORA,
    SIZE,
    draw_samples,
    lora_policies,
    sections,
    tiny_model,
    train_engine,
    with_behaviour,
)

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.train.protocol import Objective
from kapelle.errors import ConfigError, ParityError
from kapelle.models.weights import save_model
from kapelle.rows import Column, Sample
from kapelle.team import Policy
from kapelle.training.trainer import Trainer

DEVICE = "cuda:99"


def settings(**over: Any) -> dict[str, Any]:
    return sections(**{"algorithm": {"name": "ippo"}, "model": {"embedded": SIZE, "device": "cpu"}, **over})


def agents(**weights: Any) -> dict[str, Any]:
    listed = [{"name": name, "weights": of} for name, of in weights.items()]
    return {"agents": listed, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 4}}


@pytest.fixture
def other(tmp_path: Path) -> str:
    save_model(tmp_path / "other", tiny_model(3))
    return str(tmp_path / "other")


class TestTypes:
    @pytest.mark.slow
    def test_each_model_and_the_critics_have_their_own(self, other: str) -> None:
        team = agents(a="lora", b={"model": other, "train": "lora", "dtype": "bfloat16", "device": "cpu"})
        with Trainer(**settings(team={**team, "critic_dtype": "float16"})) as trainer:
            held = {
                base: {model.dtype, *(weight.dtype for weight in model.base_parameters().values())}
                for base, model in trainer.models.items()
            }
            [step] = trainer.steps(1)
        own = f"model:{other}@bfloat16@cpu"
        assert held == {
            "base": {torch.float32},
            own: {torch.bfloat16},
            "base@critic": {torch.float16},
            f"{own}@critic": {torch.float16},
        }
        assert {f"lr/{name}" for name in ("a", "b", "critic:a", "critic:b")} <= step.metrics.keys()

    def test_one_in_half_precision_excuses_no_other(self) -> None:
        """0.01 nats are rounding in bfloat16 and a wrong adapter in float32."""
        policies = [*lora_policies("a"), Policy("b", base="half", lora=LORA)]
        models = {"base": tiny_model(), "half": tiny_model(dtype="bfloat16")}
        engine = train_engine(policies, models=models)
        samples = with_behaviour(engine, draw_samples(["a", "b"], [(3, 5)]))
        objective = Objective(SurrogateConfig().build())
        engine.update([shifted(s, 0.01 if s.learner == "b" else 0.0) for s in samples], objective)
        samples = with_behaviour(engine, samples)
        with pytest.raises(ParityError, match=r"\(bound 0.0001\).*policy 'a'"):
            engine.update([shifted(s, 0.01) for s in samples], objective)


def shifted(sample: Sample, by: float) -> Sample:
    columns = {**sample.columns, Column.BEHAVIOUR: sample.columns[Column.BEHAVIOUR] + by}
    return Sample(sample.learner, sample.tokens, sample.targets, columns)


class TestDevices:
    @pytest.mark.parametrize(
        ("name", "over"),
        [
            (r"model.device: cuda:99", {"model": {"embedded": SIZE, "device": DEVICE}}),
            (
                "weights.device` of agent `b: cuda:99",
                {"team": agents(a="lora", b={"model": "embedded", "device": DEVICE})},
            ),
            (r"team.critic_device: cuda:99", {"team": {"agents": 2, "critic_device": DEVICE}}),
        ],
    )
    def test_a_missing_device_is_an_error(
        self, name: str, over: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "kapelle.setup.model_loading.load_models", lambda *_: pytest.fail("a model is loaded")
        )
        with pytest.raises(ConfigError, match=rf"`{name}` cannot be used: .* Set `cpu`"):
            Trainer(**settings(**over))
