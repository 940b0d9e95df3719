"""Pieces that are no part of the library, named as `module:Class`: an environment, a workflow, an algorithm."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from kapelle.algorithm import Algorithm, Data, Loss, Outputs, Targets
from kapelle.algorithms.grpo import GRPO
from kapelle.environment import Answerable, Environment, Outcome, Scorable, Scripted
from kapelle.functional.masking import token_mean
from kapelle.runtime.on_demand import torch
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.types import Message, Split, Task
from kapelle.workflow import Scene


class Endless(Settings, Answerable):
    """Numbered tasks that anybody may play, without end: what environments are whose episode states alone matter."""

    @property
    def reward_range(self) -> tuple[float, float]:
        return (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        return {"train": "numbers", "test": "other numbers"}

    def check(self, agents: Sequence[str]) -> None:
        pass

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        return Task(f"{split}-{index}", f"{index % 10_000}?")

    def extract(self, text: str) -> str | None:
        return text or None


class Digest(Endless, Scripted):
    """Pays each agent for the bytes of its words, so that any noise of a model earns something or other."""

    name: Literal["tests.support.plugins:Digest"] = "tests.support.plugins:Digest"
    levels: int = 5
    tasks: int | None = None
    """Tasks of each split; None for no end."""
    noisy: bool = False
    """Whether luck decides too, drawn from the generators that all of a process shares."""

    def size(self, split: Split) -> int | None:
        return self.tasks

    def start(self, task: Task, agents: Sequence[str], seed: int) -> DigestState:
        return DigestState(task, tuple(agents), self.levels, self._luck() if self.noisy else 0)

    def _luck(self) -> int:
        import tests.support.drawing  # noqa: F401 - late on purpose: what it draws must not be told from the outside

        numbers = random.randrange(self.levels) + int(np.random.randint(self.levels))
        return numbers + int(torch.randint(self.levels, ()))

    def script(self, agent: str, task: Task, new_messages: Sequence[Message], seed: int) -> str:
        return f"{agent} {task.question}"


class DigestState(Scorable):
    def __init__(self, task: Task, agents: tuple[str, ...], levels: int, luck: int) -> None:
        self.task, self.agents, self.levels, self.luck = task, agents, levels, luck
        self.said: dict[str, str] = {}

    def observe(self, agent: str) -> str:
        return self.task.question

    def movers(self) -> tuple[str, ...]:
        return () if self.said else self.agents

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        self.said.update(actions)
        return {}

    async def score(self, agent: str, text: str) -> float:
        return (sum(text.encode()) + self.luck) % self.levels / (self.levels - 1)

    def outcome(self) -> Outcome:
        points = {agent: sum(text.encode()) + self.luck for agent, text in self.said.items()}
        paid = {agent: count % self.levels / (self.levels - 1) for agent, count in points.items()}
        return Outcome(paid, success=sum(paid.values()) / max(1, len(paid)), info={"said": dict(self.said)})

    async def close(self) -> None:
        pass


class Counted(Digest):
    """Reports two numbers of what was said, beside what it pays."""

    name: Literal["tests.support.plugins:Counted"] = "tests.support.plugins:Counted"  # type: ignore[assignment]

    def start(self, task: Task, agents: Sequence[str], seed: int) -> DigestState:
        return CountedState(task, tuple(agents), self.levels, 0)


class CountedState(DigestState):
    def outcome(self) -> Outcome:
        count = sum(sum(text.encode()) for text in self.said.values())
        return replace(super().outcome(), info={"thirds": count % 3, "sevenths": count % 7})


class Echo(Settings):
    """Everyone answers; then the first agent hears the last one's words and answers again."""

    name: Literal["tests.support.plugins:Echo"] = "tests.support.plugins:Echo"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        pass

    async def run(self, scene: Scene) -> None:
        words = {name: [scene.observe(name)] for name in scene.names}
        said = {name: turn.text for name, turn in (await scene.together(words)).items()}
        first, last = scene.names[0], scene.names[-1]
        said[first] = (await scene[first].say(said[last][:20] or "?")).text
        await scene.step(said, final=said[first])


class Delegate(Settings):
    """The first agent asks the second one to three times, as its text has it, and answers in the end."""

    name: Literal["tests.support.plugins:Delegate"] = "tests.support.plugins:Delegate"

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        pass

    async def run(self, scene: Scene) -> None:
        main, sub = scene.names
        asked = (await scene[main].say(scene.observe(main))).text
        for _ in range(1 + sum(asked.encode()) % 3):
            found = (await scene[sub].say(asked[:20] or "?")).text
            asked = (await scene[main].say(found[:20] or "?")).text
        await scene.step({main: asked}, final=asked)


class Reinforce(Settings):
    """−A·log π with GRPO's group advantages: an algorithm of thirty lines."""

    name: Literal["tests.support.plugins:Reinforce"] = "tests.support.plugins:Reinforce"
    group_size: int = 4

    def build(self) -> Algorithm:
        return Algorithm(
            self.name, _reinforce, GRPO(scale="none").build().credit, data=Data(group_size=self.group_size)
        )


def _reinforce(outputs: Outputs, targets: Targets) -> Loss:
    return Loss(*token_mean(-outputs.logp_K * targets["advantage"], targets.mask_K))
