"""A game of memory: an agent reads a secret first and is asked for it last, after rounds that fill its context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.environment import EpisodeState, Outcome
from kapelle.settings.base import Settings
from kapelle.types import Split, Task

LETTERS = "AB"
QUESTION = "Which letter was it?"


class Recall(Settings):
    """The agents answer every observation; each whose last answer is the secret receives reward 1."""

    name: Literal["tests.support.recall:Recall"] = "tests.support.recall:Recall"
    seats: int = 1
    fillers: int = 1
    """Number of observations between the secret and the question."""

    @property
    def reward_range(self) -> tuple[float, float]:
        return (0.0, 1.0)

    @property
    def alphabet(self) -> str:
        return LETTERS

    @property
    def sources(self) -> Mapping[Split, str]:
        return {"train": "letters", "test": "letters"}

    def check(self, agents: Sequence[str]) -> None:
        pass

    def size(self, split: Split) -> int | None:
        return len(LETTERS)

    def task(self, split: Split, index: int) -> Task:
        return Task(f"{split}-{index}", "", {"secret": LETTERS[index]})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RecallState:
        return RecallState(task.data["secret"], tuple(agents), self.fillers)


class RecallState(EpisodeState):
    def __init__(self, secret: str, agents: tuple[str, ...], fillers: int) -> None:
        self.secret, self.agents = secret, agents
        self.read = [f"Secret: {secret}", *(f"filler {k}" for k in range(fillers)), QUESTION]
        self.said: list[Mapping[str, str]] = []

    def observe(self, agent: str) -> str:
        return self.read[len(self.said)]

    def movers(self) -> tuple[str, ...]:
        return self.agents if len(self.said) < len(self.read) else ()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        self.said.append(dict(actions))
        return {}

    def outcome(self) -> Outcome:
        rewards = {agent: float(text == self.secret) for agent, text in self.said[-1].items()}
        return Outcome(rewards, min(rewards.values()), {"said": self.said})

    async def close(self) -> None:
        pass
