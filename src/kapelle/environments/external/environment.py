"""Tasks of an outside program: kapelle counts them, the program knows what they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from kapelle.environments.external.switchboard import board_of
from kapelle.environments.external.world import ExternalWorld
from kapelle.errors import ConfigError
from kapelle.settings.base import FREE, FROM_HERE_ON, Settings
from kapelle.types import Split, Task


class External(Settings):
    """An outside program plays: it calls the agents as OpenAI's chat completions and posts their reward.

    With a `command` it is started once for each episode, and finds the server in `OPENAI_BASE_URL`. Without one you start
    it yourself: it asks for episodes by `POST /v1/task`. The page docs/serving.md has both.
    """

    name: Literal["external"] = "external"
    command: Annotated[tuple[str, ...], FROM_HERE_ON] = ()
    """The program with its arguments; empty when you start it yourself."""
    programs: Annotated[int, FROM_HERE_ON] = Field(default=8, ge=1)
    """Most programs of `command` that run at once."""
    port: Annotated[int, FREE] = Field(default=8000, ge=0, le=65_535)
    """Where programs call, on this machine alone; 0 takes a free port."""
    tasks: int | None = Field(default=None, ge=1)
    """How many tasks the program has to train on; null for tasks without end."""
    rewards: tuple[FiniteFloat, FiniteFloat] = (0.0, 1.0)
    """Least and greatest reward of an agent; one outside is refused when it is posted."""

    absence: Annotated[float, FREE] = Field(default=30.0, gt=0.0)
    """Seconds for which a program that asked for its episode may have no connection open before it counts as dead."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range of `rewards`."""
        return self.rewards

    @property
    def sources(self) -> Mapping[Split, str]:
        """The program itself."""
        who = self.command[0] if self.command else "an outside program"
        return {"train": f"tasks of {who}", "test": f"tasks of {who} for the split `test`"}

    @property
    def alive(self) -> Sequence[str]:
        """The program: its episodes cannot be replayed."""
        return ("the outside program",)

    def descriptors(self, agents: int) -> int:
        """Return the pipes and connections of one program."""
        return 4 + agents

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError where the package that speaks HTTP is missing, or the range of rewards is empty."""
        if importlib.util.find_spec("uvicorn") is None:
            raise ConfigError("`environment.name: external` needs an extra: pip install 'kapelle[serve]'.")
        if self.rewards[0] >= self.rewards[1]:
            raise ConfigError(f"environment.rewards is {list(self.rewards)}. Put the lower end first.")

    def size(self, split: Split) -> int | None:
        """Return how many tasks there are to train on; those to test on come without end."""
        return self.tasks if split == "train" else None

    def task(self, split: Split, index: int) -> Task:
        """Return a number by which the program knows its task."""
        return Task(f"{split}-{index}", "", {"split": split, "index": index})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ExternalWorld:
        """Offer an episode to the program."""
        return ExternalWorld(board_of(self.key), task, seed, tuple(agents), self.command, self.programs)

    @property
    def key(self) -> str:
        """What its worlds and its server find each other by."""
        return self.model_dump_json()
