"""What `training.asynchronous` saves in two ranks where some episodes take long; and what older weights cost.

    python -m benchmarks.asynchronous                     # minutes, on four idle cores
    python -m benchmarks.asynchronous --steps 2           # a short run
    python -m benchmarks.asynchronous --learning          # success of the demo at max_staleness 0 to 4 (hours)

Teams of two act in episode states whose number of rounds is lognormal, with the 1M model and GRPO. Each rank and each sampling process
has one thread, so wall times need four idle cores. CPU-seconds are those of the process that computed longest, counted separately for
ranks and for their sampling processes. A machine with a core for each process needs at least the larger of the two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from benchmarks.measure import single_thread
from benchmarks.subjects import DrawnTasks, seed_of
from kapelle.types import Split, Task

STEPS, FIRST, RANKS = 8, 3, 2
"""Measured steps; steps before them, in which sampling processes start; training processes."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {"max_staleness": 0},
    "ahead, in one process": {"max_staleness": 2},
    "asynchronous": {"max_staleness": 2, "asynchronous": True},
}


class LongWorlds(DrawnTasks):
    """Episode states of a lognormal number of rounds, in which both agents write at the same time."""

    name: Literal["benchmarks.asynchronous:LongWorlds"] = "benchmarks.asynchronous:LongWorlds"
    rounds: float = 4.0
    """Mean."""
    tail: float = 1.0
    """Standard deviation of the logarithm."""

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index, which determines the number of rounds."""
        drawn = random.Random(seed_of(split, index)).gauss(0.0, 1.0)
        rounds = max(1, min(40, round(self.rounds * math.exp(self.tail * drawn - self.tail**2 / 2))))
        return Task(f"{split}-{index}", f"{index % 10_000}?", data={"rounds": rounds})


def run(steps: int = STEPS) -> dict[str, Any]:
    """Return seconds per hundred episodes and the mean staleness in steps, by setting."""
    found: dict[str, Any] = {}
    for name, training in SETTINGS.items():
        ranks = _train(training, steps)
        episodes = ranks[0]["episodes"]
        found[name] = {
            f"{part}_s": 100 * max(rank[part] for rank in ranks) / episodes
            for part in ("wall", "trainer_cpu", "sampling_cpu")
        } | {"staleness": ranks[0]["staleness"]}
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    plain = found["synchronous"]["wall_s"]
    return {name: {**each, "gain": plain / each["wall_s"]} for name, each in found.items()}


def _train(training: Mapping[str, Any], steps: int) -> list[dict[str, float]]:
    """Train in two ranks and return what each measured."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    started = []
    for rank in range(RANKS):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
        own = {**os.environ, **{name: str(value) for name, value in place.items()}}
        own |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        command = ["-m", "benchmarks.asynchronous", "--steps", str(steps), "--rank", json.dumps(training)]
        started.append(
            subprocess.Popen([sys.executable, *command], env=own, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own interpreter and module
        )
    said = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started), said
    return [json.loads(each.splitlines()[-1]) for each in said]


def be_rank(training: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Train as one of the ranks, and return the seconds of the measured steps."""
    from kapelle import Trainer
    from kapelle.features.ahead.process import SamplingProcess

    single_thread()
    with Trainer(
        model={"embedded": {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 384}},
        team={"agents": 2, "sampling": {"max_tokens": 24}},
        environment=LongWorlds(),
        workflow={"name": "play"},
        algorithm={"name": "grpo", "group_size": 4, "loss": {"importance_cap": 2.0}},
        # The last steps start no later groups, so training ends before them.
        training={"steps": FIRST + steps + 2, "tasks_per_step": 16, **training},
        evaluation={"before_and_after": False},
    ) as trainer:
        iterator = trainer.steps()
        for _ in range(FIRST):
            next(iterator)
        sampler = trainer.loop.rollouts.players[-1]
        process = sampler.process if isinstance(sampler, SamplingProcess) else None
        wall, trained, sampled = time.perf_counter(), time.process_time(), _seconds(process)
        measured = [next(iterator) for _ in range(steps)]
        return {
            "wall": time.perf_counter() - wall,
            "trainer_cpu": time.process_time() - trained,
            "sampling_cpu": _seconds(process) - sampled,
            "episodes": sum(len(group.episodes) for step in measured for group in step.groups),
            "staleness": statistics.mean(step.metrics.get("staleness", 0.0) for step in measured),
        }


def _seconds(process: subprocess.Popen[bytes] | None) -> float:
    """Return the CPU-seconds of a process so far."""
    if process is None:
        return 0.0
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def learning(seeds: int = 5, steps: int = 60) -> dict[str, Any]:
    """Return the success of the demo with four layers on unseen problems after training, by `max_staleness`, for every seed."""
    from kapelle import Trainer

    single_thread()
    found: dict[str, list[float]] = {}
    for staleness in range(5):
        for seed in range(seeds):
            settings = (
                "model.embedded.layers=4",
                "algorithm.loss.importance_cap=2.0",
                "evaluation.before_and_after=false",
                f"training.steps={steps}",
                f"training.max_staleness={staleness}",
                f"seed={seed}",
            )
            with Trainer.from_recipe("demo", *settings) as trainer:
                trainer.train()
                found.setdefault(str(staleness), []).append(trainer.evaluate(500).success or 0.0)
            print(staleness, seed, found[str(staleness)][-1], file=sys.stderr, flush=True)
    return {key: {"mean": statistics.mean(values), "seeds": values} for key, values in found.items()}


def main() -> None:
    """Print the results as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"measured steps ({STEPS})")
    parser.add_argument("--learning", action="store_true", help="train the demo with older weights")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        print(json.dumps(be_rank(json.loads(asked.rank), asked.steps)))
    else:
        print(json.dumps(learning() if asked.learning else run(asked.steps), indent=2))


if __name__ == "__main__":
    main()
