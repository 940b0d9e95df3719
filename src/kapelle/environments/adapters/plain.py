"""A class of your own as an environment: `reset()` and `step(action) -> observation, reward`.

    class Countdown:
        def reset(self):
            self.left = 3
            return "3 left"

        def step(self, action):
            self.left -= 1
            return (f"{self.left} left" if self.left else None), float(action == "wait")

It ends when the observation is None, when a third value says so, or after `max_steps`. A `reset` that takes an
argument `seed` is given the episode's.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from kapelle.environment import Outcome
from kapelle.environments.base import Endless, StatedRewards, need_movers
from kapelle.errors import ConfigError, EpisodeError
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import find_class
from kapelle.types import Json, Split, Task


class Plain(Endless, StatedRewards):
    """One agent in a class written independently of kapelle."""

    name: Literal["plain"] = "plain"
    path: str
    """`module:Class` or `path/file.py:Class`."""
    arguments: Mapping[str, Json] = Field(default={})
    """Keyword arguments of the class, which is constructed once for each episode."""
    max_steps: int = Field(default=20, ge=1)
    """Steps after which an episode is cut short."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """The class itself; only the seeds differ."""
        return {"train": f"episodes of {self.path}, by seed", "test": f"episodes of {self.path}, other seeds"}

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError unless there is one agent, and a class with `reset` and `step`."""
        check_alone(agents, self.path)
        found = find_class("plain environment", self.path, {})
        missing = [
            name for name in ("reset", "step") if not callable(inspect.getattr_static(found, name, None))
        ]
        if missing:
            raise ConfigError(
                f"environment.path: {self.path} has no method `{missing[0]}`. Add it to the class."
            )

    def start(self, task: Task, agents: Sequence[str], seed: int) -> SteppingWorld:
        """Make the object of one episode."""
        made = make_own(
            find_class("plain environment", self.path, {}), self.arguments, f"environment.path: {self.path}"
        )
        return _PlainWorld(made, self.path, agents[0], self.max_steps, seed)


class SteppingWorld(ABC):
    """Lets one agent act in a world that somebody else wrote, until it is over or `max_steps` are taken.

    Each reward is paid at once. A subclass says how the world begins, and what an action does.
    """

    def __init__(self, agent: str, max_steps: int, seed: int) -> None:
        self._agent = agent
        self._left = max_steps
        self._seen = self.reset(seed)
        self._over = self._cut = False
        self._total = 0.0

    @abstractmethod
    def reset(self, seed: int) -> str:
        """Start and return the first observation."""

    @abstractmethod
    def act(self, text: str) -> tuple[str, float, bool, bool]:
        """Act; return the next observation, the reward, whether it is over, and whether a limit of its own cut it short."""

    def observe(self, agent: str) -> str:
        """Return the newest observation."""
        return self._seen

    def movers(self) -> tuple[str, ...]:
        """Return the agent until the world is over or all steps are used."""
        return () if self._over or self._cut or self._left == 0 else (self._agent,)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Act and return what it paid; EpisodeError when it is over or somebody else acts."""
        need_movers(actions, self.movers())
        self._left -= 1
        self._seen, reward, self._over, self._cut = self.act(actions[self._agent])
        self._total += reward
        return {self._agent: reward}

    def outcome(self) -> Outcome:
        """Return an outcome without further pay; `truncated` where a limit of steps ended it, ours or its own."""
        return Outcome({self._agent: 0.0}, None, {"total": self._total}, truncated=not self._over)

    @abstractmethod
    async def close(self) -> None:
        """Free what the world holds."""


class _PlainWorld(SteppingWorld):
    """An object with `reset` and `step`, its answers checked."""

    def __init__(self, made: Any, path: str, agent: str, max_steps: int, seed: int) -> None:
        self._made, self._path = made, path
        super().__init__(agent, max_steps, seed)

    def reset(self, seed: int) -> str:
        """Start; a `reset` that takes a seed gets it."""
        takes_seed = "seed" in inspect.signature(self._made.reset).parameters
        seen = self._made.reset(seed=seed) if takes_seed else self._made.reset()
        if not isinstance(seen, str):
            raise EpisodeError(
                f"`reset` of {self._path} returned {type(seen).__name__}, not the observation's text."
            )
        return seen

    def act(self, text: str) -> tuple[str, float, bool, bool]:
        """Act; EpisodeError unless the answer is `observation, reward` or `observation, reward, over`."""
        said = self._made.step(text)
        if not isinstance(said, tuple) or len(said) not in {2, 3}:
            raise EpisodeError(
                f"`step` of {self._path} returned {said!r:.80}. It returns `observation, reward`, and as a third value "
                "whether it is over if it likes."
            )
        seen, reward = said[0], said[1]
        if not (seen is None or isinstance(seen, str)) or not isinstance(reward, int | float):
            raise EpisodeError(
                f"`step` of {self._path} returned {said!r:.80}: a text (or None) and a number go there."
            )
        if not math.isfinite(reward):
            raise EpisodeError(f"`step` of {self._path} paid {reward}.")
        return seen or "", float(reward), seen is None or (len(said) == 3 and bool(said[2])), False

    async def close(self) -> None:
        """Call the object's own `close` where it has one."""
        if callable(inspect.getattr_static(self._made, "close", None)):
            self._made.close()


def make_own(make: Any, arguments: Mapping[str, Json], what: str, part: str = "reset") -> Any:
    """Return what a class or function of the user's makes; ConfigError, which begins with `what`, where it raises or lacks `part`."""
    try:
        made = make(**arguments)
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be made with `environment.arguments: {dict(arguments)}`: {reason(error)}"
        ) from error
    if not hasattr(made, part):
        raise ConfigError(f"{what} makes {made!r:.60}, which has no `{part}`. Name a class of environments.")
    return made


def check_alone(agents: Sequence[str], what: str) -> None:
    """Raise ConfigError unless there is one agent."""
    if len(agents) != 1:
        raise ConfigError(
            f"{what} is for one agent, and the team has {len(agents)} ({', '.join(agents)}). Set `team.agents: 1`."
        )
