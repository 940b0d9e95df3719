"""What a resumed run may say otherwise: each such setting changes no result, or is said and kept."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.observers import Reported
from tests.support.resumed import trained
from tests.support.tiny import same_bits, sections

import kapelle
from kapelle.errors import RunDirectoryError
from kapelle.runs import checkpoint
from kapelle.runs.reader import read_metrics, read_provenance
from kapelle.settings.base import FREE, FROM_HERE_ON, MayChange, Settings
from kapelle.setup.recipe import load_recipe, resolve, to_yaml
from kapelle.training.provenance import changeable, changed_settings
from kapelle.training.trainer import Trainer

STEPS = 4

OTHERWISE: dict[str, Any] = {
    "description": "in other words",
    "training.steps": 3,
    "training.epochs": 0.75,  # three steps of two of eight tasks
    "training.overlap": True,
    "training.max_failed_share": 0.9,
    "training.parity_tolerance": 1.0,
    "training.non_finite": "skip",
    "environment.timeout": 77.0,
    "episode.timeout": 777.0,
    "episode.environment_workers": 2,
    "engine.timeout": 77.0,
    "grader.timeout": 77.0,
    "record": {"credit_episodes": 0},
    "episodes": {"keep": 1, "keep_evaluations": 1},
    "evaluation": {"every": 1, "problems": 5, "problems_while_training": 3, "greedy": False},
    "checkpoint": {"every": 1, "keep": 1, "best": "success", "best_is": "lowest"},
    "trackers": [{"name": "tensorboard"}],
}
"""Another value of each setting of a run that no result depends on."""

ELSEWHERE = {
    # Where it is looked for in the environment; the key itself decides nothing.
    ("EndpointConfig", "api_key_env"),
    ("JudgeEndpoint", "api_key_env"),
    ("Search", "key_env"),
    ("RewardServer", "token_env"),
    # Where programs call: which programs do is not the port's.
    ("External", "port"),
    ("External", "host"),
    ("External", "address"),
    ("External", "tls_cert"),
    ("External", "tls_key"),
    # When a program that is gone is given up.
    ("External", "absence"),
    # When a program is given up, and how many run at a time.
    ("Code", "cpu_s"),
    ("Code", "wall_s"),
    ("Code", "memory_mb"),
    ("Code", "output_mb"),
    ("Code", "parallel"),
    ("Python", "call_s"),
    ("Python", "cpu_s"),
    ("Python", "memory_mb"),
    ("TaskFolders", "call_s"),
    ("Mcp", "call_s"),
    ("Mcp", "key_env"),
    ("Mcp", "headers_env"),
    # How long and how often a server is asked.
    ("RewardServer", "attempt_s"),
    ("RewardServer", "retries"),
    ("OpenEnv", "attempt_s"),
    ("OpenEnv", "sessions"),
    # Where verdicts are kept, how many may be bought, and how many are asked for at once.
    ("JudgeLimits", "cache"),
    ("JudgeLimits", "budget"),
    ("JudgeLimits", "concurrency"),
    # Where the same worlds are served, and how one gets in.
    ("Remote", "address"),
    ("Remote", "certificate"),
    ("Remote", "token_env"),
    ("OpenEnv", "token_env"),
    ("Remote", "retry_seconds"),
}
"""Settings of plug-ins that no result depends on but by giving up what takes too much."""


def settings(key: str = "", value: Any = None, **over: Any) -> dict[str, Any]:
    base = sections(
        environment={"name": "tests.support.plugins:Digest", "tasks": 8},
        training={"steps": STEPS, "tasks_per_step": 2},
        evaluation={"problems": 3, "before_and_after": False},
        checkpoint={"every": 2, "keep": 9},
    )
    found = {**base, **over}
    section, _, name = key.partition(".")
    if name:
        before = found.get(section, {"name": "local"} if section == "engine" else {})
        return {**found, section: {**before, name: value}}
    return {**found, section: value} if section else found


def last(run: Path) -> Any:
    folder = checkpoint.list_checkpoints(run / "checkpoints")[-1]
    assert folder.name == f"{STEPS:08d}"
    return checkpoint.load(folder)["train"]


def rows(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(settings(), tmp_path_factory.mktemp("undisturbed") / "run")


def fields(mark: MayChange) -> Iterator[tuple[str, str]]:
    root = Path(next(iter(kapelle.__path__)))
    for file in sorted(root.rglob("*.py")):
        if "from kapelle.settings.base import" in file.read_text("utf-8"):
            importlib.import_module(".".join(("kapelle", *file.relative_to(root).with_suffix("").parts)))
    waiting, seen = [Settings], set[type[Settings]]()
    while waiting:
        kind = waiting.pop()
        waiting += [each for each in kind.__subclasses__() if each not in seen]
        seen.update(kind.__subclasses__())
        if kind.__module__.startswith("kapelle."):
            yield from (
                (kind.__name__, name)
                for name in kind.__annotations__.keys() & kind.model_fields.keys()
                if mark in kind.model_fields[name].metadata
            )


def test_no_setting_is_free_without_a_test_or_a_reason() -> None:
    config = resolve({**settings(), "model": settings()["model"]})
    assert {key for key, mark in changeable(config) if mark is FREE} == OTHERWISE.keys()
    of_runs = {("RunConfig", key) for key in OTHERWISE if "." not in key}
    homes = {"training": "TrainingConfig", "episode": "EpisodeConfig", "grader": "GraderConfig"}
    split = [key.split(".") for key in OTHERWISE if "." in key]
    of_runs |= {(homes.get(section, "Timed"), name) for section, name in split}
    # Each environment and engine that a run has met carries what `Timed` declares.
    found = {
        (kind if name != "timeout" or kind in homes.values() else "Timed", name)
        for kind, name in fields(FREE)
    }
    assert found == of_runs | ELSEWHERE


@pytest.mark.sample(6)
@pytest.mark.slow
@pytest.mark.parametrize("key", OTHERWISE)
def test_a_setting_that_is_free_changes_no_result(key: str, undisturbed: Path, tmp_path: Path) -> None:
    run, heard = tmp_path / "run", Reported("resume")
    if key == "trackers":
        pytest.importorskip("tensorboard")
    with Trainer(resolve(settings(key, OTHERWISE[key])), run_dir=run) as trainer:
        trainer.train(2)
    with Trainer(**settings(), run_dir=run, resume=True, observer=heard) as trainer:
        assert trainer.done == 2
        trainer.train()
    assert heard.said == []
    assert same_bits(last(run), last(undisturbed))
    assert rows(run) == rows(undisturbed)


def test_a_rate_may_be_lowered_from_here_on_which_is_said_and_kept(undisturbed: Path, tmp_path: Path) -> None:
    run, heard = tmp_path / "run", Reported("resume")
    with Trainer(**settings(), run_dir=run, origin={"optimizer.lr": "mine.yaml"}) as trainer:
        trainer.train(2)
    lower = settings(optimizer={"lr": 1e-3})
    given = {"optimizer.lr": "command line"}
    with Trainer(**lower, run_dir=run, resume=True, observer=heard, origin=given) as trainer:
        trainer.train()
    assert heard.said == ["optimizer.lr was 0.01 and is 0.001 from step 2 on"]
    assert read_provenance(run)["optimizer.lr"] == "command line from step 2 on; 0.01 before"
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"] == 1e-3
    assert rows(run)[:2] == rows(undisturbed)[:2]
    assert [row["lr/agent_0"] for row in rows(run)] == [1e-2, 1e-2, 1e-3, 1e-3]
    assert not same_bits(last(run), last(undisturbed))


def test_what_the_run_is_may_not_change(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Trainer(**settings(), run_dir=run) as trainer:
        trainer.train(1)
    kept = (run / "config.yaml").read_bytes()
    with pytest.raises(RunDirectoryError, match="another config: seed was 0 and is 3"):
        Trainer(**settings(seed=3), run_dir=run, resume=True)
    assert (run / "config.yaml").read_bytes() == kept


def test_a_setting_that_is_new_since_the_run_began_stands_at_its_default(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Trainer(**settings(), run_dir=run) as trainer:
        trainer.train(1)
    older = yaml.safe_load((run / "config.yaml").read_text())
    del older["training"]["max_staleness"]
    (run / "config.yaml").write_text(yaml.safe_dump(older))
    with Trainer(**settings(), run_dir=run, resume=True) as trainer:
        assert trainer.done == 1
    older["training"]["max_staleness"] = 1
    assert changed_settings(yaml.safe_dump(older), to_yaml(trainer.config)) == [
        "training.max_staleness was 1 and is 0"
    ]


def test_a_section_is_not_taken_for_another_whose_name_begins_alike(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(
        "environment: {name: arithmetic}\nworkflow: {name: chain}\nalgorithm: {name: grpo}\n"
        "team: {agents: [{name: reasoner, prompt: a}, {name: actor, prompt: b}]}\n"
    )
    old = load_recipe(str(base)).yaml()
    for setting, words in (
        ("training.tasks_per_step=3", "training.tasks_per_step was 32 and is 3"),
        ("team.agents.1.prompt=x", "team.agents.1.prompt was 'b' and is 'x'"),
        ("optimizer.lr=1", "optimizer.lr was 1e-05 and is 1.0"),
    ):
        assert changed_settings(old, load_recipe(str(base), (), [setting]).yaml()) == [words]
    allowed = ["training.steps=99", "description=more", "trackers=[{name: wandb}]"]
    assert changed_settings(old, load_recipe(str(base), (), allowed).yaml()) == []
    assert ("OptimizerConfig", "lr") not in set(fields(FROM_HERE_ON))
    assert ("RunConfig", "optimizer") in set(fields(FROM_HERE_ON))
