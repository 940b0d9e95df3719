"""Sampling without interruption for two ranks, by one command: each group is trained on once, whichever process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kapelle.runs.reader import read_config, read_groups, read_metrics
from kapelle.setup.recipe import resolve
from kapelle.training.selection import training_tasks

RECIPE = """
model: {embedded: {hidden: 16, layers: 1, heads: 2, kv_heads: 1, intermediate: 32}}
environment: {name: "tests.support.plugins:Digest"}
workflow: {name: debate}
algorithm: {name: grpo, group_size: 2, loss: {importance_cap: 2.0}}
team: {agents: 2, lora: {rank: 2}, sampling: {max_tokens: 120, stop: [a, e, i, o, u]}}
training: {steps: 5, tasks_per_step: 5, max_staleness: 2, asynchronous: true}
optimizer: {lr: 0.01, eps: 0.0001}
checkpoint: {every: 1, keep: 9}
evaluation: {before_and_after: false}
"""
ROOT = Path(__file__).parents[2]
LONGEST = 240
"""Seconds that a run may take at most, on a busy machine."""


def check_run(run: Path) -> None:
    """Assert that a finished run trained once on each of its tasks, with no token older than `max_staleness`."""
    config = resolve(yaml.safe_load(read_config(run)))
    training, rows = config.training, read_metrics(run)
    assert [row["step"] for row in rows] == [*range(1, training.steps + 1)]
    assert max(row["staleness"] for row in rows) <= training.max_staleness
    assert max(row.get("parity/max", 0.0) for row in rows) <= 1e-4
    found = Counter(
        group.task.id for number in range(1, training.steps + 1) for group in read_groups(run, number)
    )
    tasks = [
        task.id
        for number in range(1, training.steps + 1)
        for task in training_tasks(config.environment, config, number)
    ]
    assert found == Counter(tasks)


def train(folder: Path, disturb: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Train in two processes, or continue the run that is there. The function `disturb` receives the launcher's process id."""
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(RECIPE)
    first = ["--resume", str(folder)] if folder.exists() else [str(recipe), "--run-dir", str(folder)]
    words = "train", *first, "--launch", "torchrun", "--processes", "2"
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
            _, output = one.communicate(timeout=LONGEST)
        finally:
            one.kill()
    return one.returncode, output


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


def after_step(run: Path, step: int, signal_to: Callable[[int], tuple[int, int]]) -> Callable[[int], None]:
    """Return a function that sends a signal when a step is saved. `signal_to` returns the process and the signal."""

    def disturb(launcher: int) -> None:
        until = time.monotonic() + LONGEST
        while not (run / "checkpoints" / f"{step:08}").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(*signal_to(launcher))

    return disturb


@pytest.mark.ranks
def test_a_sampling_process_that_is_killed_is_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output = train(
        run, after_step(run, 1, lambda launcher: (children(children(launcher)[1])[-1], signal.SIGKILL))
    )
    assert code == 0, output
    assert "The sampling process has ended" in output
    check_run(run)


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_which_can_be_resumed(rank: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output = train(run, after_step(run, 2, lambda launcher: (children(launcher)[rank], signal.SIGKILL)))
    assert code == 2
    assert f"Rank {rank}" in output
    assert "was killed by signal 9" in output
    code, output = train(run)
    assert code == 0, output
    check_run(run)


@pytest.mark.ranks
def test_a_stopped_run_saves_and_can_be_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output = train(run, after_step(run, 2, lambda launcher: (launcher, signal.SIGTERM)))
    assert code in {0, 143}, output  # it may have been over
    code, output = train(run)
    assert code == 0, output
    check_run(run)
