"""Worlds for one player that somebody else wrote: `reset` gives an observation, `step` the next one and a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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
        """Return the agent until the world is over or all steps are used."""
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
        """Return an outcome without further pay; `truncated` where a limit of steps ended it, ours or its own."""
        return Outcome({self._agent: 0.0}, None, {"total": self._total}, truncated=not self._over)

    async def close(self) -> None:
        """Close the world behind."""
        self._stepper.close()


# -------- Observations and actions of Gymnasium's and PettingZoo's spaces as text


def observation_text(value: Any) -> str:
    """Return an observation as a player reads it: text as it is, arrays as nested lists, parts line by line.

    A mask of legal actions is left out; `actions_text` says it in words.
    """
    import numpy as np

    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        parts = {key: part for key, part in value.items() if key != "action_mask"}
        if len(parts) == 1:
            return observation_text(next(iter(parts.values())))
        return "\n".join(f"{key}: {observation_text(part)}" for key, part in parts.items())
    if isinstance(value, tuple | list):
        return " ".join(observation_text(part) for part in value)
    if isinstance(value, np.ndarray | np.generic):
        return _rows(value.tolist())
    return str(value)


def _rows(value: Any) -> str:
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(int(value))
    inner = [_rows(part) for part in value]
    return ("\n" if any(isinstance(part, list) for part in value) else " ").join(inner)


def legal_numbers(space: Any, mask: Any) -> list[int] | None:
    """Return the legal numbers of a discrete space, by its mask where there is one; None for a space of text.

    Raises TypeError for any other space, because its actions cannot be written as text.
    """
    kind = type(space).__name__
    if kind == "Text":
        return None
    if kind != "Discrete":
        raise TypeError(f"actions of the space {space} cannot be written as a number or a text")
    numbers = [int(space.start) + k for k in range(int(space.n))]
    if mask is None:
        return numbers
    return [number for number, legal in zip(numbers, mask, strict=True) if legal]


def actions_text(legal: Sequence[int] | None) -> str:
    """Return the legal actions in words, empty where any text will do."""
    return "" if legal is None else f"Legal actions: <{' | '.join(map(str, legal))}>"


def read_number(text: str, legal: Sequence[int]) -> int | None:
    """Return the legal number that a text is, None for anything else."""
    said = text.strip()
    return next((number for number in legal if said == str(number)), None)
