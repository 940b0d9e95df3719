"""Stages: one after another, what was learned handed on, resumed where they stopped, checked before anything starts."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from tests.cli.conftest import Kapelle
from tests.support.tiny import SIZE, frozen_copy, same_bits, sections

from kapelle.errors import ConfigError, RunDirectoryError
from kapelle.models.weights import weights_hash
from kapelle.runs.reader import read_episodes, read_evaluations, read_metrics
from kapelle.setup.recipe import load_recipe, load_stages
from kapelle.team import reference_name
from kapelle.training.stages import checkable, open_stages, read_stages, start_of
from kapelle.training.trainer import Trainer

RECIPE: dict[str, Any] = {
    "name": "three",
    "environment": {"name": "tests.support.copies:Copies"},
    "workflow": {"name": "debate", "rounds": 2},
    "team": {"agents": 2, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 4}},
    "model": {"embedded": SIZE},
    "training": {"steps": 2, "tasks_per_step": 2},
    "evaluation": {"before_and_after": False},
    "checkpoint": {"every": 1},
    "optimizer": {"lr": 1e-2},
    "stages": [
        {"name": "sft", "algorithm": {"name": "sft"}},
        {
            "name": "judge",
            "algorithm": {"name": "verifier", "data": "recorded", "group_size": 4},
            "team": {"sharing": "frozen"},
        },
        {"name": "debate", "algorithm": {"name": "maporl", "verifier": "stage:judge", "least_auc": None}},
    ],
}


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return write(tmp_path)


def write(folder: Path, **over: Any) -> str:
    values = json.loads(json.dumps({**RECIPE, **over}))
    path = folder / "three.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


class TestReading:
    def test_a_stage_lies_over_the_recipe_and_settings_over_both(self, recipe: str) -> None:
        found = dict(load_stages(recipe, settings=["training.steps=7", "stages.1.training.tasks_per_step=3"]))
        assert [*found] == ["sft", "judge", "debate"]
        assert [each.config.training.steps for each in found.values()] == [7, 7, 7]
        assert [each.config.training.tasks_per_step for each in found.values()] == [2, 3, 2]
        assert found["judge"].config.team.sharing == "frozen"
        assert found["debate"].config.team.sharing == "lora"
        assert found["judge"].origin["algorithm.name"] == "stage 'judge'"
        assert found["judge"].origin["training.steps"] == "command line"

    def test_one_run_is_not_made_of_stages(self, recipe: str) -> None:
        with pytest.raises(ConfigError, match="has stages"):
            load_recipe(recipe)

    def test_names_tell_stages_apart(self, tmp_path: Path) -> None:
        twice = [{"name": "a", "algorithm": {"name": "sft"}}] * 2
        (tmp_path / "twice.yaml").write_text(yaml.safe_dump({**RECIPE, "stages": twice}))
        with pytest.raises(ConfigError, match="two stages named 'a'"):
            load_stages(str(tmp_path / "twice.yaml"))


class TestChecking:
    def test_everything_is_checked_before_anything_runs(self, kapelle: Kapelle, recipe: str) -> None:
        said = kapelle("validate", recipe)
        assert said.code == 0, said.err
        assert said.out.count("ok  stage") == 3
        wrong = kapelle("train", recipe, "stages.2.algorithm.verifier=null", "--run-dir", "run")
        assert wrong.code != 0
        assert "score_rounds" in wrong.err
        assert not Path("run").exists()

    def test_an_unknown_stage_of_a_verifier_is_an_error(self, recipe: str) -> None:
        stages = read_stages(recipe, settings=["stages.2.algorithm.verifier=stage:juge"])
        with pytest.raises(ConfigError, match=r"'stage:juge'.*'judge'"), checkable(stages):
            pass


class TestRunning:
    @pytest.fixture(scope="class")
    def whole(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A run of all stages that was never interrupted; not to be changed."""
        from tests.cli.conftest import call

        folder = tmp_path_factory.mktemp("whole")
        said = call("train", write(folder), "--run-dir", str(folder / "run"))
        assert said.code == 0, said.err
        return folder

    def test_policies_start_from_the_weights_of_an_earlier_stage(self, whole: Path) -> None:
        stages = read_stages(str(whole / "three.yaml"))
        start = start_of(stages[2], stages, whole / "run")
        kept_at = whole / "run" / "01-sft" / "checkpoints" / "00000002" / "policies"
        assert start.start_from == {name: kept_at / name for name in ("agent_0", "agent_1")}
        first = next(read_episodes(whole / "run" / "03-debate", 1))
        kept = load_file(start.start_from["agent_0"] / "adapter_model.safetensors")
        assert {turn.weights_hash for turn in first.by("agent_0")} == {weights_hash(kept)}

    def test_a_stage_that_is_missing_comes_out_the_same(self, whole: Path, kapelle: Kapelle) -> None:
        shutil.copytree(whole / "run", "run")
        shutil.rmtree("run/03-debate")
        assert kapelle("train", "--resume", "run").code == 0
        assert told(Path("run/03-debate")) == told(whole / "run" / "03-debate")

    @pytest.mark.long
    @pytest.mark.slow
    def test_a_stage_whose_last_weights_are_damaged_learns_them_again_first(
        self, whole: Path, kapelle: Kapelle
    ) -> None:
        shutil.copytree(whole / "run", "run")
        shutil.rmtree("run/03-debate")
        weights = Path("run/01-sft/checkpoints/00000002/train.safetensors")
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        said = kapelle("train", "--resume", "run")
        assert said.code == 0, said.err
        assert "skipped a checkpoint" in said.out
        assert "content of train.safetensors has changed" in said.out
        assert said.out.count("already done") == 1
        for name in ("01-sft", "03-debate"):
            assert told(Path("run") / name) == told(whole / "run" / name)

    @pytest.mark.long
    @pytest.mark.slow
    def test_a_stage_cut_off_before_its_first_checkpoint_starts_from_the_same_weights(
        self, tmp_path: Path, kapelle: Kapelle
    ) -> None:
        two = [RECIPE["stages"][0], {"name": "grpo", "algorithm": {"name": "grpo", "group_size": 2}}]
        (tmp_path / "two.yaml").write_text(yaml.safe_dump({**RECIPE, "stages": two}))
        assert kapelle("train", str(tmp_path / "two.yaml"), "--run-dir", "run").code == 0
        second = Path("run/02-grpo")
        before = told(second)
        shutil.rmtree(second / "checkpoints")
        shutil.rmtree(second / "episodes")
        (second / "latest").unlink()
        for name in ("metrics.jsonl", "evaluations.jsonl", "recorded.jsonl"):
            (second / name).write_bytes(b"")
        status = json.loads((second / "status.json").read_text())
        (second / "status.json").write_text(json.dumps({**status, "state": "interrupted", "step": 0}))
        assert kapelle("train", "--resume", "run").code == 0
        assert told(second) == before


def test_a_folder_of_stages_that_was_not_finished_being_made_is_begun_again(
    tmp_path: Path, recipe: str
) -> None:
    stages, run = read_stages(recipe), tmp_path / "run"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))  # room for who has the lock
    try:
        with pytest.raises(RunDirectoryError, match=r"Cannot write .*stages\.yaml") as refused:
            open_stages(run, stages, resume=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in run.iterdir()) == [".stages.yaml.partial", "lock"]
    open_stages(run, stages, resume=False)
    assert refused.tb is not None  # what failed is still in sight, and holds no lock all the same
    again = read_stages(str(run / "stages.yaml"))
    assert [s.recipe.config for s in again] == [s.recipe.config for s in stages]


def told(run: Path) -> list[dict[str, float]]:
    """Return the metrics of a run without times."""
    rows = read_metrics(run)
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


class TestGate:
    @pytest.mark.slow
    def test_a_debate_does_not_start_with_a_verifier_at_chance_level(
        self, tmp_path: Path, kapelle: Kapelle
    ) -> None:
        stages = json.loads(json.dumps(RECIPE["stages"]))
        del stages[2]["algorithm"]["least_auc"]
        file = tmp_path / "gated.yaml"
        file.write_text(yaml.safe_dump({**RECIPE, "stages": stages}))
        said = kapelle("train", str(file), "--run-dir", "run")
        assert said.code == 2
        row = read_evaluations(Path("run/02-judge"))[-1]["verifier"]
        assert isinstance(row, dict)
        assert f"AUC of only {row['auc_within']:.3f}" in said.err or "too few questions" in said.err
        assert f"to {row['questions']} held-out questions" in said.err
        assert "`algorithm.least_auc` requires an AUC of 0.7" in said.err
        assert not Path("run/03-debate").exists()
        again = kapelle("train", "--resume", "run", "stages.2.algorithm.least_auc=null")
        assert again.code == 0, again.err
        assert Path("run/03-debate/metrics.jsonl").is_file()


class TestStartingFrom:
    def test_weights_references_and_what_acts_are_those_of_the_folder(self, tmp_path: Path) -> None:
        first = Trainer(**sections(algorithm={"name": "sft"}))
        for _ in first.steps(1):
            pass
        first.save_policies(tmp_path)
        folders = {name: tmp_path / "policies" / name for name in first.team.trained}
        then = Trainer(**sections(algorithm={"name": "dpo"}), start_from=folders)
        for name in first.team.trained:
            learned = frozen_copy(first.engine.weights(name))
            assert same_bits(learned, frozen_copy(then.engine.weights(name)))
            assert same_bits(learned, frozen_copy(then.engine.weights(reference_name(name))))
        group = next(then.steps(1)).groups[0]
        assert group.episodes[0].turns[0].weights_hash == weights_hash(learned_of(first, "agent_0"))


def learned_of(trainer: Trainer, name: str) -> dict[str, Any]:
    return frozen_copy(trainer.engine.weights(name))
