"""An environment in which some calls never return, in every way that Python has."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from tests.support.plugins import Digest, DigestState

from kapelle.environment import Answerable, Outcome, Scorable, Scripted
from kapelle.types import Split, Task

released = threading.Event()
"""Ends the threads that spin; without it they would slow down every later test of the process."""


def release() -> None:
    """End all threads that spin now."""
    global released  # noqa: PLW0603 - each test has an event of its own
    released.set()
    released = threading.Event()


Way = Literal["none", "sleep", "lock", "spin", "swallow", "await", "deaf", "child", "deep"]
Place = Literal["task", "start", "observe", "step", "outcome", "close", "score", "script", "extract"]


class Stuck(Digest, Answerable, Scripted):
    """Every `one_in`-th world, by its seed, gets stuck at a place."""

    name: Literal["tests.support.stuck:Stuck"] = "tests.support.stuck:Stuck"  # type: ignore[assignment]
    way: Way = "none"
    place: Place = "step"
    one_in: int = 1
    tell: str | None = None
    """A file that is made when it first gets stuck; nothing gets stuck when it holds a word."""
    blocking: bool = False

    def task(self, split: Split, index: int) -> Task:
        if self.place == "task":
            self.hang()
        return super().task(split, index)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> StuckState:
        hangs = seed % self.one_in == 0
        if self.place == "start" and hangs:
            self.hang()
        return StuckState(self, task, tuple(agents), hangs)

    def extract(self, text: str) -> str | None:
        if self.place == "extract":
            self.hang()
        return super().extract(text)

    def script(self, agent: str, task: Task, new_messages: Any, seed: int) -> str:
        if self.place == "script":
            self.hang()
        return super().script(agent, task, new_messages, seed)

    def begin(self) -> bool:
        if self.tell is None:
            return True
        if Path(self.tell).exists() and Path(self.tell).read_text():
            return False
        Path(self.tell).touch()
        return True

    def hang(self) -> None:
        if self.way == "none" or not self.begin():
            return
        if self.way == "sleep":
            time.sleep(3600)
        elif self.way == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        elif self.way == "spin":
            mine = released
            while not mine.is_set():
                pass
        elif self.way == "swallow":
            for _ in range(2):
                with suppress(BaseException):
                    time.sleep(3600)
            time.sleep(3600)

        elif self.way == "deep":
            # Below Python, where no signal gets through.
            library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)

    async def wait(self) -> None:
        if self.way in {"await", "deaf", "child"}:
            if not self.begin():
                return
            if self.way == "child":
                child = asyncio.create_task(self.deaf())
                await asyncio.gather(child)
            elif self.way == "deaf":
                await self.deaf()
            await asyncio.sleep(3600)
        self.hang()

    async def deaf(self) -> None:
        while True:
            with suppress(BaseException):
                await asyncio.sleep(3600)


class StuckState(DigestState, Scorable):
    def __init__(self, stuck: Stuck, task: Task, agents: tuple[str, ...], hangs: bool) -> None:
        super().__init__(task, agents, stuck.levels, 0)
        self.stuck, self.hangs = stuck, hangs

    async def maybe(self, place: Place) -> None:
        if self.hangs and self.stuck.place == place:
            await self.stuck.wait()

    def observe(self, agent: str) -> str:
        if self.hangs and self.stuck.place == "observe":
            self.stuck.hang()
        return super().observe(agent)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        await self.maybe("step")
        return await super().step(actions, final)

    async def score(self, agent: str, text: str) -> float:
        await self.maybe("score")
        return await super().score(agent, text)

    def outcome(self) -> Outcome:
        if self.hangs and self.stuck.place == "outcome":
            self.stuck.hang()
        return super().outcome()

    async def close(self) -> None:
        await self.maybe("close")
        await super().close()
