"""Defaults for environments and worlds of your own: what is left to write is the tasks, and what moves pay.

    class Dice(BaseEnvironment):
        name: Literal["dice:Dice"] = "dice:Dice"

        @property
        def sources(self): ...             # where tasks come from, in words
        def task(self, split, index): ...  # the task at an index
        def start(self, task, agents, seed): return DiceWorld(task, agents)

    class DiceWorld(BaseWorld):
        async def step(self, actions, final=None): ...

`docs/tutorials/own_environment.md` shows a whole one. Questions with one answer need less: see `questions.py`.
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
    """An environment for any team, with an endless supply of tasks, whose episodes pay each agent from 0 to 1.

    A subclass adds `name`, `sources`, `task` and `start`, and overrides what differs; `kapelle.environment.Environment`
    says what each is asked for.
    """

    @property
    def reward_range(self) -> tuple[float, float]:
        """Smallest and largest total that one agent can earn in an episode."""
        return (0.0, 1.0)

    def check(self, agents: Sequence[str]) -> None:
        """Accept any team; an override raises ConfigError for teams that cannot play."""

    def size(self, split: Split) -> int | None:
        """Return None: the supply of tasks is endless."""
        return None

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        """Refuse settings fields by the names of what an environment is asked for; a property or method says them."""
        super().__pydantic_init_subclass__(**given)
        for part in ("reward_range", "sources", "check", "size", "task", "start"):
            if part in cls.model_fields:
                raise TypeError(
                    f"{cls.__name__}.{part} is a settings field: as annotated, recipes could change it. Write "
                    f"`{part}` as a {'property' if part in {'reward_range', 'sources'} else 'method'}."
                )


def need_movers(actions: Mapping[str, str], movers: Sequence[str]) -> None:
    """Raise EpisodeError unless exactly those acted whose turn it is."""
    if set(actions) != set(movers) or not actions:
        raise EpisodeError(f"It is the turn of {tuple(movers)}, not of {tuple(actions)}.")


def _ascending(rewards: tuple[float, float]) -> tuple[float, float]:
    if rewards[0] >= rewards[1]:
        raise ValueError(f"`rewards: {list(rewards)}` is no range. Put the lower end first")
    return rewards


class StatedRewards(Settings):
    """Settings of an environment that others wrote: how much it can pay is the user's to say."""

    rewards: Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_ascending)] = (0.0, 1.0)
    """Least and greatest total of an agent in an episode, before penalties; a total outside this range is rejected."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range of `rewards`."""
        return self.rewards


class BaseWorld:
    """An episode in which all agents read the task's question and move at once, until `over`.

    A subclass adds `step`, which returns what the moves are paid at once, and sets `rewards`, `success` and, at the
    end, `over`; it overrides `observe` for private views and `movers` where agents take turns.
    """

    def __init__(self, task: Task, agents: Sequence[str]) -> None:
        """Begin an episode on a task for these agents, in seat order."""
        self.task, self.agents = task, tuple(agents)
        self.over = False
        self.rewards: dict[str, float] = {}
        """What each agent is paid at the end, beside what its moves were paid."""
        self.success: float | None = None
        """The team's score in [0, 1]."""

    def observe(self, agent: str) -> str:
        """Return what this agent may see now: the question."""
        return self.task.question

    def movers(self) -> tuple[str, ...]:
        """Return all agents while the episode lasts, then an empty sequence."""
        return () if self.over else self.agents

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Take the texts of the agents that moved; return what each is paid for its move now (often nothing)."""
        raise NotImplementedError

    def outcome(self) -> Outcome:
        """Return how it ended."""
        return Outcome(self.rewards, self.success)

    async def close(self) -> None:
        """Free the resources of the world; there are none by default."""


# -------- What every view of a game begins with: its rules, and whether players may think before a move

# -------- Reasoning before a move: `<think>…</think>`, then the move
#
# The move is read after the last `</think>`, so that nothing written inside is ever made. A `<think>` that is not
# closed leaves no move, wherever it stands. An opening tag may be missing: chat templates put it into the prompt.

_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)

INVITATION = "You may think first, between <think> and </think>; only what you write after that is your move."
"""What a player reads where thinking is allowed."""


def spoken(text: str) -> str | None:
    """Return what follows the last `</think>` of a text, its part after thinking. None if a `<think>` stays open."""
    tags = list(_TAG.finditer(text))
    if not tags:
        return text
    return text[tags[-1].end() :] if tags[-1][1] else None


def without_tags(text: str) -> str:
    """Return a text without the tags themselves."""
    return _TAG.sub("", text)


# -------- Games that are played again and again: nothing but the seed tells one match from another


class Endless(Settings):
    """Base of environments whose tasks are matches: a task is one match, and its text is empty."""

    def size(self, split: Split) -> int | None:
        """Return None: the supply of matches is endless."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Return one match."""
        return Task(f"{split}-{index}", "")


RULES = ("full", "short", "none")
"""What `rules` may say beside a text of the user's own."""


class GameSettings(Endless):
    """What every game lets a recipe set."""

    rules: str | None = None
    """What stands before every view: `full` or `short` rules, `none`, or a text of your own; null is `full`, and `none`
    where the wording is `short`."""
    thinking: bool = False
    """True allows `<think>…</think>` before a move, which is then read after the last `</think>`."""

    @field_validator("rules")
    @classmethod
    def _a_known_word_or_a_text(cls, rules: str | None) -> str | None:
        if rules is not None and rules not in RULES and len(rules.split()) < 2:
            known = ", ".join(f"`{word}`" for word in RULES)
            raise ValueError(f"`rules` is {known} or the rules themselves.{did_you_mean(rules, RULES)}")
        return rules

    def head(self, full: str, short: str, unset: str = "full") -> str:
        """Return what stands before every view, given a game's rules in full and in short; possibly empty."""
        word = self.rules or unset
        text = {"full": full, "short": short, "none": ""}.get(word, word)
        return "\n".join(part for part in (text, INVITATION if self.thinking else "") if part)

    def move_in(self, text: str) -> str | None:
        """Return the part of a text in which a move is looked for; None if thinking stays open."""
        return spoken(text) if self.thinking else text

    def check_moves(self) -> None:
        """Raise ConfigError where players think before they move; part of `Enumerable`."""
        if self.thinking:
            raise ConfigError(
                "What a policy plays after thinking has no exact probability: it is a sum over all thoughts. Set "
                "`environment.thinking: false`."
            )
