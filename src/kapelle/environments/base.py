"""Defaults for environments and worlds of your own: what is left to write is the tasks, and what moves pay.

    class Dice(BaseEnvironment):
        name: Literal["dice:Dice"] = "dice:Dice"

        @property
        def sources(self): ...             # where tasks come from, in words
        def task(self, split, index): ...  # the task at an index
        def start(self, task, agents, seed): return DiceWorld(task, agents)

    class DiceWorld(BaseWorld):
        async def step(self, actions, final=None): ...

`examples/own_environment.py` is a whole one. Questions with one answer need less: see `questions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kapelle.environment import Outcome
from kapelle.settings.base import Settings
from kapelle.types import Split, Task


class BaseEnvironment(Settings):
    """An environment for any team, whose tasks never end and whose episodes pay each agent from 0 to 1.

    A subclass adds `name`, `sources`, `task` and `start`, and overrides what differs; `kapelle.environment.Environment`
    says what each is asked for.
    """

    @property
    def reward_range(self) -> tuple[float, float]:
        """Smallest and largest total that one agent can earn in an episode."""
        return (0.0, 1.0)

    def check(self, agents: Sequence[str]) -> None:
        """Accept any team; an override raises ConfigError for one that cannot play."""

    def size(self, split: Split) -> int | None:
        """Return None: tasks are generated without end."""
        return None

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        """Refuse settings fields by the names of what an environment is asked for; a property or method says them."""
        super().__pydantic_init_subclass__(**given)
        for part in ("reward_range", "sources", "check", "size", "task", "start"):
            if part in cls.model_fields:
                raise TypeError(
                    f"{cls.__name__}.{part} is a settings field: as annotated, recipes could change it. Write "
                    f"`{part}` as a {'property' if part in {'reward_range', 'sources'} else 'method'}."
                )


class BaseWorld:
    """An episode in which all agents read the task's question and move at once, until `over`.

    A subclass adds `step`, which returns what the moves are paid at once, and sets `rewards`, `success` and, at the
    end, `over`; it overrides `observe` for private views and `movers` where agents take turns.
    """

    def __init__(self, task: Task, agents: Sequence[str]) -> None:
        """Begin an episode on a task for these agents, in seat order."""
        self.task, self.agents = task, tuple(agents)
        self.over = False
        self.rewards: dict[str, float] = {}
        """What each agent is paid at the end, beside what its moves were paid."""
        self.success: float | None = None
        """The team's score in [0, 1]."""

    def observe(self, agent: str) -> str:
        """Return what this agent may see now: the question."""
        return self.task.question

    def movers(self) -> tuple[str, ...]:
        """Return all agents, and none once the episode is over."""
        return () if self.over else self.agents

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Take the texts of the agents that moved; return what each is paid for its move now (often nothing)."""
        raise NotImplementedError

    def outcome(self) -> Outcome:
        """Return how it ended."""
        return Outcome(self.rewards, self.success)

    async def close(self) -> None:
        """Free what the world holds: nothing."""
