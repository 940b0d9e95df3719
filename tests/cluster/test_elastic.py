"""Machines join and leave the cluster of a run: rollout workers with them, and the run is the same to the bit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
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
algorithm: {name: grpo, group_size: 2}
team: {agents: 2, lora: {rank: 2}, sampling: {max_tokens: 16}}
training: {steps: 4, tasks_per_step: 4}
optimizer: {lr: 0.01, eps: 0.0001}
checkpoint: {every: 1, keep: 999}
evaluation: {before_and_after: false}
ray: {rollout_workers: 2, trainer: {cpus: 1}, rollout: {cpus: 1}}
"""
ROOT = Path(__file__).parents[2]
ENVIRON = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
LONGEST = 400
"""Seconds that anything may take at most, on a busy machine."""
JOINED = "a worker has joined; of 2 there are 2"
LEFT = "a worker that had joined has left"


class Machines:
    """A cluster of Ray whose machines are processes here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes = folder, list[subprocess.Popen[bytes]]()
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{held.getsockname()[1]}"

    def start(self, cores: int) -> subprocess.Popen[bytes]:
        """Start a machine with so many cores; the first one leads the cluster."""
        own = ["--head", f"--port={self.address.rpartition(':')[2]}", f"--temp-dir={self.folder}"]
        own = [*own, "--include-dashboard=false"] if not self.nodes else [f"--address={self.address}"]
        words = [f"--num-cpus={cores}", f"--object-store-memory={80 << 20}", "--node-ip-address=127.0.0.1"]
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
        self.nodes.append(
            subprocess.Popen(
                [*command, *own, *words],
                env=ENVIRON,
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        return self.nodes[-1]

    def until_up(self) -> None:
        host, _, port = self.address.rpartition(":")
        until = time.monotonic() + LONGEST
        while time.monotonic() < until:
            try:
                socket.create_connection((host, int(port)), 1).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise AssertionError("Ray has not started")


def end(node: subprocess.Popen[bytes]) -> None:
    """Let a machine vanish with all that runs on it."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text().rpartition(")")[2].split()[3])
            if session == node.pid:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        except OSError:
            continue
    node.wait()


@pytest.fixture
def machines() -> Iterator[Machines]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kr-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = Machines(Path(folder))
        try:
            yield made
        finally:
            for node in made.nodes:
                end(node)


def started(run: Path, *words: str) -> subprocess.Popen[str]:
    recipe = run.with_suffix(".yaml")
    recipe.write_text(RECIPE)
    command = [
        sys.executable,
        "-m",
        "kapelle",
        "train",
        str(recipe),
        "--run-dir",
        str(run),
        "--launch",
        "ray",
    ]
    with run.with_suffix(".err").open("w") as said:
        return subprocess.Popen(
            [*command, *words],
            env=ENVIRON,
            stdout=subprocess.DEVNULL,
            stderr=said,
            text=True,
        )


def said_by(run: Path) -> str:
    return run.with_suffix(".err").read_text()


def until_said(process: subprocess.Popen[str], run: Path, what: str) -> None:
    until = time.monotonic() + LONGEST
    while what not in said_by(run):
        assert process.poll() is None, said_by(run)
        assert time.monotonic() < until, said_by(run)
        time.sleep(0.1)


def rows(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in lines]


def weights(run: Path, step: int) -> Any:
    return checkpoint.load(run / "checkpoints" / f"{step:08}")["train"]


def test_a_machine_that_joins_and_leaves_changes_nothing(machines: Machines, tmp_path: Path) -> None:
    machines.start(cores=2)  # room for the trainer and one worker
    machines.until_up()
    run = tmp_path / "run"
    words = f"ray.address={machines.address}", "ray.least_rollout_workers=1"
    process = started(run, *words, "training.steps=500")
    try:
        while not (run / "checkpoints" / "00000001").exists():
            assert process.poll() is None, said_by(run)
            time.sleep(0.1)
        assert JOINED not in said_by(run)
        node = machines.start(cores=1)
        until_said(process, run, JOINED)
        joined = len(rows(run))
        while len(rows(run)) < joined + 2:
            assert process.poll() is None, said_by(run)
            time.sleep(0.1)
        end(node)
        until_said(process, run, LEFT)
        left = len(rows(run))
        while len(rows(run)) < left + 2:
            assert process.poll() is None, said_by(run)
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONGEST) == 143, said_by(run)
    finally:
        process.kill()
    steps = len(rows(run))
    last = checkpoint.list_checkpoints(run / "checkpoints")[-1]
    assert last.name == f"{steps:08}"

    # The same steps with both workers there all the time, on a Ray of its own.
    undisturbed = tmp_path / "undisturbed"
    own = "ray.trainer.cpus=0.1", "ray.rollout.cpus=0.1", f"training.steps={steps}"
    assert started(undisturbed, *own).wait(LONGEST) == 0, said_by(undisturbed)
    assert rows(run) == rows(undisturbed)
    assert same_bits(weights(run, steps), weights(undisturbed, steps))
