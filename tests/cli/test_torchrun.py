"""One command starts all processes of a run, stops them all, and ends as they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.ranks import environment, free_port

from kapelle.cli import main
from kapelle.cli.staged import find_stages, stage_sources
from kapelle.cli.torchrun import _exit_code
from kapelle.runs.reader import read_metrics
from kapelle.training import joining

RECIPE = """
model: {embedded: {hidden: 16, layers: 1, heads: 2, kv_heads: 1, intermediate: 32}}
environment: {name: "tests.support.plugins:Digest"}
workflow: {name: debate}
algorithm: {name: grpo, group_size: 2}
team: {agents: 2, lora: {rank: 2}, sampling: {max_tokens: 3}}
training: {steps: 4, tasks_per_step: 3}
optimizer: {lr: 0.01, eps: 0.0001}
checkpoint: {every: 1}
evaluation: {before_and_after: false}
"""
KAPELLE = [sys.executable, "-m", "kapelle"]


@dataclass(frozen=True)
class Failed:
    exitcode: int
    timestamp: int


def test_the_code_is_that_of_the_first_that_says_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code({1: Failed(-9, 1), 0: Failed(2, 2), 2: Failed(143, 3)}) == 2  # type: ignore[dict-item]
    assert capsys.readouterr().err == ""
    assert _exit_code({1: Failed(-9, 1), 0: Failed(-15, 2)}) == 137  # type: ignore[dict-item]
    assert capsys.readouterr().err == "kapelle: Rank 1 was killed by signal 9.\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--processes", "2"], "says how many processes `--launch` starts"),
        (["--launch", "torchrun", "--processes", "0"], "0 is less than 1"),
        (["--launch", "mpi"], "invalid choice"),
    ],
)
def test_what_cannot_be_launched(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", *words]) == 2
    assert reason in capsys.readouterr().err


def test_one_launcher_is_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in environment(0, 1, 29500).items():
        monkeypatch.setenv(name, value)
    assert main(["train", "demo", "--launch", "torchrun", "--processes", "2"]) == 2
    assert "a launcher has started this one already" in capsys.readouterr().err


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def started(words: list[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*KAPELLE, "train", *words],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.ranks
def test_two_processes_write_one_run(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    one = started([str(recipe), "--run-dir", str(run), "--launch", "torchrun", "--processes", "2", "--json"])
    out, said = one.communicate(timeout=300)
    assert (one.returncode, json.loads(out)["steps"]) == (0, 4), said
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    assert main(["train", "--resume", str(run), "training.steps=5", "--json"]) == 0


STAGES = """
stages:
  - {name: first, training: {steps: 1}}
  - {name: second, training: {steps: 2}}
"""


class Second:
    """Rank 1 of 2, where rank 0 opened a folder of stages and none of them is done."""

    rank, size = 1, 2

    def __init__(self, opened: Path) -> None:
        self.said: list[object] = [str(opened), False, False]

    def together(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        return [json.dumps(self.said.pop(0)).encode(), work()]


def test_other_ranks_find_the_folder_of_stages_that_the_first_one_opened(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe.write_text(RECIPE + STAGES)
    staged = find_stages([str(recipe)], None, resume=False, real=False)
    assert staged is not None
    ranks = Second(tmp_path / "opened")
    monkeypatch.setattr(joining, "join_ranks", lambda config: ranks)
    monkeypatch.chdir(tmp_path)
    _, source = next(stage_sources(staged, resume=False))
    assert source.run_dir == tmp_path / "opened" / "01-first"
    assert sorted(tmp_path.iterdir()) == [recipe]


@pytest.mark.ranks
def test_two_processes_train_stage_after_stage(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(RECIPE + STAGES)
    run = tmp_path / "run"
    words = ["--launch", "torchrun", "--processes", "2", "--json"]
    out, said = (one := started([str(recipe), "--run-dir", str(run), *words])).communicate(timeout=300)
    assert one.returncode == 0, said
    assert [json.loads(line)["steps"] for line in out.splitlines() if line[:1] == "{"] == [1, 2]
    out, said = (one := started(["--resume", str(run), *words])).communicate(timeout=300)
    assert (one.returncode, out.count("done before")) == (0, 2), said


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_stops_all(recipe: Path, tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    words = [
        str(recipe),
        "--run-dir",
        str(run),
        "training.steps=100000",
        "--launch",
        "torchrun",
        "--processes",
        "2",
    ]
    one = started(words)
    assert one.stdout is not None
    for line in one.stdout:
        if "step 3/" in line:
            break
    one.send_signal(number)
    out, said = one.communicate(timeout=300)
    assert one.returncode == 128 + number, said
    assert out.count("stopped; nothing is lost.") == 1


@pytest.mark.ranks
def test_ranks_with_other_settings_say_so_once(recipe: Path, tmp_path: Path) -> None:
    port = free_port()
    both = [
        started(
            [str(recipe), "--run-dir", str(tmp_path / "run"), f"seed={rank}"], **environment(rank, 2, port)
        )
        for rank in range(2)
    ]
    said = [one.communicate(timeout=300)[1] for one in both]
    assert [one.returncode for one in both] == [2, 2]
    assert "".join(said).count("`seed` is 1 there and 0 on rank 0") == 1
    assert not (tmp_path / "run").exists()
