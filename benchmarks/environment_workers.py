"""Episode states in worker processes: thousands of episodes in flight, what they cost and hold, against episode states in this process.

    python -m benchmarks.environment_workers                              # 10,000 episodes over 8 workers
    python -m benchmarks.environment_workers --episodes 1000 --workers 2

Scripted agents play matrix games of four rounds, whose episode states cost almost nothing: what is measured is the way to them and
back. `round_trip_us` is the time of one move while so many episode states move at once, each waiting for its own answer; `memory_mb`
is what processes hold at most, and what they held before the first world.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import RemoteState
from kapelle.environments.matrix import Matrix
from kapelle.rollout.bounded_states import BoundedState, open_state
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.rollout.workers.pool import EnvironmentWorkers, HeldHere
from kapelle.runtime.deadlines import Patience
from kapelle.runtime.event_loop import run_async
from kapelle.team import Agent, Policy, Team
from kapelle.types import Group
from kapelle.workflows.play import PlayWorkflow

EPISODES, WORKERS, ROUNDS = 10_000, 8, 4
NAMES = ("ann", "ben")
AT_ONCE = (1, 16, 256, 4096)
"""Numbers of episode states that move at once."""
GAME = Matrix(game="prisoners_dilemma", rounds=ROUNDS, rules="none")


def run(episodes: int = EPISODES, workers: int = WORKERS) -> dict[str, Any]:
    """Measure round trips, whole episodes and memory with and without workers."""
    with EnvironmentWorkers(GAME, workers, Patience()) as pool:
        run_async(lambda: _moves(pool, workers, 1))  # starts them all
        before = _held(pool)
        alone, here_s = _played(None, episodes)
        between = _held(pool)
        there, there_s = _played(pool, episodes)
        assert there == alone, "the same episodes"
        after = _held(pool)
        trips = {
            str(count): {
                "here": _quantiles(run_async(lambda n=count: _moves(None, n))),  # type: ignore[misc]
                "workers": _quantiles(run_async(lambda n=count: _moves(pool, n))),  # type: ignore[misc]
            }
            for count in AT_ONCE
        }
    return {
        "episodes": episodes,
        "workers": workers,
        "moves": episodes * ROUNDS,
        "seconds": {"here": here_s, "workers": there_s},
        "added_us_per_move": 1e6 * (there_s - here_s) / (episodes * ROUNDS),
        "round_trip_us": trips,
        "memory_mb": {"before": before, "after_worlds_here": between, "after_worlds_there": after},
    }


def _played(pool: EnvironmentWorkers | None, episodes: int) -> tuple[list[Group], float]:
    team = Team(
        tuple(map(Agent, NAMES)),
        {name: Policy(name, trained=False) for name in NAMES},
        {name: name for name in NAMES},
    )
    engine = ScriptedEngine(dict.fromkeys(NAMES, lambda request: "AB"[request.seed % 2]))
    setup = RolloutSetup(team, GAME, PlayWorkflow(), engine, workers=pool)
    tasks = [GAME.task("train", index) for index in range(episodes // 4)]
    began = time.perf_counter()
    groups = run_async(lambda: rollout(setup, tasks, 4, 0, max_concurrent=episodes))
    seconds = time.perf_counter() - began
    assert not any(episode.error for group in groups for episode in group.episodes)
    return groups, seconds


async def _moves(pool: EnvironmentWorkers | None, count: int, rounds: int = ROUNDS) -> list[float]:
    """Return the seconds of every move of so many episode states that move at once."""
    opened = open_state if pool is None else pool.open_state
    task = GAME.task("train", 0)
    worlds = await asyncio.gather(*(opened(GAME, task, NAMES, seed, Patience()) for seed in range(count)))
    seconds: list[float] = []

    async def play(world: BoundedState | RemoteState) -> None:
        for _ in range(rounds):
            began = time.perf_counter()
            await world.step(dict.fromkeys(NAMES, "A"))
            seconds.append(time.perf_counter() - began)
        await world.close()

    for _ in range(max(1, 64 // count)):
        await asyncio.gather(*map(play, worlds))
        worlds = await asyncio.gather(*(opened(GAME, task, NAMES, k, Patience()) for k in range(count)))
    await asyncio.gather(*(world.close() for world in worlds))
    return seconds


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    parts = statistics.quantiles(seconds, n=100)
    return {"p50": 1e6 * parts[49], "p99": 1e6 * parts[98]}


def _held(pool: EnvironmentWorkers) -> dict[str, Any]:
    """Return the most that this process and the workers have held so far, in megabytes."""
    pids = [held.pid for worker in pool.running if isinstance(held := worker.holder, HeldHere)]
    return {"here": _peak_mb("self"), "workers": [_peak_mb(str(pid)) for pid in pids]}


def _peak_mb(process: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main(arguments: Sequence[str]) -> int:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--workers", type=int, default=WORKERS)
    asked = parser.parse_args(arguments)
    print(json.dumps(run(asked.episodes, asked.workers), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
