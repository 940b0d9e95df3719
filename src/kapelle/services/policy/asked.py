"""A question that somebody asks a team: the run's workflow plays it, in a world that has no answer to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kapelle.environment import Answerable, Environment, World, asks_questions, offers
from kapelle.environments.questions import QuestionWorld
from kapelle.environments.tool_questions import Tools
from kapelle.grading.verdict import right
from kapelle.types import Split, Task


@dataclass(frozen=True)
class Asked:
    """An environment of one question; every answer counts as right."""

    environment: Environment
    """The run's own, whose tools and form of answers are kept."""
    finals: list[str] = field(default_factory=list)
    """The team's answers, the last one last."""

    @staticmethod
    def can_ask(environment: Environment) -> bool:
        """Return whether questions of anybody can be asked in an environment's place: it is no game."""
        return asks_questions(environment)

    @property
    def name(self) -> str:
        """The run's own."""
        return self.environment.name

    reward_range = (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        """The caller."""
        return {"train": "a caller", "test": "a caller"}

    def check(self, agents: Sequence[str]) -> None:
        """Accept the team: the run's environment has."""

    def size(self, split: Split) -> int | None:
        """Return None: callers come without end."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Raise AssertionError: callers ask."""
        raise AssertionError("callers ask")

    def start(self, task: Task, agents: Sequence[str], seed: int) -> World:
        """Open the world of the question."""
        world = _AskedWorld(task, agents, self.finals)
        return self.environment.around(world, agents) if isinstance(self.environment, Tools) else world

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text, as the run's environment reads it."""
        assert offers(self.environment, Answerable), "`can_ask` has been asked"
        return self.environment.extract(text)


class _AskedWorld(QuestionWorld):
    def __init__(self, task: Task, agents: Sequence[str], finals: list[str]) -> None:
        super().__init__(task, agents, right, {})
        self._finals = finals

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        if final is None:
            said = [text if len(actions) == 1 else f"{name}: {text}" for name, text in actions.items()]
            final = "\n\n".join(said)
        self._finals.append(final)
        return await super().step(actions, final)
