"""What of a recipe belongs to the embedded model: its warm-up, its rates and lengths, and how a mapping is unset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kapelle import Trainer
from kapelle.errors import ConfigError
from kapelle.setup.recipe import LEFT_OUT, load_recipe, load_stages

QUICK = (
    "training.steps=1",
    "training.tasks_per_step=1",
    "algorithm.group_size=2",
    "evaluation.before_and_after=false",
)


def overlay(folder: Path, **values: Any) -> str:
    path = folder / "overlay.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


class TestWarmup:
    @pytest.mark.parametrize("name", ["demo", "maporl_gsm8k_debate"])
    def test_another_model_does_without_the_recipe_s_own(self, name: str) -> None:
        settings = ("model.path=Qwen/Qwen3-0.6B",)
        for found in [each for _, each in load_stages(name, (), settings)] or [
            load_recipe(name, (), settings)
        ]:
            assert found.config.warmup is None
            assert {k: v for k, v in found.origin.items() if k.startswith("warmup")} == {"warmup": LEFT_OUT}
            (told,) = [note for note in found.notes if note.startswith("warm-up: ")]
            assert "excluded" in told
            assert "Qwen/Qwen3-0.6B" in told
        for plain in [each for _, each in load_stages(name)] or [load_recipe(name)]:
            assert plain.config.warmup is not None
            assert plain.notes == ()

    def test_a_warm_up_that_is_set_is_kept_with_a_note(self, tmp_path: Path) -> None:
        path = "model.path=Qwen/Qwen3-0.6B"
        typed = load_recipe("demo", (), (path, "warmup.steps=7"))
        laid = load_recipe("demo", (overlay(tmp_path, warmup={"steps": 7}),), (path,))
        for found, who in ((typed, "command line"), (laid, "overlay.yaml")):
            assert found.config.warmup is not None
            assert (found.config.warmup.steps, found.config.warmup.demonstrations) == (7, 3000)
            assert found.origin["warmup.steps"].endswith(who)
            assert found.origin["warmup.demonstrations"] == "demo"
            assert any(
                note.startswith("warm-up: trains all weights of Qwen") and who in note for note in found.notes
            )

    def test_python_is_warned(self, pretrained: str) -> None:
        pytest.importorskip("pyspiel")
        with pytest.warns(UserWarning, match="embedded model") as caught:
            Trainer.from_recipe("kuhn", f"model.path={pretrained}").close()
        assert [str(each.message).partition(":")[0] for each in caught] == ["warm-up", "model"]


class TestReal:
    def test_it_lies_between_the_recipe_and_what_the_user_lays_over(self, tmp_path: Path) -> None:
        over = overlay(tmp_path, optimizer={"lr": 2e-6})
        found = load_recipe("gsm8k", (over,), ("model.path=a/b", "team.sampling.max_tokens=77"), real=True)
        assert found.config.optimizer.lr == 2e-6
        assert found.config.team.sampling.max_tokens == 77
        assert found.config.model.path == "a/b"
        assert found.config.team.lora.rank == 64
        assert found.origin["team.lora.rank"] == "gsm8k --real"
        assert found.origin["optimizer.lr"] == over
        assert found.notes == ()


class TestUnset:
    def test_settings_after_a_null_start_from_the_defaults(self) -> None:
        found = load_recipe("kuhn", (), ("model.embedded=null", "model.embedded.layers=3"))
        assert (found.config.model.embedded.layers, found.config.model.embedded.hidden) == (3, 128)
        assert found.origin["model.embedded.layers"] == "command line"
        assert found.origin["model.embedded.hidden"] == "default"

    def test_entries_of_a_list_go_by_name(self) -> None:
        found = load_recipe("demo", (), ("team.agents.actor.sampling.max_tokens=3",))
        assert not isinstance(found.config.team.agents, int)
        assert found.config.team.agents[1].sampling is not None
        assert found.origin["team.agents.1.sampling.max_tokens"] == "command line"
        with pytest.raises(ConfigError, match=r"no entry named 'acter'.*'actor'"):
            load_recipe("demo", (), ("team.agents.acter.prompt={}",))
        stages = dict(load_stages("mrlm_hybrid", (), ("stages.ppo.training.steps=3",)))
        assert (stages["sft"].config.training.steps, stages["ppo"].config.training.steps) == (300, 3)
