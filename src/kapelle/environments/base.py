"""Base classes for a user's own environments. A subclass adds the tasks and the rewards for moves.

    class Dice(BaseEnvironment):
        name: Literal["dice:Dice"] = "dice:Dice"

        @property
        def sources(self): ...             # a description of where tasks come from
        def task(self, split, index): ...  # the task at an index
        def start(self, task, agents, seed): return DiceState(task, agents)

    class DiceState(BaseState):
        async def step(self, actions, final=None): ...

A complete example is in `docs/tutorials/own_environment.md`. An environment of questions with one answer needs less code with the
base classes in `questions.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, FiniteFloat, field_validator

from kapelle.environment import Outcome
from kapelle.errors import ConfigError, EpisodeError, did_you_mean
from kapelle.settings.base import Settings
from kapelle.types import Split, Task


class BaseEnvironment(Settings):
    """An environment that accepts any team, with an unlimited number of tasks and rewards from 0 to 1.

    A subclass adds `name`, `sources`, `task` and `start`, and overrides the defaults that do not fit.
    `kapelle.environment.Environment` documents all methods.
    """

    @property
    def reward_range(self) -> tuple[float, float]:
        """The minimum and maximum return of one agent in an episode."""
        return (0.0, 1.0)

    def check(self, agents: Sequence[str]) -> None:
        """Accept any team. An override of this method raises ConfigError if a team does not fit."""

    def size(self, split: Split) -> int | None:
        """Return None, because the number of tasks is unlimited."""
        return None

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        """Raise TypeError if a settings field has the same name as a method or property of environments."""
        super().__pydantic_init_subclass__(**given)
        for part in ("reward_range", "sources", "check", "size", "task", "start"):
            if part in cls.model_fields:
                raise TypeError(
                    f"{cls.__name__}.{part} is annotated, so it is a setting that recipes can change. Write "
                    f"`{part}` as a {'property' if part in {'reward_range', 'sources'} else 'method'}."
                )


def need_movers(actions: Mapping[str, str], movers: Sequence[str]) -> None:
    """Raise EpisodeError if the agents that acted are not exactly the agents that may move."""
    if set(actions) != set(movers) or not actions:
        raise EpisodeError(f"It is the turn of {tuple(movers)}, not of {tuple(actions)}.")


def _ascending(rewards: tuple[float, float]) -> tuple[float, float]:
    if rewards[0] >= rewards[1]:
        raise ValueError(f"`rewards: {list(rewards)}` must be a range with the lower end first")
    return rewards


class StatedRewards(Settings):
    """Settings of third-party environments. The user states the range of the rewards."""

    rewards: Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_ascending)] = (0.0, 1.0)
    """The minimum and maximum return of an agent in an episode, before penalties. A return outside this range raises an error."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The minimum and maximum return of an agent, as set in `rewards`."""
        return self.rewards


class BaseState:
    """The state of an episode in which all agents read the task's question and move simultaneously until `over` is true.

    A subclass adds `step`, which returns immediate rewards and sets `rewards`, `success` and, at the end, `over`. The subclass
    overrides `observe` if agents have private observations, and `movers` if agents take turns.
    """

    def __init__(self, task: Task, agents: Sequence[str]) -> None:
        """Start an episode of a task. The agents are given in team order."""
        self.task, self.agents = task, tuple(agents)
        self.over = False
        self.rewards: dict[str, float] = {}
        """The terminal reward of each agent, in addition to the rewards for moves."""
        self.success: float | None = None
        """The team's score in [0, 1]."""

    def observe(self, agent: str) -> str:
        """Return the agent's observation, which is the question by default."""
        return self.task.question

    def movers(self) -> tuple[str, ...]:
        """Return all agents, or an empty tuple after the end of the episode."""
        return () if self.over else self.agents

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Apply the actions of the agents that moved. Returns the immediate reward of each agent (often an empty mapping)."""
        raise NotImplementedError

    def outcome(self) -> Outcome:
        """Return the outcome of the episode with the terminal rewards and the team's score."""
        return Outcome(self.rewards, self.success)

    async def close(self) -> None:
        """Release all resources of the episode. The default implementation does nothing."""


# -------- Reasoning before a move: `<think>…</think>`, then the move
#
# The move is read after the last `</think>`, so text inside the tags is never a move. If a `<think>` stays open, there is no
# move. An opening tag may be missing: chat templates put it into the prompt.

_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)

INVITATION = "You may think first, between <think> and </think>; only what you write after that is your move."
"""The instruction in an observation that allows the player to think before a move."""


def spoken(text: str) -> str | None:
    """Return the part of a text after the last `</think>`, or None if a `<think>` tag is not closed."""
    tags = list(_TAG.finditer(text))
    if not tags:
        return text
    return text[tags[-1].end() :] if tags[-1][1] else None


def without_tags(text: str) -> str:
    """Return the text without its `<think>` and `</think>` tags. The text between the tags is kept."""
    return _TAG.sub("", text)


# -------- Games: episodes differ only in their seeds


class Endless(Settings):
    """Base class of environments whose tasks are episodes of a game. Each task is one episode, and its question is empty."""

    def size(self, split: Split) -> int | None:
        """Return None, because the number of episodes is unlimited."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index. The question of the task is empty."""
        return Task(f"{split}-{index}", "")


RULES = ("full", "short", "none")
"""Predefined values of the setting `rules`. Any other value is the text of the rules itself."""


class GameSettings(Endless):
    """Settings that all games have in common."""

    rules: str | None = None
    """The text at the beginning of every observation, which is `full`, `short`, `none`, or the text of the rules itself. If null,
    `none` is used if the setting `wording` is `short`, and `full` otherwise."""
    thinking: bool = False
    """Whether players may write `<think>…</think>` before a move. If true, the move is the text after the last `</think>`."""

    @field_validator("rules")
    @classmethod
    def _a_known_word_or_a_text(cls, rules: str | None) -> str | None:
        if rules is not None and rules not in RULES and len(rules.split()) < 2:
            known = ", ".join(f"`{word}`" for word in RULES)
            raise ValueError(
                f"`rules` must be {known}, or the text of the rules.{did_you_mean(rules, RULES)}"
            )
        return rules

    def head(self, full: str, short: str, unset: str = "full") -> str:
        """Return the text at the beginning of every observation, which may be empty.

        `full` and `short` are the rules of the game in two lengths. `unset` is the value that is used if `rules` is null.
        """
        word = self.rules or unset
        text = {"full": full, "short": short, "none": ""}.get(word, word)
        return "\n".join(part for part in (text, INVITATION if self.thinking else "") if part)

    def move_in(self, text: str) -> str | None:
        """Return the part of a text that contains the move, or None if a `<think>` tag is not closed."""
        return spoken(text) if self.thinking else text

    def check_moves(self) -> None:
        """Raise ConfigError if players may think before they move. This method is part of the protocol `Enumerable`."""
        if self.thinking:
            raise ConfigError(
                "Moves after thinking have no exact probabilities. Set `environment.thinking: false`."
            )
