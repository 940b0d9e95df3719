"""Kill each kind of process of a run on Ray at each moment: the run continues, or ends with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.test_asynchronous import check_run
from tests.support.kills import MOMENTS, marked
from tests.support.tiny import same_bits

from kapelle import Trainer
from kapelle.runs import checkpoint
from kapelle.runs.reader import read_metrics
from kapelle.setup.recipe import resolve

RECIPE = """
model: {embedded: {hidden: 16, layers: 1, heads: 2, kv_heads: 1, intermediate: 32}}
environment: {name: "tests.support.kills:Killed"}
workflow: {name: debate}
algorithm: {name: grpo, group_size: 2}
team: {agents: 2, lora: {rank: 2}, sampling: {max_tokens: 3}}
training: {steps: 4, tasks_per_step: 4}
optimizer: {lr: 0.01, eps: 0.0001}
checkpoint: {every: 1, keep: 9}
evaluation: {before_and_after: false}
ray: {trainer: {cpus: 0.1}, rollout: {cpus: 0.1}, rollout_workers: 2}
"""
ROOT = Path(__file__).parents[2]
LONGEST = 300
"""Most seconds of a run on a busy machine."""
HELD = "import os, sys; os.environ['KAPELLE_GUARD'] = str(os.getpid()); from kapelle.cli import main; raise SystemExit(main())"


def run(folder: Path, *words: str, kill: tuple[str, str] | None = None) -> tuple[int, str]:
    """Train until the run ends, check that nothing of it remains, and return its exit code and stderr."""
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(RECIPE)
    mark = f"{folder}-{time.monotonic_ns()}"
    environ = {**os.environ, "KAPELLE_TEST": mark, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    if kill is not None:
        environ["KAPELLE_KILL"] = ",".join([*kill, str(folder.with_suffix(".killed"))])
    named = (
        ["--resume", str(folder)]
        if (folder / "config.yaml").exists()
        else [str(recipe), "--run-dir", str(folder)]
    )
    with subprocess.Popen(
        [sys.executable, "-c", HELD, "train", *named, "--launch", "ray", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environ,
        text=True,
        start_new_session=True,
    ) as one:
        try:
            _, answer = one.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            one.kill()
            raise
    until = time.monotonic() + 60
    while left := marked(mark):
        assert time.monotonic() < until, f"left behind: {left}"
        time.sleep(0.1)
    return one.returncode, answer


def end_of(folder: Path) -> Any:
    found = checkpoint.list_checkpoints(folder / "checkpoints")[-1]
    assert found.name == "00000004"
    rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(folder)]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    return checkpoint.load(found)["train"], rows


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run(folder)[0] == 0
    return end_of(folder)


def check_same(folder: Path, undisturbed: Any) -> None:
    weights, rows = end_of(folder)
    assert same_bits(weights, undisturbed[0])
    assert rows == undisturbed[1]


@pytest.mark.ranks
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rollout_worker_is_replaced(moment: str, tmp_path: Path, undisturbed: Any) -> None:
    code, answer = run(tmp_path / "run", kill=(moment, "worker"))
    assert code == 0, answer
    assert (tmp_path / "run.killed").exists()
    check_same(tmp_path / "run", undisturbed)


@pytest.mark.ranks
def test_a_worker_that_rolls_out_without_interruption_is_replaced(tmp_path: Path) -> None:
    words = "training.max_staleness=2", "training.asynchronous=true", "team.sampling.max_tokens=120"
    code, answer = run(tmp_path / "run", *words, kill=("rollout", "worker"))
    assert code == 0, answer
    assert (tmp_path / "run.killed").exists()
    check_run(tmp_path / "run")


@pytest.mark.ranks
@pytest.mark.parametrize("victim", ["world", "world host"])
def test_an_environment_worker_is_replaced(victim: str, tmp_path: Path, undisturbed: Any) -> None:
    words = "episode.environment_workers=1", "ray.environment.cpus=0.1"
    code, answer = run(tmp_path / "run", *words, kill=("rollout", victim))
    assert code == 0, answer
    assert (tmp_path / "run.killed").exists()
    check_same(tmp_path / "run", undisturbed)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a verifier that was trained for a step on the recipe's team."""
    place = tmp_path_factory.mktemp("judge")
    debate = {"name": "debate", "rounds": 1, "score_rounds": True}
    changes = {"algorithm": {"name": "verifier", "group_size": 2}, "workflow": debate}
    team = {"agents": 2, "sharing": "frozen", "sampling": {"max_tokens": 3}}
    settings = {**yaml.safe_load(RECIPE), **changes, "team": team}
    with Trainer(**{name: each for name, each in settings.items() if name != "ray"}) as trainer:
        trainer.train(1)
        trainer.save_policies(place)
    return str(place / "verifier")


def rewarded_counts(judge: str, scorers: int) -> tuple[str, ...]:
    pays = f"reward_model.path={judge}", "reward_model.device=cpu"
    return *pays, "ray.rollout_workers=1", f"ray.scoring_workers={scorers}", "ray.scoring.cpus=0.1"


@pytest.mark.ranks
def test_a_scoring_worker_scores_as_the_rank_does_and_is_replaced(judge: str, tmp_path: Path) -> None:
    code, answer = run(tmp_path / "here", *rewarded_counts(judge, 0))
    assert code == 0, answer
    code, answer = run(tmp_path / "run", *rewarded_counts(judge, 1), kill=("score", "scorer"))
    assert code == 0, answer
    assert (tmp_path / "run.killed").exists()
    check_same(tmp_path / "run", end_of(tmp_path / "here"))


ENDS = {
    "rank": "Rank 0 was killed by signal 9",
    "host": "The actor of rank 0 died",
    "driver": "The driver, which uses Ray, was killed by signal 9",
    "gcs": "Ray's control service has ended",
    "raylet": "",
    "guard": "",
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        *(("rank", moment) for moment in MOMENTS),
        ("host", "update"),
        ("driver", "rollout"),
        ("guard", "update"),
        ("gcs", "rollout"),
        ("raylet", "save"),
    ],
)
def test_any_other_dead_actor_ends_the_run_and_a_resume_continues(
    victim: str, moment: str, tmp_path: Path, undisturbed: Any
) -> None:
    folder = tmp_path / "run"
    code, answer = run(folder, kill=(moment, victim))
    assert (folder.with_suffix(".killed")).exists()
    assert code == (-9 if victim == "guard" else 2), answer
    assert ENDS[victim] in answer
    assert "Traceback" not in answer
    assert run(folder)[0] == 0
    check_same(folder, undisturbed)


@pytest.mark.long
@pytest.mark.slow
def test_a_run_with_ray_is_bitwise_one_without(tmp_path: Path) -> None:
    one = tmp_path / "one"
    words = "episode.environment_workers=1", "ray.environment.cpus=0.1", "ray.rollout_workers=1"
    code, answer = run(one, *words)
    assert code == 0, answer
    alone = resolve(yaml.safe_load((one / "config.yaml").read_text()))
    with Trainer(alone, run_dir=tmp_path / "alone") as trainer:
        trainer.train()
    check_same(one, end_of(tmp_path / "alone"))
