"""A test environment whose episodes wait for an event, or fail on request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.environment import Outcome
from kapelle.settings.base import Settings
from kapelle.types import Split, Task

go_on = threading.Event()
"""Set to let waiting episodes continue."""
began = threading.Event()
"""Set when an episode waits."""
closed: list[int] = []
"""Seeds of closed episodes."""
new_messages: list[tuple[int, str]] = []
"""Moves and requests for outcomes, with the seed of the episode."""


class Waiting(Settings):
    """An agent's text is shown; `wait` waits and `fail` raises."""

    name: Literal["tests.services.environments.slow_world:Waiting"] = (
        "tests.services.environments.slow_world:Waiting"
    )
    greeting: str = "hello"

    @property
    def reward_range(self) -> tuple[float, float]:
        return (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        return {"train": "nowhere", "test": "nowhere"}

    def check(self, agents: Sequence[str]) -> None:
        return

    def size(self, split: Split) -> int | None:
        return 4 if split == "test" else None

    def task(self, split: Split, index: int) -> Task:
        return Task(f"{split}-{index}", "", {"big": 10**30, "pair": (1, 2.5), "keys": {3: None}})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> WaitingState:
        return WaitingState(self.greeting, task, tuple(agents), seed)


class WaitingState:
    def __init__(self, greeting: str, task: Task, agents: tuple[str, ...], seed: int) -> None:
        assert task.data == {"big": 10**30, "pair": (1, 2.5), "keys": {3: None}}, (
            "data come back as they were"
        )
        self._agents, self._seed, self._said = agents, seed, greeting

    def observe(self, agent: str) -> str:
        if self._said == "hide":
            raise RuntimeError("nothing to see")
        return f"{agent} sees {self._said}"

    def movers(self) -> tuple[str, ...]:
        return () if self._said == "over" else self._agents

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        for agent, text in actions.items():
            new_messages.append((self._seed, text))
            if text == "fail":
                raise RuntimeError("it failed")
            if text == "wait":
                began.set()
                while not go_on.is_set():  # noqa: ASYNC110 - another thread says so
                    await asyncio.sleep(0.005)
            self._said = text
            return {agent: 0.5}
        return {}

    def outcome(self) -> Outcome:
        new_messages.append((self._seed, "outcome"))
        return Outcome({self._agents[0]: 1.0}, 1.0, {"seed": self._seed, "tuple": (1, "a")})

    async def close(self) -> None:
        closed.append(self._seed)
