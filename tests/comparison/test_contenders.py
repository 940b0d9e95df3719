"""The contenders of a comparison: the same tasks and number of episodes, different training settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.tiny import sections

from kapelle.comparison.contenders import Contender, plan, read_contenders, read_own
from kapelle.errors import ConfigError, RunDirectoryError
from kapelle.setup.recipe import Recipe, load_recipe


def recipe(folder: Path, *settings: str, **over: Any) -> Recipe:
    values = sections(evaluation={"problems": 4}, **over)
    (folder / "tiny.yaml").write_text(yaml.safe_dump({"name": "tiny", **values}))
    return load_recipe(str(folder / "tiny.yaml"), (), settings)


def rows(found: tuple[Contender, ...]) -> dict[str, dict[str, Any]]:
    return {c.label: c.recipe.config.algorithm.model_dump(mode="json") for c in found}


class TestContenders:
    def test_all_have_the_recipe_s_number_of_episodes(self, tmp_path: Path) -> None:
        found = read_contenders(recipe(tmp_path), ["grpo", "ippo", "remax", "happo", "qmix"])
        assert {c.build().data.group_size for c in found} == {3}
        assert [c.algorithm for c in found] == ["grpo", "ippo", "remax", "happo", "qmix"]

    @pytest.mark.slow
    def test_settings_of_the_recipe_apply_to_other_algorithms(self, tmp_path: Path) -> None:
        algorithm = {
            "name": "grpo",
            "group_size": 3,
            "team_reward": "min",
            "scale": "none",
            "loss": {"clip_low": 0.1},
        }
        found = rows(read_contenders(recipe(tmp_path, algorithm=algorithm), ["grpo", "mappo"]))
        assert found["mappo"]["team_reward"] == "min"
        assert found["mappo"]["loss"]["clip_low"] == 0.1
        assert found["mappo"]["epochs"] == 2, "what the recipe does not say is each one's default"
        assert "scale" not in found["mappo"]
        assert found["grpo"]["scale"] == "none"
        assert found["grpo"]["epochs"] == 1

    def test_a_contender_has_its_own_settings(self, tmp_path: Path) -> None:
        own = read_own(["plain:algorithm.scale=none", "plain:optimizer.lr=1e-4"])
        found = read_contenders(recipe(tmp_path), ["grpo", "plain=grpo"], own)
        assert [rows(found)[label]["scale"] for label in ("grpo", "plain")] == ["std", "none"]
        assert [c.recipe.config.optimizer.lr for c in found] == [1e-2, 1e-4]
        assert found[1].recipe.origin["optimizer.lr"] == "--set plain"

    @pytest.mark.parametrize(
        ("algorithms", "message"),
        [
            (["grpo", "happoo"], "Did you mean 'happo'"),
            (["grpo", "grpo"], "'grpo' is listed twice"),
            (["grpo", "ppo"], "`ppo` cannot be compared here: .*one policy"),
            (["sft"], "`sft` cannot be compared here: it does not sample"),
            (["a b=grpo"], "'a b' is not a valid label"),
        ],
    )
    def test_invalid_algorithms_raise(self, tmp_path: Path, algorithms: list[str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            read_contenders(recipe(tmp_path), algorithms)

    def test_shared_weights_raise_for_sequential_updates(self, tmp_path: Path) -> None:
        own = read_own(["happo:team.sharing=shared"])
        with pytest.raises(ConfigError, match=r"`happo` cannot be compared here: .*both use 'shared'"):
            read_contenders(recipe(tmp_path), ["grpo", "happo"], own)

    def test_a_group_of_one_raises(self, tmp_path: Path) -> None:
        single = recipe(tmp_path, algorithm={"name": "ippo"})
        with pytest.raises(ConfigError, match=r"`grpo` cannot be compared here: .*group_size.* for all"):
            read_contenders(single, ["ippo", "grpo"])

    def test_another_number_of_episodes_raises(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="`grpo` has 4 episodes per task"):
            read_contenders(recipe(tmp_path), ["grpo"], read_own(["grpo:algorithm.group_size=4"]))

    def test_settings_for_an_unknown_contender_raise(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"'gppo', which is not among the algorithms. Did you mean 'grpo'"
        ):
            read_contenders(recipe(tmp_path), ["grpo"], read_own(["gppo:optimizer.lr=1"]))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("qmix:training.steps=3", "`training.steps` cannot be set for 'qmix' alone"),
        ("qmix:team.sampling.max_tokens=3", "cannot be set for 'qmix' alone"),
        ("optimizer.lr=3", "is not a setting for one algorithm"),
        ("qmix:optimizer.lr=[", "not valid YAML"),
        ("gone.yaml", "cannot be read"),
    ],
)
def test_only_training_settings_may_differ(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_own([word])


class TestPlan:
    def test_every_seed_of_every_contender_has_a_folder(self, tmp_path: Path) -> None:
        found = read_contenders(recipe(tmp_path, "seed=7"), ["grpo", "ippo"])
        runs = plan(found, 2, tmp_path / "all")
        assert [(r.label, r.seed) for r in runs] == [
            ("grpo", 7),
            ("grpo", 8),
            ("ippo", 7),
            ("ippo", 8),
        ]
        assert runs[3].path == tmp_path / "all" / "ippo" / "seed-8"
        assert not any(run.done for run in runs)

    def test_a_folder_with_other_files_raises(self, tmp_path: Path) -> None:
        found = read_contenders(recipe(tmp_path), ["grpo"])
        with pytest.raises(RunDirectoryError, match="no comparison"):
            plan(found, 1, tmp_path)
        (tmp_path / "compare.json").write_text(json.dumps({}))
        assert len(plan(found, 1, tmp_path)) == 1
