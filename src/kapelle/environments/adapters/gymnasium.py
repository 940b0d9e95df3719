"""Adapter for Gymnasium environments (arXiv:2407.17032). Observations and actions are converted to and from strings."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from kapelle.environments.adapters.plain import SteppingState, check_alone, make_own, need_package
from kapelle.environments.base import Endless, StatedRewards
from kapelle.errors import ConfigError, did_you_mean
from kapelle.runtime.plugins import find_module, importable_here, split_target
from kapelle.types import Json, Split, Task


class Gymnasium(Endless, StatedRewards):
    """A Gymnasium environment with a single agent. The agent writes a discrete action as a number."""

    name: Literal["gymnasium"] = "gymnasium"
    id: str
    """The id of the environment for `gymnasium.make`, such as `module:Id-v0`, or the user's own class or function, such as `mine:Env`
    or `./mine.py:Env`."""
    arguments: Mapping[str, Json] = Field(default={})
    """Keyword arguments for `gymnasium.make`."""
    penalty: FiniteFloat = Field(default=-1.0, le=0.0)
    """The penalty that is added to the reward when the agent writes an illegal action. A random legal action replaces the illegal
    action."""
    max_steps: int = Field(default=100, ge=1)
    """The maximum number of steps per episode."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range of `rewards`, with the minimum lowered by one penalty per step."""
        return (self.rewards[0] + self.penalty * self.max_steps, self.rewards[1])

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the train and test episodes. The two splits use different seeds."""
        return {
            "train": f"episodes of {self.id}, by seed",
            "test": f"episodes of {self.id}, with different seeds",
        }

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError if there are several agents, the package is missing, the id is unknown or actions cannot be written as text."""
        check_alone(agents, self.id)
        made = self._make()
        try:
            legal_numbers(made.action_space, None)
        except TypeError as error:
            raise ConfigError(
                f"environment.id {self.id}: {error}. Choose another environment, or wrap this one."
            ) from error
        finally:
            made.close()

    def _make(self) -> Any:
        gymnasium = need_package("gymnasium", "gymnasium", "'kapelle[games]'")
        module_name, name = split_target(self.id)
        what = f"environment.id: {self.id}"
        known: list[str] = []
        if name or self.id.endswith(".py"):
            module = find_module(module_name, what, name)  # the module may register ids
            if name not in gymnasium.registry and name in vars(module):
                return make_own(vars(module)[name], self.arguments, what, "action_space")
            known = [word for word in vars(module) if not word.startswith("_")]
        try:
            with importable_here():  # an entry point may be a string, `mine:Env`
                return gymnasium.make(name or self.id, **self.arguments)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            hint = did_you_mean(name, known) if name else " Write your own class as `module:Class`."
            raise ConfigError(f"environment.id {self.id} cannot be created: {error}{hint}") from error

    def start(self, task: Task, agents: Sequence[str], seed: int) -> SteppingState:
        """Create the environment for one episode and return the episode's state."""
        return _GymState(self._make(), self.penalty, agents[0], self.max_steps, seed)


class _GymState(SteppingState):
    """The state of one episode of a Gymnasium environment."""

    def __init__(self, made: Any, penalty: float, agent: str, max_steps: int, seed: int) -> None:
        self._made, self._penalty = made, penalty
        self._fallback = random.Random(f"{seed}/invalid")
        self._legal: list[int] | None = None
        super().__init__(agent, max_steps, seed)

    def reset(self, seed: int) -> str:
        """Reset the environment with the seed and return the first observation as a string."""
        return self._show(*self._made.reset(seed=seed % 2**31))

    def act(self, text: str) -> tuple[str, float, bool, bool]:
        """Take the action that the text names.

        An illegal action is replaced with a random legal action, and the penalty is added to the reward.
        """
        space = self._made.action_space
        action, cost = read_action(text, space, self._legal), 0.0
        if action is None:
            action, cost = random_action(space, self._legal, self._fallback), self._penalty
        seen, reward, terminated, truncated, info = self._made.step(action)
        return self._show(seen, info), float(reward) + cost, bool(terminated), bool(truncated)

    def _show(self, seen: Any, info: Mapping[str, Any]) -> str:
        self._legal = legal_numbers(self._made.action_space, info.get("action_mask"))
        return "\n".join(part for part in (observation_text(seen), actions_text(self._legal)) if part)

    async def close(self) -> None:
        """Close the Gymnasium environment."""
        self._made.close()


# -------- Observations and actions in Gymnasium's and PettingZoo's spaces as text


def observation_text(value: Any) -> str:
    """Return an observation as a string. Each row of an array and each entry of a dictionary is written on a separate line.

    The mask of legal actions is omitted, because `actions_text` lists the legal actions.
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
    """Return the legal action numbers of a discrete space, or None if the space is a text space.

    If a mask is given, only the actions that it allows are returned. Raises TypeError for any other kind of space.
    """
    kind = type(space).__name__
    if kind == "Text":
        return None
    if kind != "Discrete":
        raise TypeError(f"actions in the space {space} cannot be written as a number or a string")
    numbers = [int(space.start) + k for k in range(int(space.n))]
    if mask is None:
        return numbers
    return [number for number, legal in zip(numbers, mask, strict=True) if legal]


def actions_text(legal: Sequence[int] | None) -> str:
    """Return a line that lists the legal actions, or an empty string for a text space (if `legal` is None)."""
    return "" if legal is None else f"Legal actions: <{' | '.join(map(str, legal))}>"


def read_action(text: str, space: Any, legal: Sequence[int] | None) -> int | str | None:
    """Return the legal action that the text names, or None if the text names no legal action. In a text space, `legal` is None."""
    if legal is None:
        return text if space.contains(text) else None
    return next((number for number in legal if text.strip() == str(number)), None)


def random_action(space: Any, legal: Sequence[int] | None, draw: random.Random) -> int | str:
    """Return a random legal action. In a text space, return a random string of the minimum length."""
    if legal is not None:
        return draw.choice(legal)
    return "".join(draw.choices(space.character_list, k=space.min_length))
