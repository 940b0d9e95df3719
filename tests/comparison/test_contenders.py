"""Who may be compared: the recipe's tasks and number of episodes for all, and of one's own only how it learns."""

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
    def test_everybody_plays_a_task_as_often_as_the_recipe_says(self, tmp_path: Path) -> None:
        found = read_contenders(recipe(tmp_path), ["grpo", "ippo", "remax", "happo", "qmix"])
        assert {c.build().data.group_size for c in found} == {3}
        assert [c.algorithm for c in found] == ["grpo", "ippo", "remax", "happo", "qmix"]

    @pytest.mark.slow
    def test_what_the_recipe_says_of_its_algorithm_holds_where_another_knows_it(self, tmp_path: Path) -> None:
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

    def test_a_row_has_settings_of_its_own(self, tmp_path: Path) -> None:
        own = read_own(["plain:algorithm.scale=none", "plain:optimizer.lr=1e-4"])
        found = read_contenders(recipe(tmp_path), ["grpo", "plain=grpo"], own)
        assert [rows(found)[label]["scale"] for label in ("grpo", "plain")] == ["std", "none"]
        assert [c.recipe.config.optimizer.lr for c in found] == [1e-2, 1e-4]
        assert found[1].recipe.origin["optimizer.lr"] == "--set plain"

    def test_the_settings_may_stand_in_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "own.yaml"
        file.write_text("qmix: {algorithm: {credit_warmup_steps: 2}}\n")
        found = rows(read_contenders(recipe(tmp_path), ["qmix"], read_own([str(file)])))
        assert found["qmix"]["credit_warmup_steps"] == 2

    @pytest.mark.parametrize(
        ("algorithms", "message"),
        [
            (["grpo", "happoo"], "Did you mean 'happo'"),
            (["grpo", "grpo"], "'grpo' is named twice"),
            (["grpo", "ppo"], "`ppo` cannot be compared here: .*one policy"),
            (["sft"], "`sft` cannot be compared here: .*without sampling"),
            (["a b=grpo"], "'a b' cannot name"),
        ],
    )
    def test_nonsense_is_refused_by_name(self, tmp_path: Path, algorithms: list[str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            read_contenders(recipe(tmp_path), algorithms)

    def test_shared_weights_are_refused_where_agents_move_in_turn(self, tmp_path: Path) -> None:
        own = read_own(["happo:team.sharing=shared"])
        with pytest.raises(ConfigError, match=r"`happo` cannot be compared here: .*both use 'shared'"):
            read_contenders(recipe(tmp_path), ["grpo", "happo"], own)

    def test_a_group_of_one_cannot_be_compared_with_itself(self, tmp_path: Path) -> None:
        single = recipe(tmp_path, algorithm={"name": "ippo"})
        with pytest.raises(ConfigError, match=r"`grpo` cannot be compared here: .*group_size.* for all"):
            read_contenders(single, ["ippo", "grpo"])

    def test_another_number_of_episodes_is_another_budget(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="`grpo` would play each task 4 times, but the recipe 3 times"):
            read_contenders(recipe(tmp_path), ["grpo"], read_own(["grpo:algorithm.group_size=4"]))

    def test_settings_for_nobody_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"'gppo', which is not among the algorithms. Did you mean 'grpo'"
        ):
            read_contenders(recipe(tmp_path), ["grpo"], read_own(["gppo:optimizer.lr=1"]))

    def test_without_an_evaluation_there_is_nothing_to_compare(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="before_and_after=true"):
            read_contenders(recipe(tmp_path, "evaluation.before_and_after=false"), ["grpo"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("qmix:training.steps=3", "`training.steps` cannot be set for 'qmix' alone"),
        ("qmix:environment.digits=3", "same tasks"),
        ("qmix:team.sampling.max_tokens=3", "cannot be set for 'qmix' alone"),
        ("qmix:algorithms.fit=3", "`algorithms.fit` cannot be set"),
        ("optimizer.lr=3", "is not a setting of one row"),
        ("qmix:optimizer.lr", "is not a setting of one row"),
        ("qmix:optimizer.lr=[", "not YAML"),
        ("gone.yaml", "cannot be read"),
    ],
)
def test_only_how_it_learns_is_one_contenders_own(word: str, message: str) -> None:
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

    def test_a_folder_of_something_else_is_refused(self, tmp_path: Path) -> None:
        found = read_contenders(recipe(tmp_path), ["grpo"])
        with pytest.raises(RunDirectoryError, match="holds no comparison"):
            plan(found, 1, tmp_path)
        (tmp_path / "compare.json").write_text(json.dumps({}))
        assert len(plan(found, 1, tmp_path)) == 1
