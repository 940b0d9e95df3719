"""Hundreds of episodes in flight of which some fail: exactly those fail, the others notice nothing, and nothing stays."""

from __future__ import annotations

import asyncio
import gc
import math
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from tests.support.patience import grown_since
from tests.support.plugins import Digest, DigestState
from tests.support.tiny import sections

from kapelle import Trainer
from kapelle.environment import Outcome
from kapelle.training.step_report import Step
from kapelle.types import Task

EPISODES, SAMPLES = 256, 4
WAYS = ("refuses", "raises", "hides", "nonsense", "text", "sleeps")


class Faulty(Digest):
    """One episode in eight does something else than the others, in turn of each way."""

    name: Literal["tests.rollout.test_load:Faulty"] = "tests.rollout.test_load:Faulty"  # type: ignore[assignment]
    ways: tuple[str, ...] = ()

    def way(self, seed: int) -> str | None:
        place = seed // 97 % (8 * len(self.ways)) if self.ways else 0
        return self.ways[place] if place < len(self.ways) else None

    def start(self, task: Task, agents: Sequence[str], seed: int) -> DigestState:
        way = self.way(seed)
        if way == "refuses":
            raise RuntimeError("no world today")
        return FaultyState(task, tuple(agents), self.levels, way)


class FaultyState(DigestState):
    def __init__(self, task: Task, agents: tuple[str, ...], levels: int, way: str | None) -> None:
        super().__init__(task, agents, levels, 0)
        self.way = way

    def observe(self, agent: str) -> str:
        if self.way == "hides":
            return cast("str", None)
        return super().observe(agent)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        if self.way == "raises":
            raise RuntimeError("broke down")
        if self.way == "sleeps":
            await asyncio.sleep(0.05)
        if self.way == "hangs":
            await asyncio.Event().wait()
        return await super().step(actions, final)

    def outcome(self) -> Outcome:
        earned = super().outcome()
        odd: Any = {"nonsense": math.nan, "text": "much"}.get(self.way or "")
        return earned if odd is None else Outcome(dict.fromkeys(earned.rewards, odd))


def children_of(thread: Path) -> int:
    try:
        return len((thread / "children").read_text().split())
    except OSError:  # it has ended since it was listed
        return 0


def held() -> Counter[str]:
    gc.collect()
    tasks = Path("/proc/self/task")
    return Counter(
        threads=threading.active_count(),
        descriptors=len(list(Path("/proc/self/fd").iterdir())) if tasks.exists() else 0,
        children=sum(children_of(task) for task in tasks.glob("*")),
        files=len(list(Path(tempfile.gettempdir()).iterdir())),
        tasks=sum(issubclass(type(o), asyncio.Task) for o in gc.get_objects()),
    )


def trained(ways: tuple[str, ...], steps: int = 2) -> tuple[list[Step], Counter[str], int]:
    """Return the steps, what the later ones left behind, and how many tokens were said."""
    limit = {"timeout": 1.0} if "hangs" in ways else {}
    settings = sections(
        environment={"name": "tests.rollout.test_load:Faulty", "ways": ways, **limit},
        algorithm={"name": "grpo", "group_size": SAMPLES},
        training={"steps": steps, "tasks_per_step": EPISODES // SAMPLES, "max_failed_share": 0.5},
    )
    with Trainer(**settings) as trainer:
        running = trainer.steps()
        taken = [next(running)]
        before = held()
        taken += running
        return taken, grown_since(before, held), trainer.setup.engine.tokens_sampled  # type: ignore[attr-defined]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("hangs",)], ids=["", "hangs"])
def test_exactly_those_fail_that_must_and_nothing_stays(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = Faulty(ways=(*WAYS, *more))
    steps, left, _ = trained(environment.ways)
    assert not left
    for step in steps:
        episodes = [episode for group in step.groups for episode in group.episodes]
        assert len(episodes) == EPISODES
        failed = {episode.seed for episode in episodes if episode.error is not None}
        ways = {episode.seed: environment.way(episode.seed) for episode in episodes}
        assert failed == {seed for seed, way in ways.items() if way not in (None, "sleeps")}
        assert {way for way in ways.values() if way} == set(environment.ways)
        assert step.metrics["failed_episodes"] == len(failed) / EPISODES
