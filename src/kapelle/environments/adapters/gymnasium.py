"""Gymnasium environments (2407.17032) that are played in text: actions are a text or a number."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from kapelle.environments.adapters.plain import check_alone
from kapelle.environments.adapters.stepping import (
    SteppingWorld,
    actions_text,
    legal_numbers,
    observation_text,
    read_number,
)
from kapelle.environments.base import Endless
from kapelle.errors import ConfigError
from kapelle.types import Json, Split, Task


class Gymnasium(Endless):
    """One agent in an environment by its id; discrete actions are written as numbers, texts as they are."""

    name: Literal["gymnasium"] = "gymnasium"
    id: str
    """As `gymnasium.make` takes it, `module:Id-v0` included."""
    arguments: Mapping[str, Json] = Field(default={})
    """Keyword arguments of `gymnasium.make`."""
    rewards: tuple[FiniteFloat, FiniteFloat] = (0.0, 1.0)
    """Least and greatest total of an episode before penalties; a total outside this range fails the episode."""
    penalty: FiniteFloat = Field(default=-1.0, le=0.0)
    """Cost of an illegal action, which is replaced by a random legal one."""
    max_steps: int = Field(default=100, ge=1)
    """Steps after which an episode is cut short."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range of `rewards`, less the penalty of every step."""
        return (self.rewards[0] + self.penalty * self.max_steps, self.rewards[1])

    @property
    def sources(self) -> Mapping[Split, str]:
        """The environment itself; only the seeds differ."""
        return {"train": f"episodes of {self.id}, by seed", "test": f"episodes of {self.id}, other seeds"}

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError for two agents, a missing package, an unknown id, or actions that cannot be written as text."""
        check_alone(agents, self.id)
        made = self._make()
        try:
            legal_numbers(made.action_space, None)
        except TypeError as error:
            raise ConfigError(f"environment.id {self.id}: {error}. Take another, or wrap it.") from error
        finally:
            made.close()

    def _make(self) -> Any:
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError(
                "The environment `gymnasium` needs the package gymnasium, which is not installed. "
                "Install it with `pip install 'kapelle[games]'`."
            ) from error
        try:
            return gymnasium.make(self.id, **self.arguments)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"environment.id {self.id} cannot be made: {error}") from error

    def start(self, task: Task, agents: Sequence[str], seed: int) -> SteppingWorld:
        """Make the environment of one episode."""
        return SteppingWorld(_GymStepper(self._make(), self.penalty, seed), agents[0], self.max_steps, seed)


class _GymStepper:
    """A Gymnasium environment in text."""

    def __init__(self, made: Any, penalty: float, seed: int) -> None:
        self._made = made
        self._penalty = penalty
        self._fallback = random.Random(f"{seed}/invalid")
        self._legal: list[int] | None = None

    def reset(self, seed: int) -> str:
        """Start by the seed."""
        return self._show(*self._made.reset(seed=seed % 2**31))

    def step(self, text: str) -> tuple[str, float, bool, bool]:
        """Act by the text; an illegal action is replaced by a random one and costs a penalty."""
        action, cost = self._read(text)
        seen, reward, terminated, truncated, info = self._made.step(action)
        return self._show(seen, info), float(reward) + cost, bool(terminated), bool(truncated)

    def _show(self, seen: Any, info: Mapping[str, Any]) -> str:
        self._legal = legal_numbers(self._made.action_space, info.get("action_mask"))
        return "\n".join(part for part in (observation_text(seen), actions_text(self._legal)) if part)

    def _read(self, text: str) -> tuple[Any, float]:
        if self._legal is None:
            return (text, 0.0) if self._made.action_space.contains(text) else ("", self._penalty)
        number = read_number(text, self._legal)
        return (self._fallback.choice(self._legal), self._penalty) if number is None else (number, 0.0)

    def close(self) -> None:
        """Close the environment."""
        self._made.close()
