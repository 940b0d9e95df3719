"""Episode states that really wait, each time for another while, and workflows whose agents fall silent at different times.

How long they wait is drawn from the operating system, so that no seed of a run decides it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from tests.support.plugins import Digest, DigestState

from kapelle.environment import Environment, Scorable
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.types import Task
from kapelle.workflow import Scene

LUCK = random.SystemRandom()


async def wait(kind: str, longest_s: float) -> None:
    """Wait for up to so many seconds: on the event loop, in a thread, or now and then not at all."""
    seconds = LUCK.uniform(0.0, longest_s)
    if kind == "mixed":
        kind = LUCK.choice(("sleep", "thread", "not"))
    if kind == "sleep":
        await asyncio.sleep(seconds)
    elif kind == "thread":
        await asyncio.to_thread(time.sleep, seconds)


class Waiting(Digest):
    """The same payments, from an episode state that waits in every step, score and end."""

    name: Literal["tests.support.waiting:Waiting"] = "tests.support.waiting:Waiting"  # type: ignore[assignment]
    kind: Literal["sleep", "thread", "mixed", "not"] = "mixed"
    longest_s: float = 0.02

    def start(self, task: Task, agents: Sequence[str], seed: int) -> WaitingState:
        world = WaitingState(task, tuple(agents), self.levels, 0)
        world.kind, world.longest_s = self.kind, self.longest_s
        return world


class WaitingState(DigestState, Scorable):
    kind = "not"
    longest_s = 0.0

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        await wait(self.kind, self.longest_s)
        return await super().step(actions, final) if final is not None else {}

    async def score(self, agent: str, text: str) -> float:
        await wait(self.kind, self.longest_s)
        return await super().score(agent, text)

    async def close(self) -> None:
        await wait(self.kind, self.longest_s)


class Rounds(Settings):
    """All speak, the world moves; who has said something of its kind falls silent. The others speak again."""

    name: Literal["tests.support.waiting:Rounds"] = "tests.support.waiting:Rounds"
    rounds: int = 4
    apart: bool = False
    """Whether each agent goes its own way to the end, or all of them speak and move at once."""

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        pass

    async def run(self, scene: Scene) -> None:
        if self.apart:
            said = dict(await asyncio.gather(*(self.alone(scene, name) for name in scene.names)))
        else:
            said = await self.as_one(scene)
        await scene.step(said, final=said[scene.names[0]])

    async def alone(self, scene: Scene, name: str) -> tuple[str, str]:
        text, words = "", scene.observe(name)
        for _ in range(self.rounds):
            text = (await scene[name].say(words)).text
            await scene.step({name: text})
            if silent(text):
                break
            words = text[:8] or "?"
        return name, text

    async def as_one(self, scene: Scene) -> dict[str, str]:
        said: dict[str, str] = {}
        words = {name: [scene.observe(name)] for name in scene.names}
        for _ in range(self.rounds):
            now = {name: turn.text for name, turn in (await scene.together(words)).items()}
            await scene.step(now)
            said.update(now)
            words = {name: [text[:8] or "?"] for name, text in now.items() if not silent(text)}
            if not words:
                break
        return said


def silent(text: str) -> bool:
    """Whether who said this falls silent."""
    return sum(text.encode()) % 3 == 0
