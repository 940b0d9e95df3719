"""2,048 episodes in flight of which some raise, hang, answer garbage or are slow, against the same without.

    python -m benchmarks.load                 # a few minutes
    python -m benchmarks.load --episodes 256 --rounds 2

Which episode does what follows from its seed, so that what must have failed is known beforehand. `overhead` is how
many more CPU-seconds an episode that ended well took than in the run without faults played right beside it; its bar is
0.05. `left` is what is there after the last round and was not before the first one: descriptors, threads, children,
tasks of the event loop, files for a while; its bar is nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from benchmarks.measure import single_thread
from benchmarks.subjects import FixedState, FixedTasks, subject
from kapelle.environment import Outcome
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.schema import EvaluationConfig, TrainingConfig
from kapelle.training.trainer import Trainer
from kapelle.types import Task

EPISODES, SAMPLES, ROUNDS, TOKENS = 2048, 8, 5, 8
FAULTS = ("raises", "garbage", "slow", "hangs")
LATE = 0.2
"""Seconds that a slow world takes for its step."""
GIVEN_UP = 1.0
"""Seconds after which a hanging world is given up."""


class Fails(Protocol):
    """An environment that knows which of its episodes fail."""

    def fault(self, seed: int) -> str | None:
        """Return what the episode of a seed does, None where it is sound."""
        ...


class FaultyTasks(FixedTasks):
    """Fixed tasks of which one episode in `one_in` is faulty, in turn of each kind."""

    name: Literal["benchmarks.load:FaultyTasks"] = "benchmarks.load:FaultyTasks"  # type: ignore[assignment]
    one_in: int = 100
    """0 for none."""
    faults: tuple[str, ...] = FAULTS

    def fault(self, seed: int) -> str | None:
        """Return what the episode of a seed does, None where it is sound."""
        place = seed // 97 % (self.one_in * len(self.faults)) if self.one_in else len(self.faults)
        return self.faults[place] if place < len(self.faults) else None

    def start(self, task: Task, agents: Sequence[str], seed: int) -> FixedState:
        """Open the world of the episode."""
        return FaultyState(task, agents, self.fault(seed))


class FaultyState(FixedState):
    """An episode state with a fault."""

    def __init__(self, task: Task, agents: Sequence[str], fault: str | None) -> None:
        super().__init__(task, agents)
        self._fault = fault

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Pay at the end, late, never, or not."""
        if self._fault == "raises":
            raise RuntimeError("the world broke down")
        if self._fault == "slow":
            await asyncio.sleep(LATE)
        if self._fault == "hangs":
            await asyncio.Event().wait()
        return await super().step(actions, final)

    def outcome(self) -> Outcome:
        """Return what was earned, or nonsense."""
        earned = super().outcome()
        return Outcome(dict.fromkeys(earned.rewards, math.nan), 2.0) if self._fault == "garbage" else earned


def trainer(one_in: int, faults: Sequence[str], size: str = "1M") -> Trainer:
    """Return a trainer that plays two agents, two turns each, with that share of faults."""
    environment: dict[str, Any] = {"one_in": one_in, "faults": tuple(faults), "prompt_tokens": 32}
    if "hangs" in faults:
        environment["timeout"] = GIVEN_UP
    return Trainer(
        model=subject(size),
        environment={"name": "benchmarks.load:FaultyTasks", **environment},
        workflow={"name": "debate", "rounds": 2},
        algorithm={"name": "grpo", "group_size": SAMPLES},
        team={"agents": 2, "sampling": {"max_tokens": TOKENS}},
        training=TrainingConfig(steps=1),
        evaluation=EvaluationConfig(before_and_after=False),
    )


def held() -> Counter[str]:
    """Return what this process holds that an episode could leave behind."""
    gc.collect()
    children = Path("/proc/self/task")
    return Counter(
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=threading.active_count(),
        children=sum(len((task / "children").read_text("ascii").split()) for task in children.iterdir()),
        files=len(list(Path(tempfile.gettempdir()).iterdir())),
    )


def play(stage: RolloutSetup, environment: Fails, episodes: int, seed: int) -> dict[str, float]:
    """Play once and check exactly which episodes failed; return CPU-seconds, seconds and how many ended well."""
    tasks = [stage.environment.task("train", derive_seed(seed, k) >> 32) for k in range(episodes // SAMPLES)]
    due = {
        s: environment.fault(s) for t in tasks for k in range(SAMPLES) for s in [derive_seed(seed, t.id, k)]
    }
    left: set[asyncio.Task[Any]] = set()

    async def all_of_them() -> Any:
        groups = await rollout(stage, tasks, SAMPLES, seed)
        left.update(asyncio.all_tasks() - {asyncio.current_task()})
        return groups

    began, cpu = time.perf_counter(), time.process_time()
    groups = asyncio.run(all_of_them())
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
    played = {e.seed: e for group in groups for e in group.episodes}
    failed = {s for s, episode in played.items() if episode.error is not None}
    wrong = {s for s, fault in due.items() if fault not in (None, "slow")}
    assert set(played) == set(due), "every episode came back"
    assert failed == wrong, f"{len(failed)} failed, {len(wrong)} were due: {Counter(due.values())}"
    assert all("NaN" not in str(e.rewards) for s, e in played.items() if s not in wrong)
    good = len(played) - len(failed)
    return {"cpu_s": cpu, "seconds": seconds, "good": good, "failed": len(failed), "tasks_left": len(left)}


def run(
    episodes: int = EPISODES, rounds: int = ROUNDS, one_in: int = 100, size: str = "1M"
) -> dict[str, Any]:
    """Play with and without faults in turn and return what the faults cost."""
    single_thread()
    faults = FAULTS if _gives_up() else FAULTS[:-1]
    rows: list[dict[str, dict[str, float]]] = []
    before = Counter[str]()
    with (
        _temporary(),
        trainer(one_in, faults, size) as faulty,
        trainer(0, (), size) as clean,
        trainer(0, (), size) as again,
    ):
        stages = {"clean": clean, "faulty": faulty, "again": again}
        for number in range(rounds + 1):
            row = {}
            for name in sorted(stages, reverse=bool(number % 2)):
                gc.collect()
                one = stages[name]
                row[name] = play(one.setup, one.config.environment, episodes, number)  # type: ignore[arg-type]
            rows.append(row)
            if number == 0:
                before = held()
        left = held() - before
    return {
        "episodes": episodes,
        "faults": list(faults),
        "failed": [row["faulty"]["failed"] for row in rows[1:]],
        "overhead": _dearer("faulty", rows[1:]),
        "overhead_of_the_same_again": _dearer("again", rows[1:]),
        "cpu_ms_per_episode": 1e3 * statistics.median(_each(row["clean"]) for row in rows[1:]),
        "tasks_left": sum(row[name]["tasks_left"] for row in rows for name in row),
        "left": dict(left),
    }


def _each(row: Mapping[str, float]) -> float:
    return row["cpu_s"] / row["good"]


def _dearer(name: str, rows: Sequence[Mapping[str, Mapping[str, float]]]) -> list[float]:
    """Return by which share an episode cost more than in the clean run beside it: median, least, most."""
    ratios = [_each(row[name]) / _each(row["clean"]) - 1 for row in rows]
    return [round(value, 4) for value in (statistics.median(ratios), min(ratios), max(ratios))]


@contextmanager
def _temporary() -> Iterator[None]:
    """Give temporary files a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def _gives_up() -> bool:
    """Return whether an episode state that hangs is given up here."""
    return "patience" in RolloutSetup.__dataclass_fields__


def main(arguments: list[str]) -> int:
    """Run what the command line asks for and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--one-in", type=int, default=100, help="one faulty episode in so many")
    parser.add_argument("--size", default="1M", help="which model of `benchmarks.subjects`")
    asked = parser.parse_args(arguments)
    print(json.dumps(run(asked.episodes, asked.rounds, asked.one_in, asked.size), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
