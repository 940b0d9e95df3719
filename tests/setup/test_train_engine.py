"""`train_engine` in a recipe: found like a rollout engine, and nothing in a run knows which one it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.plain_engine import Plain, PlainEngine
from tests.support.tiny import frozen_copy, sections

from kapelle import Trainer
from kapelle.engines.train.settings import Torch
from kapelle.errors import ConfigError
from kapelle.features.warmup.stage import train_stage
from kapelle.models.language_model import load_language_model
from kapelle.setup.recipe import resolve

PLAIN = {"name": "tests.support.plain_engine:Plain"}


class TestName:
    def test_the_default_is_torch(self) -> None:
        assert resolve(sections()).train_engine == Torch()
        assert resolve(sections(train_engine=None)).train_engine == Torch()

    def test_a_module_and_a_class_find_one(self) -> None:
        assert resolve(sections(train_engine=PLAIN)).train_engine == Plain()

    @pytest.mark.parametrize(
        ("said", "match"),
        [
            ({"name": "troch"}, "Unknown train engine 'troch'. Did you mean 'torch'"),
            ({"name": "torch", "ranks": 2}, "train_engine.ranks"),
            ({"name": "tests.support.plain_engine:Plane"}, "Did you mean 'Plain'"),
            ({"name": "tests.support.plain_engine:PlainEngine"}, "subclass of kapelle.Settings"),
        ],
    )
    def test_an_unknown_train_engine_is_an_error(self, said: dict[str, Any], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            resolve(sections(train_engine=said))


@pytest.mark.slow
class TestAnotherEngine:
    """A run that learns by an engine of its own, which keeps its weights where no one else looks."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "algorithm",
        [
            {"name": "grpo", "group_size": 2, "reference_every": 1, "loss": {"kl_coefficient": 0.1}},
            pytest.param({"name": "mappo"}, marks=pytest.mark.long),
            pytest.param({"name": "sft"}, marks=pytest.mark.long),
        ],
        ids=lambda each: each["name"],
    )
    def test_it_trains_saves_and_resumes(self, algorithm: dict[str, Any], tmp_path: Path) -> None:
        environment = (
            {"environment": {"name": "arithmetic", "digits": 1}} if algorithm["name"] == "sft" else {}
        )
        values = sections(algorithm=algorithm, train_engine=PLAIN, checkpoint={"every": 1}, **environment)
        with Trainer(run_dir=tmp_path / "run", **values) as whole:
            assert isinstance(whole.engine, PlainEngine)
            whole.train(2)
            kept = {name: frozen_copy(whole.engine.weights(name)) for name in whole.team.trained}
            assert min(whole.engine.versions.values()) >= 2
        with Trainer(run_dir=tmp_path / "run", resume=True, **values) as again:
            assert again.done == 2
            for name, weights in kept.items():
                now = again.engine.weights(name)
                assert all(torch.equal(tensor, now[key]) for key, tensor in weights.items())
            again.train(1)


class TestWarmup:
    CONFIG = resolve(
        sections(
            environment={"name": "arithmetic", "digits": 1},
            warmup={"steps": 2, "demonstrations": 4, "batch": 2},
            train_engine=PLAIN,
        )
    )

    def test_the_recipes_engine_makes_it(self) -> None:
        weights = train_stage(self.CONFIG, None).base_parameters()
        begun = load_language_model(self.CONFIG.model).base_parameters()
        assert any(not torch.equal(tensor, weights[key]) for key, tensor in begun.items())
