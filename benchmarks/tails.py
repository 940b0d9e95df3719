"""What `overlap` and `partial_rollouts` gain in two ranks where some episodes take long, in CPU-seconds.

    python -m benchmarks.tails               # ten minutes

Teams of two play episode states whose number of rounds is lognormal, on the 1M model by GRPO. Each rank and each sampling process has one
thread. Times are CPU-seconds, so that a busy machine tells them too: of the ranks, and of the processes that sample for them, the
one that computed longest counts. They are what a machine with a core for each would take, without the waits at marks.
"""

from __future__ import annotations

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

from benchmarks.subjects import DrawnTasks, seed_of
from kapelle.types import Split, Task

STEPS, FIRST, RANKS = 10, 3, 2
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "as they come": {},
    "overlap": {"overlap": True},
    "partial_rollouts": {"partial_rollouts": 0.25},
    "both": {"overlap": True, "partial_rollouts": 0.25},
}


class LongWorlds(DrawnTasks):
    """Episode states of a lognormal number of rounds, in which both agents write at the same time."""

    name: Literal["benchmarks.tails:LongWorlds"] = "benchmarks.tails:LongWorlds"
    rounds: float = 4.0
    """Mean."""
    tail: float = 1.0
    """Standard deviation of the logarithm."""

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index; its world's rounds depend on that alone."""
        drawn = random.Random(seed_of(split, index)).gauss(0.0, 1.0)
        rounds = max(1, min(40, round(self.rounds * math.exp(self.tail * drawn - self.tail**2 / 2))))
        return Task(f"{split}-{index}", f"{index % 10_000}?", data={"rounds": rounds})


def run() -> dict[str, Any]:
    """Return CPU-seconds for each hundred episodes that are learned from, by setting."""
    found: dict[str, Any] = {}
    for name, training in SETTINGS.items():
        rows = _train(training)
        sampled = [max(ranks, key=lambda row: row["sampled"])["sampled"] for ranks in rows]
        rest = [max(ranks, key=lambda row: row["rest"])["rest"] for ranks in rows]
        ahead = bool(training.get("overlap"))
        steps = [max(s, r) if ahead else s + r for s, r in zip(sampled, rest, strict=True)]
        episodes = sum(ranks[0]["episodes"] for ranks in rows)
        found[name] = {
            "sampling": 100 * sum(sampled) / episodes,
            "learning": 100 * sum(rest) / episodes,
            "step": 100 * sum(steps) / episodes,
            "staleness": statistics.mean(ranks[0]["staleness"] for ranks in rows),
        }
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    plain = found["as they come"]["step"]
    return {name: {**each, "gain": plain / each["step"]} for name, each in found.items()}


def _train(training: Mapping[str, Any]) -> list[tuple[dict[str, float], ...]]:
    """Train in two ranks and return each step's rows, by rank."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    started = []
    for rank in range(RANKS):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
        own = {**os.environ, **{name: str(value) for name, value in place.items()}}
        own |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "benchmarks.tails", "--rank", json.dumps(training)],
                env=own,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started), said
    return list(zip(*(json.loads(each.splitlines()[-1])[FIRST:] for each in said), strict=True))


def rank(training: Mapping[str, Any]) -> None:
    """Be one of the ranks; print the steps' rows."""
    from benchmarks.measure import single_thread
    from kapelle import Trainer
    from kapelle.features.ahead.process import SamplingProcess
    from kapelle.features.ahead.queue import RolloutsAhead

    single_thread()
    playing = [0.0]
    played: Any = RolloutsAhead._here

    def counted(*given: Any) -> Any:
        began = time.process_time()
        try:
            return played(*given)
        finally:
            playing[0] += time.process_time() - began

    RolloutsAhead._here = counted  # type: ignore[method-assign, assignment]
    with Trainer(
        model={"embedded": {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 384}},
        team={"agents": 2, "sampling": {"max_tokens": 24}},
        environment=LongWorlds(),
        workflow={"name": "play"},
        algorithm={"name": "grpo", "group_size": 4, "loss": {"importance_cap": 2.0}},
        training={"steps": STEPS, "tasks_per_step": 16, "max_staleness": 2, **training},
        evaluation={"before_and_after": False},
    ) as trainer:
        sampler = trainer.loop.rollouts.players[-1]
        process = sampler.process if isinstance(sampler, SamplingProcess) else None
        rows, steps = [], trainer.steps()
        while True:
            began, before, elsewhere = time.process_time(), playing[0], _seconds(process)
            step = next(steps, None)
            if step is None:
                break
            own, here = time.process_time() - began, playing[0] - before
            rows.append(
                {
                    "sampled": here + _seconds(process) - elsewhere,
                    "rest": own - here,
                    "episodes": sum(len(group.episodes) for group in step.groups),
                    "staleness": step.metrics["staleness"],
                }
            )
    print(json.dumps(rows))


def _seconds(process: subprocess.Popen[bytes] | None) -> float:
    """Return the CPU-seconds of a process so far."""
    if process is None:
        return 0.0
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(json.loads(sys.argv[2]))
    else:
        print(json.dumps(run(), indent=2))
