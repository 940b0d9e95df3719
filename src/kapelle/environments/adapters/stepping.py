"""Worlds for one player that somebody else wrote: `reset` gives an observation, `step` the next one and a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kapelle.environment import Outcome
from kapelle.errors import EpisodeError


class Stepper(Protocol):
    """One episode of such a world, in text."""

    def reset(self, seed: int) -> str:
        """Start and return the first observation."""
        ...

    def step(self, text: str) -> tuple[str, float, bool, bool]:
        """Act; return the next observation, the reward, whether it is over, and whether a limit of its own cut it short."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class SteppingWorld:
    """Lets one agent act until the world is over or `max_steps` are taken; each reward is paid at once."""

    def __init__(self, stepper: Stepper, agent: str, max_steps: int, seed: int) -> None:
        self._stepper = stepper
        self._agent = agent
        self._left = max_steps
        self._seen = stepper.reset(seed)
        self._over = self._cut = False
        self._total = 0.0

    def observe(self, agent: str) -> str:
        """Return the newest observation."""
        return self._seen

    def movers(self) -> tuple[str, ...]:
        """Return the agent until the world is over or no step is left."""
        return () if self._over or self._cut or self._left == 0 else (self._agent,)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Act and return what it paid; EpisodeError when it is over or somebody else acts."""
        if set(actions) != set(self.movers()) or not actions:
            raise EpisodeError(f"It is the turn of {self.movers()}, not of {tuple(actions)}.")
        self._left -= 1
        self._seen, reward, self._over, self._cut = self._stepper.step(actions[self._agent])
        self._total += reward
        return {self._agent: reward}

    def outcome(self) -> Outcome:
        """Return that nothing is left to pay; `truncated` where a limit of steps ended it, ours or its own."""
        return Outcome({self._agent: 0.0}, None, {"total": self._total}, truncated=not self._over)

    async def close(self) -> None:
        """Close the world behind."""
        self._stepper.close()
