"""Adapter for a user's own environment class with the methods `reset()` and `step(action) -> observation, reward`.

    class Countdown:
        def reset(self):
            self.left = 3
            return "3 left"

        def step(self, action):
            self.left -= 1
            return (f"{self.left} left" if self.left else None), float(action == "wait")

The episode ends if the observation is None, if `step` returns a third value that is true, or after `max_steps` steps. If `reset`
has a parameter `seed`, it receives the episode's seed.
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
    """An environment class that does not depend on kapelle, with a single agent."""

    name: Literal["plain"] = "plain"
    path: str
    """The environment class, written as `module:Class` or `path/file.py:Class`."""
    arguments: Mapping[str, Json] = Field(default={})
    """Keyword arguments for the class. Each episode constructs a new object of the class."""
    max_steps: int = Field(default=20, ge=1)
    """The maximum number of steps per episode."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the train and test episodes. The two splits use different seeds."""
        return {
            "train": f"episodes of {self.path}, by seed",
            "test": f"episodes of {self.path}, with different seeds",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if the team does not have exactly one agent or the class lacks `reset` or `step`."""
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
        """Construct the environment object for one episode and return the episode's state."""
        made = make_own(
            find_class("plain environment", self.path, {}), self.arguments, f"environment.path: {self.path}"
        )
        return _PlainState(made, self.path, agents[0], self.max_steps, seed)


class SteppingState(ABC):
    """The state of an episode in which one agent acts in a third-party environment and every step gives a reward.

    A subclass implements `reset`, which starts the episode, and `act`, which applies an action.
    """

    def __init__(self, agent: str, max_steps: int, seed: int) -> None:
        self._agent = agent
        self._left = max_steps
        self._seen = self.reset(seed)
        self._over = self._cut = False
        self._total = 0.0

    @abstractmethod
    def reset(self, seed: int) -> str:
        """Start the episode and return the first observation."""

    @abstractmethod
    def act(self, text: str) -> tuple[str, float, bool, bool]:
        """Apply an action and return a tuple (observation, reward, terminated, truncated).

        `terminated` states whether the episode is over, and `truncated` whether the environment reached one of its limits.
        """

    def observe(self, agent: str) -> str:
        """Return the last observation."""
        return self._seen

    def movers(self) -> tuple[str, ...]:
        """Return the agent, or an empty tuple if the episode is over or has reached the maximum number of steps."""
        return () if self._over or self._cut or self._left == 0 else (self._agent,)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Apply the agent's action and return its reward. Raises EpisodeError if the episode is over or a different agent acts."""
        need_movers(actions, self.movers())
        self._left -= 1
        self._seen, reward, self._over, self._cut = self.act(actions[self._agent])
        self._total += reward
        return {self._agent: reward}

    def outcome(self) -> Outcome:
        """Return the outcome of the episode. The outcome is `truncated` if a limit on the number of steps ended the episode."""
        return Outcome({self._agent: 0.0}, None, {"total": self._total}, truncated=not self._over)

    @abstractmethod
    async def close(self) -> None:
        """Release the environment's resources."""


class _PlainState(SteppingState):
    """The state of an episode of a user's environment object. The results of its methods `reset` and `step` are validated."""

    def __init__(self, made: Any, path: str, agent: str, max_steps: int, seed: int) -> None:
        self._made, self._path = made, path
        super().__init__(agent, max_steps, seed)

    def reset(self, seed: int) -> str:
        """Start the episode and return the first observation. The seed is passed to the object's `reset` if it has a parameter `seed`."""
        takes_seed = "seed" in inspect.signature(self._made.reset).parameters
        seen = self._made.reset(seed=seed) if takes_seed else self._made.reset()
        if not isinstance(seen, str):
            raise EpisodeError(
                f"`reset` of {self._path} returned {type(seen).__name__}. Return the first observation as a string."
            )
        return seen

    def act(self, text: str) -> tuple[str, float, bool, bool]:
        """Pass the text to the object's `step` and return the result. Raises EpisodeError if the result is invalid."""
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
        """Call the `close` method of the environment object if there is one."""
        if callable(inspect.getattr_static(self._made, "close", None)):
            self._made.close()


def make_own(make: Any, arguments: Mapping[str, Json], what: str, part: str = "reset") -> Any:
    """Call a user's class or function and return the object that it creates.

    Raises ConfigError, with a message that begins with `what`, if the call fails or the object has no attribute named `part`.
    """
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
    """Import the module of a third-party package. Raises AbsentPackage if the package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise AbsentPackage(
            f"The environment `{environment}` needs the package {module.partition('.')[0]}, which is not installed. Install it with "
            f"`pip install {install}`."
        ) from error


def check_alone(agents: Sequence[str], what: str) -> None:
    """Raise ConfigError if the team does not have exactly one agent."""
    if len(agents) != 1:
        raise ConfigError(
            f"{what} supports only one agent, but the team has {len(agents)} ({', '.join(agents)}). Set `team.agents: 1`."
        )


def one_text(actions: Mapping[str, str], agents: Sequence[str], final: str | None) -> tuple[str, str]:
    """Return the agent that moves in a conversation, and its text.

    The text is `final` if it is given, otherwise the only text in `actions`. Raises EpisodeError if there are several texts and no
    `final`.
    """
    require_agents(actions, agents)
    if len(actions) != 1 and final is None:
        raise EpisodeError(
            f"Only one agent can act at a time, but {len(actions)} sent a text. Use a workflow that names the final text."
        )
    mover = [*actions][-1]
    return mover, actions[mover] if final is None else final
