"""Recipes: precedence, origins of values, and errors about unknown keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kapelle.errors import ConfigError, for_command
from kapelle.setup.recipe import (
    Recipe,
    builtin_recipes,
    load_recipe,
    load_stages,
)

BASE = """
name: small
environment: {name: arithmetic, digits: 2}
workflow: {name: chain}
algorithm: {name: grpo, group_size: 4, loss: {clip_low: 0.1}}
team:
  agents:
    - {name: reasoner, prompt: "{question}"}
    - {name: actor, prompt: "{reasoner}"}
training: {steps: 7}
"""


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return str(path)


def load(base: str, *settings: str, overlay: str | None = None) -> Recipe:
    overlays: tuple[str, ...] = ()
    if overlay is not None:
        path = Path(base).with_name("overlay.yaml")
        path.write_text(overlay)
        overlays = (str(path),)
    return load_recipe(base, overlays, settings)


class TestPrecedence:
    def test_defaults_recipe_overlay_command_line(self, base: str) -> None:
        found = load(base, "training.steps=11", overlay="training: {steps: 9, tasks_per_step: 5}")
        training = found.config.training
        assert (training.steps, training.tasks_per_step, training.max_failed_share) == (11, 5, 0.2)
        assert load(base, overlay="training: {steps: 9}").config.training.steps == 9
        assert load(base).config.training.steps == 7

    def test_later_overlays_and_settings_win(self, base: str, tmp_path: Path) -> None:
        for number in (1, 2):
            (tmp_path / f"{number}.yaml").write_text(f"seed: {number}")
        overlays = (str(tmp_path / "1.yaml"), str(tmp_path / "2.yaml"))
        assert load_recipe(base, overlays).config.seed == 2
        assert load_recipe(base, overlays[::-1]).config.seed == 1
        assert load_recipe(base, overlays, ("seed=3", "seed=4")).config.seed == 4

    def test_a_section_is_merged_key_by_key(self, base: str) -> None:
        found = load(base, "algorithm.loss.clip_high=0.3").config.algorithm.model_dump()
        assert found["group_size"] == 4
        assert (found["loss"]["clip_low"], found["loss"]["clip_high"]) == (0.1, 0.3)

    def test_another_name_drops_the_old_ones_settings(self, base: str) -> None:
        found = load(base, "algorithm.name=ippo")
        assert found.config.algorithm.model_dump()["loss"]["clip_low"] == 0.2
        assert "algorithm.group_size" in found.origin
        assert found.origin["algorithm.group_size"] == "default"
        assert found.origin["algorithm.name"] == "command line"
        overlay = "algorithm: {name: ippo, epochs: 3}"
        assert load(base, overlay=overlay).config.algorithm.model_dump()["epochs"] == 3


class TestSettings:
    @pytest.mark.parametrize(
        ("setting", "key", "value"),
        [
            ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
            ("optimizer.betas=[0.8, 9e-1]", "optimizer.betas", (0.8, 0.9)),
            ("optimizer.max_grad_norm=null", "optimizer.max_grad_norm", None),
            ("team.sampling.stop=['a=b', \"\\n\"]", "team.sampling.stop", ("a=b", "\n")),
            ("description=a=b", "description", "a=b"),
            ("description='one: two'", "description", "one: two"),
            ("model.path=1e5", "model.path", "1e5"),
            ("engine.max_rows=64", "engine.name", "local"),
            ("engine.graphs=off", "engine.graphs", "off"),
        ],
    )
    def test_values_are_yaml(self, base: str, setting: str, key: str, value: Any) -> None:
        found: Any = load(base, setting).config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value
        assert type(found) is type(value)

    @pytest.mark.parametrize("setting", ["training.steps", "=3", "training.steps:3"])
    def test_a_word_without_a_value_is_no_setting(self, base: str, setting: str) -> None:
        with pytest.raises(ConfigError, match=r"Write key\.path=value"):
            load(base, setting)


class TestOrigin:
    def test_every_value_has_one_and_nothing_else_has(self, base: str) -> None:
        found = load(
            base, "optimizer.lr=1e-3", "team.agents.0.prompt=hm", overlay="warmup: {steps: 3}\nseed: 4"
        )
        values: dict[str, Any] = {}

        def walk(value: Any, path: str) -> None:
            if isinstance(value, dict) and value:
                for key, item in value.items():
                    walk(item, f"{path}.{key}" if path else key)
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                for key, item in enumerate(value):
                    walk(item, f"{path}.{key}")
            else:
                values[path] = value

        walk(yaml.safe_load(found.yaml()), "")
        assert set(found.origin) == set(values)
        assert found.origin["optimizer.lr"] == "command line"
        assert found.origin["team.agents.0.prompt"] == "command line"
        assert found.origin["team.agents.1.prompt"].endswith("base.yaml")
        assert found.origin["seed"].endswith("overlay.yaml")
        assert found.origin["optimizer.eps"] == "default"


class TestRerun:
    @pytest.mark.sample(3)
    @pytest.mark.slow
    @pytest.mark.parametrize("name", [*builtin_recipes()])
    def test_the_resolved_file_gives_the_same_run(self, name: str, tmp_path: Path) -> None:
        for found in [recipe for _, recipe in load_stages(name)] or [load_recipe(name)]:
            (tmp_path / "config.yaml").write_text(found.yaml())
            again = load_recipe(str(tmp_path / "config.yaml"))
            assert again.config == found.config
            assert again.yaml() == found.yaml()

    def test_also_with_every_kind_of_weights(self, base: str, tmp_path: Path) -> None:
        overlay = """
team:
  agents:
    - {name: a, weights: {model: x, train: lora}}
    - {name: b, weights: {adapter: y}, share_critic_with: 0}
    - {name: c, weights: {endpoint: "http://h", model: m}, sampling: {stop: ["é\\n"]}}
    - {name: d, weights: frozen, lora: {rank: 3}}
environment: {name: matrix, game: custom, payoffs: {AA: 1, AB: [1, 2], BA: 0, BB: 3.5}}
workflow: {name: parallel}
trackers: [{name: tensorboard}]
"""
        found = load(base, overlay=overlay)
        (tmp_path / "config.yaml").write_text(found.yaml())
        assert load_recipe(str(tmp_path / "config.yaml")).config == found.config


class TestWrongKeys:
    @pytest.mark.parametrize(
        ("path", "value", "meant"),
        [
            ("traning", "{steps: 3}", "training"),
            ("training.step", 3, "steps"),
            ("algorithm.loss.clip_lo", 0.3, "clip_low"),
            ("team.agents.1.promt", "hm", "prompt"),
            ("team.agents.0.sampling.top_q", 1, "top_p"),
            ("team.agents.0.weights.modl", "x", "model"),
        ],
    )
    def test_each_is_named_with_its_neighbour(self, base: str, path: str, value: object, meant: str) -> None:
        with pytest.raises(ConfigError) as caught, for_command():
            load(base, f"{path}={value}")
        message = str(caught.value)
        assert f"'{path}'" in message
        assert f"Did you mean '{meant}'?" in message
        assert "command line" in message

    @pytest.mark.parametrize(
        ("path", "value", "part"),
        [
            ("training.steps", "many", "'many'"),
            ("training.steps", -1, "greater than or equal to 0"),
            ("team.sharing", "both", "'shared', 'lora' or 'frozen'"),
            ("team.agents.0.weights", "lorra", "lorra"),
            ("team.agents", "{a: 1}", "integer"),
        ],
    )
    def test_a_wrong_value_is_named_with_what_it_may_be(
        self, base: str, path: str, value: object, part: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            load(base, f"{path}={value}")
        message = str(caught.value)
        assert f"'{path}'" in message
        assert part in message

    def test_a_key_that_another_one_needs_is_named_with_its_path(self, base: str) -> None:
        with pytest.raises(ConfigError, match=r"(?s)'team\.agents\.0\.weights\.model'.*missing"):
            load(base, "team.agents.0.weights.train=lora")

    @pytest.mark.parametrize(
        ("setting", "meant"),
        [
            ("algorithm.name=gpro", "Unknown algorithm 'gpro'. Did you mean 'grpo'?"),
            ("algorithm.name=nowhere:Thing", "cannot be imported"),
            ("algorithm.name=kapelle.algorithms.grpo:by_agent", "not a class"),
            ("algorithm.name=pathlib:Path", "must be a subclass of kapelle.Settings"),
        ],
    )
    def test_an_unknown_class_suggests_the_closest_name(self, base: str, setting: str, meant: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load(base, setting)
        assert meant in str(caught.value)

    def test_files_that_are_none(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"Unknown recipe 'dmo'. Did you mean 'demo'"):
            load_recipe("dmo")
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            load_recipe(str(tmp_path / "nothing.yaml"))
        (tmp_path / "list.yaml").write_text("- 1")
        with pytest.raises(ConfigError, match="not a mapping"):
            load_recipe(str(tmp_path / "list.yaml"))
        (tmp_path / "broken.yaml").write_text("a: [1")
        with pytest.raises(ConfigError, match="is not valid YAML"):
            load_recipe(str(tmp_path / "broken.yaml"))
        (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"bytes\.yaml"):
            load_recipe(str(tmp_path / "bytes.yaml"))

    @pytest.mark.parametrize(
        "text",
        [
            "\n".join(
                ["a0: &a0 x", *(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 12))]
            ),
            "\n".join(
                [
                    "a0: &a0 {x: 1}",
                    *(f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 9)}]}}" for k in range(1, 12)),
                ]
            ),
            "a: &a [*a]",
            f"a: &a {'x' * 99_999}\nb: [{', '.join(['*a'] * 9_999)}]",
        ],
        ids=["lists", "merged mappings", "itself", "long texts"],
    )
    def test_aliases_make_no_more_of_a_recipe_than_fits(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "bomb.yaml").write_text(text)
        with pytest.raises(ConfigError, match="with expanded aliases"):
            load_recipe(str(tmp_path / "bomb.yaml"))

    def test_a_recipe_cannot_make_objects(self, tmp_path: Path) -> None:
        (tmp_path / "evil.yaml").write_text("name: !!python/object/apply:os.system ['true']")
        with pytest.raises(ConfigError, match="is not valid YAML"):
            load_recipe(str(tmp_path / "evil.yaml"))
