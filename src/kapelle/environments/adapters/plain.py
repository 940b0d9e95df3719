"""Your own class as an environment: `reset()` and `step(action) -> observation, reward`.

    class Countdown:
        def reset(self):
            self.left = 3
            return "3 left"

        def step(self, action):
            self.left -= 1
            return (f"{self.left} left" if self.left else None), float(action == "wait")

The episode ends when the observation is None, when `step` returns a true third value, or after `max_steps`. If `reset` has an
argument `seed`, it receives the episode's seed.
"""

from __future__ import annotations

import importlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from kapelle.environment import Outcome
from kapelle.environments.base import Endless, StatedRewards, need_movers
from kapelle.environments.questions import require_agents
from kapelle.errors import AbsentPackage, ConfigError, EpisodeError
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import find_class
from kapelle.types import Json, Split, Task


class Plain(Endless, StatedRewards):
    """One agent in an environment class that is independent of kapelle."""

    name: Literal["plain"] = "plain"
    path: str
    """`module:Class` or `path/file.py:Class`."""
    arguments: Mapping[str, Json] = Field(default={})
    """Keyword arguments for the class; each episode constructs one object."""
    max_steps: int = Field(default=20, ge=1)
    """Maximum number of steps in an episode."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """Describe the class; the splits use different seeds."""
        return {
            "train": f"episodes of {self.path}, by seed",
            "test": f"episodes of {self.path}, with different seeds",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError unless there is exactly one agent and a class with `reset` and `step`."""
        check_alone(agents, self.path)
        found = find_class("plain environment", self.path, {})
        missing = [
            name for name in ("reset", "step") if not callable(inspect.getattr_static(found, name, None))
        ]
        if missing:
            raise ConfigError(
                f"environment.path: {self.path} has no method `{missing[0]}`. Add it to the class."
            )

    def start(self, task: Task, agents: Sequence[str], seed: int) -> SteppingState:
        """Construct the environment object for one episode."""
        made = make_own(
            find_class("plain environment", self.path, {}), self.arguments, f"environment.path: {self.path}"
        )
        return _PlainState(made, self.path, agents[0], self.max_steps, seed)


class SteppingState(ABC):
    """The state of one agent's episode in a third-party environment; each step gives a reward.

    A subclass defines how the episode begins and what an action does.
    """

    def __init__(self, agent: str, max_steps: int, seed: int) -> None:
        self._agent = agent
        self._left = max_steps
        self._seen = self.reset(seed)
        self._over = self._cut = False
        self._total = 0.0

    @abstractmethod
    def reset(self, seed: int) -> str:
        """Begin and return the first observation."""

    @abstractmethod
    def act(self, text: str) -> tuple[str, float, bool, bool]:
        """Take an action; return the observation, the reward, whether the episode is over, and whether the environment truncated it."""

    def observe(self, agent: str) -> str:
        """Return the last observation."""
        return self._seen

    def movers(self) -> tuple[str, ...]:
        """Return the agent until the episode is over or out of steps."""
        return () if self._over or self._cut or self._left == 0 else (self._agent,)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Take an action and return the reward; raise EpisodeError if the episode is over or another agent acts."""
        need_movers(actions, self.movers())
        self._left -= 1
        self._seen, reward, self._over, self._cut = self.act(actions[self._agent])
        self._total += reward
        return {self._agent: reward}

    def outcome(self) -> Outcome:
        """Return the outcome, which is `truncated` if a limit on steps ended the episode."""
        return Outcome({self._agent: 0.0}, None, {"total": self._total}, truncated=not self._over)

    @abstractmethod
    async def close(self) -> None:
        """Release the environment's resources."""


class _PlainState(SteppingState):
    """The state of an object with `reset` and `step`, whose results are checked."""

    def __init__(self, made: Any, path: str, agent: str, max_steps: int, seed: int) -> None:
        self._made, self._path = made, path
        super().__init__(agent, max_steps, seed)

    def reset(self, seed: int) -> str:
        """Begin the episode; pass the seed to `reset` if it takes one."""
        takes_seed = "seed" in inspect.signature(self._made.reset).parameters
        seen = self._made.reset(seed=seed) if takes_seed else self._made.reset()
        if not isinstance(seen, str):
            raise EpisodeError(
                f"`reset` of {self._path} returned {type(seen).__name__}. Return the first observation as a string."
            )
        return seen

    def act(self, text: str) -> tuple[str, float, bool, bool]:
        """Take an action; raise EpisodeError for an invalid result."""
        result = self._made.step(text)
        match result:
            case (str() | None as seen, int() | float() as reward, *rest) if (
                isinstance(result, tuple) and len(rest) <= 1 and math.isfinite(reward)
            ):
                return seen or "", float(reward), seen is None or any(rest), False
        raise EpisodeError(
            f"`step` of {self._path} returned {result!r:.80}. Return `observation, reward`: a string (or None) and a finite number, "
            "optionally followed by whether the episode is over."
        )

    async def close(self) -> None:
        """Call the object's `close` method if it has one."""
        if callable(inspect.getattr_static(self._made, "close", None)):
            self._made.close()


def make_own(make: Any, arguments: Mapping[str, Json], what: str, part: str = "reset") -> Any:
    """Return what a user's class or function creates; raise ConfigError, beginning with `what`, if it fails or the result lacks `part`."""
    try:
        made = make(**arguments)
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be created with `environment.arguments: {dict(arguments)}`: {reason(error)}"
        ) from error
    if not hasattr(made, part):
        raise ConfigError(
            f"{what} returns {made!r:.60}, which has no `{part}`. Set it to an environment class."
        )
    return made


def need_package(environment: str, module: str, install: str) -> Any:
    """Import the module of a third-party package; raise AbsentPackage if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise AbsentPackage(
            f"The environment `{environment}` needs the package {module.partition('.')[0]}, which is not installed. Install it with "
            f"`pip install {install}`."
        ) from error


def check_alone(agents: Sequence[str], what: str) -> None:
    """Raise ConfigError unless there is one agent."""
    if len(agents) != 1:
        raise ConfigError(
            f"{what} supports only one agent, but the team has {len(agents)} ({', '.join(agents)}). Set `team.agents: 1`."
        )


def one_text(actions: Mapping[str, str], agents: Sequence[str], final: str | None) -> tuple[str, str]:
    """Return the agent that moves in a conversation and its text: `final`, or the only text. Raise EpisodeError if neither exists."""
    require_agents(actions, agents)
    if len(actions) != 1 and final is None:
        raise EpisodeError(
            f"Only one agent can act at a time, but {len(actions)} sent a text. Use a workflow that names the final text."
        )
    mover = [*actions][-1]
    return mover, actions[mover] if final is None else final
