"""Episode states that end the process they live in, or fail in every way of an environment's own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from tests.support.plugins import Digest, DigestState

from kapelle.environment import Outcome
from kapelle.types import Task


class Deadly(Digest):
    """Episode states of every `one_in`-th seed do something in their step until it has been done `times`, counted in a folder."""

    name: Literal["tests.support.deadly:Deadly"] = "tests.support.deadly:Deadly"  # type: ignore[assignment]
    way: Literal["kill", "stop", "exit", "none"] = "kill"
    place: Literal["start", "step"] = "step"
    one_in: int = 3
    times: int = 1
    folder: str = ""

    def start(self, task: Task, agents: Sequence[str], seed: int) -> DeadlyState:
        world = DeadlyState(task, tuple(agents), self.levels, 0)
        world.settings, world.seed = self, seed
        if self.place == "start":
            world.die()
        return world


class DeadlyState(DigestState):
    settings: Deadly
    seed: int

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        if self.settings.place == "step":
            self.die()
        return await super().step(actions, final)

    def die(self) -> None:
        if self.seed % self.settings.one_in or self.settings.way == "none":
            return
        done = Path(self.settings.folder) / str(self.seed)
        before = done.stat().st_size if done.exists() else 0
        if before >= self.settings.times:
            return
        done.write_text("x" * (before + 1))
        if self.settings.way == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL if self.settings.way == "kill" else signal.SIGSTOP)


class Late(Digest):
    """Episode states that are open only after a second, and leave a file when they are closed."""

    name: Literal["tests.support.deadly:Late"] = "tests.support.deadly:Late"  # type: ignore[assignment]
    folder: str = ""

    def start(self, task: Task, agents: Sequence[str], seed: int) -> LateState:
        time.sleep(1.0)
        world = LateState(task, tuple(agents), self.levels, 0)
        world.folder = self.folder
        return world


class LateState(DigestState):
    folder: str

    async def close(self) -> None:
        (Path(self.folder) / "closed").touch()


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Rude(Digest):
    """Each world does something else that an environment should not, or may."""

    name: Literal["tests.support.deadly:Rude"] = "tests.support.deadly:Rude"  # type: ignore[assignment]

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RudeState:
        world = RudeState(task, tuple(agents), self.levels, 0)
        world.number = int(task.id.rpartition("-")[2])
        if world.number == 0:
            raise KeyError("key")
        return world


class RudeState(DigestState):
    number: int

    def observe(self, agent: str) -> str:
        if self.number == 1:
            return cast("str", None)
        if self.number == 2:
            raise OSError(5, "no view", "file")
        return super().observe(agent) + "\x00é\ud800"

    def movers(self) -> tuple[str, ...]:
        if self.number == 3:
            raise Odd
        return super().movers()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        await super().step(actions, final)
        paid: dict[int, Any] = {
            4: {"ann": float("nan")},
            5: {"nobody": 1.0},
            6: {"ann": "much"},
            7: {"ann": np.float32(0.25)},
        }
        if self.number == 8:
            sys.exit(3)
        return cast("Mapping[str, float]", paid.get(self.number, {}))

    def outcome(self) -> Outcome:
        made = super().outcome()
        info: dict[int, Any] = {
            9: {"set": {1}},
            10: {"big": 1 << 9000},
            11: {"tuple": (1, (2.5, None)), "nan": float("nan"), "$tag": {1: True}, "np": np.int64(3)},
            12: 5,
        }
        if self.number == 13:
            return Outcome({}, success=1.5)
        if self.number == 14:
            return Outcome({"ann": 9.0}, roles={"ann": "first"})
        return Outcome(made.rewards, made.success, info.get(self.number, made.info))

    async def close(self) -> None:
        if self.number == 15:
            raise ValueError("does not close")
