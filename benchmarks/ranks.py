"""A step of training in two processes against one, on one thread each, with ten million weights.

    python -m benchmarks.ranks               # needs two idle cores

Both train the same recipe to the same weights (docs/clusters.md). `speedup` is the time of a step in one process over that in
two, `parts` the same for its parts and for the CPU seconds of the busiest process; the bar is 1.7.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

STEPS, FIRST, ROUNDS = 4, 1, 3
PARTS = ("cpu", "time/step", "time/generate", "time/update", "time/score")
SETTINGS: dict[str, Any] = {
    "model": {"embedded": {"hidden": 320, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate": 880}},
    "environment": {"name": "arithmetic"},
    "workflow": {"name": "debate"},
    "algorithm": {"name": "grpo", "group_size": 4},
    "team": {"agents": 2, "sampling": {"max_tokens": 32}},
    "training": {"steps": STEPS, "tasks_per_step": 8},
    "evaluation": {"before_and_after": False},
}


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the median seconds of a step in one process and in two, in turns."""
    rows: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for number in range(rounds):
        for processes in (1, 2) if number % 2 == 0 else (2, 1):
            rows[processes] += _train(processes)
    medians = {
        n: {part: statistics.median(row[part] for row in own) for part in PARTS} for n, own in rows.items()
    }
    parts = {part: medians[1][part] / medians[2][part] for part in PARTS if medians[2][part]}
    return {
        "weights": rows[1][0]["weights"],
        "seconds": medians,
        "speedup": parts["time/step"],
        "parts": parts,
        "bar": 1.7,
    }


def _train(processes: int) -> list[dict[str, float]]:
    """Train in so many processes and return the first one's rows."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    started = []
    for rank in range(processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        variables = {name: str(value) for name, value in place.items()}
        own = {**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.ranks", "--rank"],
                env=own,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started), said
    every = [json.loads(each.splitlines()[-1])[FIRST:] for each in said]
    busiest = [max(rows, key=lambda row: row["cpu"])["cpu"] for rows in zip(*every, strict=True)]
    return [{**row, "cpu": cpu} for row, cpu in zip(every[0], busiest, strict=True)]


def rank() -> None:
    """Be one of the processes; print the steps' rows."""
    from kapelle import Trainer
    from kapelle.runtime.rank_group import leave_ranks

    with Trainer(**SETTINGS) as trainer:
        weights = sum(
            p.numel() for model in trainer.models.values() for p in model.base_parameters().values()
        )
        rows, begun = [], time.process_time()
        for step in trainer.steps():
            now = time.process_time()
            rows.append({**step.metrics, "weights": float(weights), "cpu": now - begun})
            begun = now
    leave_ranks()
    print(json.dumps(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    if chosen.rank:
        rank()
    else:
        print(json.dumps(run(chosen.rounds), indent=2))
