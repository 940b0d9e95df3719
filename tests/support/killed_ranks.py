"""Runs of several processes of which one, or all at once, are killed at a place or after a time; then they continue."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from tests.support.killed_runs import Death, arm, preloaded
from tests.support.ranks import environment, free_port

DEADLINE = 150.0
"""Seconds after which a process that should have ended hangs; the longest wait of a rank for a lost one is 30."""

RECIPE = """
name: killed
seed: 3
model: {path: embedded, embedded: {hidden: 16, layers: 1, heads: 2, kv_heads: 1, intermediate: 32}}
team:
  agents: 2
  lora: {rank: 2, alpha: 4.0}
  critic_lora: {rank: 2, alpha: 4.0}
  sampling: {max_tokens: 4}
environment: {name: "tests.support.plugins:Digest", tasks: 5}
workflow: {name: debate}
algorithm: {name: ippo, group_size: 2, minibatches: 2, reference_every: 2, gae: {kl_in_reward: 0.05}}
optimizer: {lr: 1.0e-3, eps: 1.0e-4}
training: {steps: 4, tasks_per_step: 3}
evaluation: {problems: 2, every: 2, problems_while_training: 2}
checkpoint: {every: 1, keep: 2}
"""
WHOLE = {
    "team": {
        "agents": 2,
        "sharing": "shared",
        "sampling": {"max_tokens": 4},
        "critic_lora": {"rank": 2, "alpha": 4.0},
    },
    "algorithm": {"name": "ippo", "group_size": 2, "minibatches": 2},
}
"""In place of adapters all weights learn, so that `fsdp` shares them out."""

WHERE = (
    "in a rollout",
    "in an update",
    "in an evaluation",
    "between updates",
    "in a meeting",
    "in a sum",
    "after a step, nothing recorded",
    "save begun",
    "folder made",
    "before a share",
    "share written",
    "policies saved",
    "files listed",
    "before the seal",
    "sealed, not renamed",
    "in a meeting aside",
    "renamed, not pointed at",
    "before pruning",
    "in the middle of pruning",
)
"""Places of a run of several processes, of `killed_runs.arm`."""
AT_RESUME = ("reading a checkpoint", "rewound", "in a meeting", "before a share", "sealed, not renamed")
"""Places where a run that continues is killed again."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Who is killed, and when."""

    death: Death | None = None
    """Where; None for a time."""
    after: float = 0.0
    """Seconds after which, where no place is named."""
    rank: int | None = None
    """Which one; None for all at once, when the first of them comes to the place."""

    def __str__(self) -> str:
        who = "all ranks" if self.rank is None else f"rank {self.rank}"
        place = f"{self.death.place} ({self.death.times})" if self.death else f"after {self.after:.1f} s"
        return f"{who} {place}"


@dataclass(frozen=True, slots=True)
class Way:
    """How a run is trained."""

    engine: str = "ddp"
    background: bool = False
    steps: int = 4
    device: str | None = None

    def recipe(self, place: Path) -> Path:
        """Write the recipe of this way and return it."""
        tree = yaml.safe_load(RECIPE) | {"train_engine": {"name": self.engine, "timeout": 20}}
        tree["checkpoint"]["background"] = self.background
        tree["training"]["steps"] = self.steps
        tree["model"]["device"] = self.device
        if self.engine == "fsdp":
            tree |= WHOLE
        place.mkdir(parents=True, exist_ok=True)
        file = place / f"{self.engine}-{self.background}.yaml"
        file.write_text(yaml.safe_dump(tree), "utf-8")
        return file


def train(way: Way, run: Path, ranks: int, kill: Kill | None = None) -> list[int | None]:
    """Begin a run, or continue with it, in so many processes; return their exit codes, None for one that hung.

    What they print goes to files beside the run.
    """
    words = (
        ["--resume", str(run)]
        if (run / "config.yaml").exists()
        else [str(way.recipe(run.parent / "recipes")), "--run-dir", str(run)]
    )
    pids = run.parent / f"{run.name}.pids"
    pids.mkdir(exist_ok=True)
    for old in pids.iterdir():
        old.unlink()
    port, saved = free_port(), any(run.glob("checkpoints/[0-9]*"))
    started = []
    for rank in range(ranks):
        given = ("train", *words, "--no-rich")
        log = run.parent / f"{run.name}.{rank}.log"
        # Whatever has asked for CUDA devices leaves forks that cannot use them.
        way_to_start = preloaded() if way.device is None else multiprocessing.get_context("spawn")
        process = way_to_start.Process(target=_train, args=(rank, ranks, port, saved, given, log, pids, kill))
        process.start()
        started.append(process)
    if kill is not None and kill.death is None:
        chosen = [each.pid for rank, each in enumerate(started) if each.pid and kill.rank in (rank, None)]
        threading.Timer(kill.after, _kill, [chosen]).start()
    until = time.monotonic() + DEADLINE
    codes: list[int | None] = []
    for process in started:
        process.join(max(0.0, until - time.monotonic()))
        codes.append(process.exitcode)
        process.kill()
    return codes


def said(run: Path) -> str:
    """Return what the processes printed last."""
    return "".join(
        file.read_text("utf-8", "replace") for file in sorted(run.parent.glob(f"{run.name}.*.log"))
    )


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _train(
    rank: int,
    ranks: int,
    port: int,
    saved: bool,
    words: Sequence[str],
    log: Path,
    pids: Path,
    kill: Kill | None,
) -> None:
    streams = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(streams, stream)
    if ranks > 1:
        os.environ.update(environment(rank, ranks, port))
    (pids / str(rank)).write_text(str(os.getpid()))
    torch.set_num_threads(1)  # makes torch's threads again after the fork; two threads at once would fail to
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(int(saved))  # only a checkpoint brings back the generators of a run that no one killed
    if kill is not None and kill.death is not None and kill.rank in (rank, None):
        arm(kill.death, None if kill.rank is not None else lambda: list(_others(pids)))
    from kapelle.cli import main

    code = main(list(words))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _others(pids: Path) -> Iterator[int]:
    for file in pids.iterdir():
        if (text := file.read_text()) and int(text) != os.getpid():
            yield int(text)
