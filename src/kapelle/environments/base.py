"""Base classes for your own environments: a subclass adds the tasks and the rewards for moves.

    class Dice(BaseEnvironment):
        name: Literal["dice:Dice"] = "dice:Dice"

        @property
        def sources(self): ...             # a description of where tasks come from
        def task(self, split, index): ...  # the task at an index
        def start(self, task, agents, seed): return DiceState(task, agents)

    class DiceState(BaseState):
        async def step(self, actions, final=None): ...

`docs/tutorials/own_environment.md` has a complete example. Questions with one answer need less code: see `questions.py`.
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
    """An environment for any team, with an endless supply of tasks and rewards from 0 to 1.

    A subclass adds `name`, `sources`, `task` and `start`, and overrides defaults that do not fit; see `kapelle.environment.Environment`.
    """

    @property
    def reward_range(self) -> tuple[float, float]:
        """Minimum and maximum return of one agent in an episode."""
        return (0.0, 1.0)

    def check(self, agents: Sequence[str]) -> None:
        """Accept any team; an override raises ConfigError for a team that does not fit."""

    def size(self, split: Split) -> int | None:
        """Return None: the supply of tasks is endless."""
        return None

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        """Raise TypeError if a settings field has the name of a method or property of environments."""
        super().__pydantic_init_subclass__(**given)
        for part in ("reward_range", "sources", "check", "size", "task", "start"):
            if part in cls.model_fields:
                raise TypeError(
                    f"{cls.__name__}.{part} is annotated, so it is a setting that recipes can change. Write "
                    f"`{part}` as a {'property' if part in {'reward_range', 'sources'} else 'method'}."
                )


def need_movers(actions: Mapping[str, str], movers: Sequence[str]) -> None:
    """Raise EpisodeError unless exactly the movers acted."""
    if set(actions) != set(movers) or not actions:
        raise EpisodeError(f"It is the turn of {tuple(movers)}, not of {tuple(actions)}.")


def _ascending(rewards: tuple[float, float]) -> tuple[float, float]:
    if rewards[0] >= rewards[1]:
        raise ValueError(f"`rewards: {list(rewards)}` must be a range with the lower end first")
    return rewards


class StatedRewards(Settings):
    """Settings of third-party environments, for which the user states the range of rewards."""

    rewards: Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_ascending)] = (0.0, 1.0)
    """Minimum and maximum return of an agent in an episode, before penalties; a return outside this range raises an error."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range given by `rewards`."""
        return self.rewards


class BaseState:
    """An episode in which all agents read the task's question and move at once, until `over`.

    A subclass adds `step`, which returns immediate rewards and sets `rewards`, `success` and, at the end, `over`. The subclass
    overrides `observe` if agents have private observations, and `movers` if they take turns.
    """

    def __init__(self, task: Task, agents: Sequence[str]) -> None:
        """Begin an episode of a task for these agents, which are in team order."""
        self.task, self.agents = task, tuple(agents)
        self.over = False
        self.rewards: dict[str, float] = {}
        """Terminal reward of each agent, in addition to the rewards for moves."""
        self.success: float | None = None
        """The team's score in [0, 1]."""

    def observe(self, agent: str) -> str:
        """Return this agent's observation: the question."""
        return self.task.question

    def movers(self) -> tuple[str, ...]:
        """Return all agents until the end, then an empty tuple."""
        return () if self.over else self.agents

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Apply the actions of the agents that moved; return the immediate reward of each (often an empty mapping)."""
        raise NotImplementedError

    def outcome(self) -> Outcome:
        """Return the outcome."""
        return Outcome(self.rewards, self.success)

    async def close(self) -> None:
        """Free all resources; there are none by default."""


# -------- Reasoning before a move: `<think>…</think>`, then the move
#
# The move is read after the last `</think>`, so text inside the tags is never a move. If a `<think>` stays open, there is no
# move. An opening tag may be missing: chat templates put it into the prompt.

_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)

INVITATION = "You may think first, between <think> and </think>; only what you write after that is your move."
"""The invitation in an observation if thinking is allowed."""


def spoken(text: str) -> str | None:
    """Return the part of a text after the last `</think>`. None if a `<think>` stays open."""
    tags = list(_TAG.finditer(text))
    if not tags:
        return text
    return text[tags[-1].end() :] if tags[-1][1] else None


def without_tags(text: str) -> str:
    """Return a text without the tags, but with the text between them."""
    return _TAG.sub("", text)


# -------- Games: episodes differ only in their seeds


class Endless(Settings):
    """Base class of environments whose tasks are games: a task is one game, and its text is empty."""

    def size(self, split: Split) -> int | None:
        """Return None: the supply of games is endless."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Return one game."""
        return Task(f"{split}-{index}", "")


RULES = ("full", "short", "none")
"""Predefined values of `rules`; any other value is the user's own text."""


class GameSettings(Endless):
    """Settings of every game."""

    rules: str | None = None
    """The beginning of every observation: `full` or `short` rules, `none`, or your own text; null means `none` if the
    wording is `short`, else `full`."""
    thinking: bool = False
    """True allows `<think>…</think>` before a move, which is then read after the last `</think>`."""

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
        """Return the beginning of every observation, which may be empty, given a game's full and short rules."""
        word = self.rules or unset
        text = {"full": full, "short": short, "none": ""}.get(word, word)
        return "\n".join(part for part in (text, INVITATION if self.thinking else "") if part)

    def move_in(self, text: str) -> str | None:
        """Return the part of a text that contains the move; None if thinking stays open."""
        return spoken(text) if self.thinking else text

    def check_moves(self) -> None:
        """Raise ConfigError if players can think before they move; part of the protocol `Enumerable`."""
        if self.thinking:
            raise ConfigError(
                "Moves after thinking have no exact probabilities. Set `environment.thinking: false`."
            )
