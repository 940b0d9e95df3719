"""Steps that run ahead or are left unfinished, in two processes by one command: the same run, whoever plays it and dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import same_bits

from kapelle.runs import checkpoint

pytestmark = pytest.mark.ranks

RECIPE = """
model: {embedded: {hidden: 16, layers: 1, heads: 2, kv_heads: 1, intermediate: 32}}
environment: {name: "tests.support.plugins:Digest"}
workflow: {name: debate}
algorithm: {name: grpo, group_size: 2, loss: {importance_cap: 2.0}}
team: {agents: 2, lora: {rank: 2}, sampling: {max_tokens: 120, stop: [a, e, i, o, u]}}
training: {steps: 4, tasks_per_step: 4, max_staleness: 2}
optimizer: {lr: 0.01, eps: 0.0001}
checkpoint: {every: 1, keep: 9}
evaluation: {before_and_after: false}
"""
ROOT = Path(__file__).parents[2]
LONGEST = 240
"""Seconds that a run may take at most, on a busy machine."""
LEFT = "training.partial_rollouts=0.5"
OVERLAP = "training.overlap=true"


def train(folder: Path, *words: str, disturb: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Train in two processes, or continue with the run that is there; `disturb` gets the launcher's number meanwhile."""
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(RECIPE)
    first = ["--resume", str(folder)] if folder.exists() else [str(recipe), "--run-dir", str(folder)]
    words = "train", *first, "--launch", "torchrun", "--processes", "2", *words
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with subprocess.Popen(
        [sys.executable, "-m", "kapelle", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as one:
        if disturb is not None:
            disturb(one.pid)
        try:
            _, said = one.communicate(timeout=LONGEST)
        finally:
            one.kill()
    return one.returncode, said


def children(process: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == process:
            found.append(int(stat.parent.name))
    return sorted(found)


def after_step(run: Path, step: int, kill: Callable[[list[int]], int]) -> Callable[[int], None]:
    """Return what kills one process once a step is saved: the one that `kill` chooses of the launcher's ranks."""

    def disturb(launcher: int) -> None:
        until = time.monotonic() + LONGEST
        while not (run / "checkpoints" / f"{step:08}").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(kill(children(launcher)), signal.SIGKILL)

    return disturb


def end_of(run: Path) -> tuple[Any, list[dict[str, float]]]:
    last = checkpoint.list_checkpoints(run / "checkpoints")[-1]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in lines]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    return checkpoint.load(last)["train"], rows


def assert_same(run: Path, other: tuple[Any, list[dict[str, float]]]) -> None:
    weights, rows = end_of(run)
    assert rows == other[1]
    assert same_bits(weights, other[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, float]]]:
    """The run that leaves groups, in two processes that play for themselves, undisturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    code, said = train(run, LEFT)
    assert code == 0, said
    held = [checkpoint.load(each) for each in checkpoint.list_checkpoints(run / "checkpoints")]
    assert any(each["credit"]["ahead"].get("left") for each in held), (
        "something is left, or this asks nothing"
    )
    return end_of(run)


def test_sampling_ahead_in_other_processes_is_bitwise_identical(tmp_path: Path, whole: Any) -> None:
    code, said = train(tmp_path / "run", LEFT, OVERLAP)
    assert code == 0, said
    assert_same(tmp_path / "run", whole)


def test_a_sampling_process_that_is_killed_is_replaced(tmp_path: Path, whole: Any) -> None:
    run = tmp_path / "run"
    code, said = train(run, LEFT, OVERLAP, disturb=after_step(run, 1, lambda ranks: children(ranks[1])[-1]))
    assert code == 0, said
    assert "The sampling process has ended" in said
    assert_same(run, whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_which_can_be_resumed(rank: int, tmp_path: Path, whole: Any) -> None:
    run = tmp_path / "run"
    code, said = train(run, LEFT, OVERLAP, disturb=after_step(run, 2, lambda ranks: ranks[rank]))
    assert code == 2
    assert f"Rank {rank}" in said
    assert "was killed by signal 9" in said
    code, said = train(run)
    assert code == 0, said
    assert_same(run, whole)


def test_a_stopped_run_saves_and_can_be_resumed(tmp_path: Path, whole: Any) -> None:
    run = tmp_path / "run"

    def stop(launcher: int) -> None:
        until = time.monotonic() + LONGEST
        while not (run / "checkpoints" / "00000002").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(launcher, signal.SIGTERM)

    code, said = train(run, LEFT, OVERLAP, disturb=stop)
    assert code in {0, 143}, said  # it may have been over
    code, said = train(run)
    assert code == 0, said
    assert_same(run, whole)
