"""An episode state that misbehaves on every third task, in one way and at one place: what `oddities.py` plays."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

import numpy as np
from tests.support.plugins import Digest, DigestState

from kapelle.environment import Outcome, Scorable
from kapelle.types import Task


class Foreign(BaseException):
    """What some library raises that is not an Exception."""


def _raise(error: BaseException) -> NoReturn:
    raise error


def _recurse() -> Any:
    return _recurse()


def _circle() -> Any:
    around: dict[str, Any] = {}
    around["x"] = around
    return around


def _deep() -> Any:
    tree: Any = 1
    for _ in range(100_000):
        tree = [tree]
    return {"x": tree}


ACTS: Mapping[str, Callable[[], Any]] = {
    "raises": lambda: _raise(RuntimeError("odd")),
    "raises no Exception": lambda: _raise(Foreign("odd")),
    "raises CancelledError": lambda: _raise(asyncio.CancelledError()),
    "raises StopIteration": lambda: _raise(StopIteration("odd")),
    "raises MemoryError": lambda: _raise(MemoryError()),
    "leaves by sys.exit": lambda: sys.exit(3),
    "recurses for ever": _recurse,
    "raises a surrogate": lambda: _raise(RuntimeError("\udcff")),
}
"""What can happen anywhere in an episode state."""
HANGS: Mapping[str, Callable[[], Any]] = {
    "blocks for ever": lambda: time.sleep(10_000),
    "waits for ever": lambda: None,
}
"""What only a deadline ends; `waits` is awaited."""
PLACES = ("start", "observe", "step", "score", "outcome", "close")
REWARDS: Mapping[str, Any] = {
    "a NaN": math.nan,
    "infinite": math.inf,
    "out of range": 7.0,
    "a text": "1",
    "nothing": None,
    "a float32 of NumPy": np.float32(0.5),
    "a whole array": np.zeros(3),
}
"""Of every agent."""
SUCCESSES: Mapping[str, Any] = {"a NaN": math.nan, "above 1": 2.0, "a text": "yes", "a list": [1]}
INFOS: Mapping[str, Callable[[], Any]] = {
    "no JSON": lambda: {"x": {1, 2}},
    "itself": _circle,
    "40 MB": lambda: {"x": "y" * 40_000_000},
    "a surrogate": lambda: {"x": "\udcff"},
    "not text as a key": lambda: {(1, 2): 3},
    "infinite": lambda: {"x": math.inf},
    "very deep": _deep,
}
SIGHTS: Mapping[str, Any] = {
    "a surrogate": "\udcff?",
    "NUL": "\0?",
    "empty": "",
    "no text": 7,
    "40 KB": "y" * 40_000,
}
"""What an agent observes."""


class Odd(Digest):
    """Misbehaves on every third task."""

    name: Literal["tests.faults.worlds:Odd"] = "tests.faults.worlds:Odd"  # type: ignore[assignment]
    what: str = "nothing"
    """A place, `reward`, `success`, `info` or `sight`."""
    how: str = ""

    def start(self, task: Task, agents: Any, seed: int) -> DigestState:
        if not is_odd(task):
            return super().start(task, agents, seed)
        if self.what == "start":
            ({**ACTS, **HANGS})[self.how]()
        return OddState(task, tuple(agents), self.levels, self.what, self.how)


def is_odd(task: Task) -> bool:
    """Return whether a task is one of those where the world misbehaves."""
    return int(task.id.partition("-")[2]) % 3 == 0


class OddState(DigestState, Scorable):
    def __init__(self, task: Task, agents: tuple[str, ...], levels: int, what: str, how: str) -> None:
        super().__init__(task, agents, levels, 0)
        self.what, self.how = what, how

    def act(self, place: str) -> None:
        if place == self.what:
            ({**ACTS, **HANGS})[self.how]()

    async def wait(self, place: str) -> None:
        if place == self.what and self.how == "waits for ever":
            await asyncio.Event().wait()

    def observe(self, agent: str) -> str:
        self.act("observe")
        return SIGHTS[self.how] if self.what == "sight" else super().observe(agent)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        await self.wait("step")
        self.act("step")
        return await super().step(actions, final)

    async def score(self, agent: str, text: str) -> float:
        await self.wait("score")
        self.act("score")
        return await super().score(agent, text)

    def outcome(self) -> Outcome:
        self.act("outcome")
        found = super().outcome()
        rewards: Any = found.rewards
        success: Any = found.success
        info: Any = found.info
        if self.what == "reward":
            rewards = dict.fromkeys(rewards, REWARDS[self.how])
        if self.what == "success":
            success = SUCCESSES[self.how]
        if self.what == "info":
            info = INFOS[self.how]()
        return Outcome(rewards, success=success, info=info)

    async def close(self) -> None:
        await self.wait("close")
        self.act("close")
