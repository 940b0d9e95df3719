"""Plain functions that pay: which arguments they take, and what they return.

A function is called once for each episode, and takes any of these by name:

    completion     text: the last one of the agent that is paid; for the team its answer
    completions    agent → its last text
    question       text that the agents read
    episode        the `kapelle.Episode`, with all its turns
    agent          name of the one that is paid; only where a function pays one agent
    and any column of the row, by its name

It returns a number, or None where it has nothing to say. It may be a coroutine.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kapelle.errors import ConfigError, EpisodeError, did_you_mean
from kapelle.metrics.statistics import finite
from kapelle.types import Episode, Json

GIVEN = ("completion", "completions", "question", "episode", "agent")
"""What a function may take besides the columns of its row."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function and the names of what it takes."""

    name: str
    function: Callable[..., Any]
    needs: tuple[str, ...]
    """Parameters without a default."""
    may_take: tuple[str, ...]
    """All its parameters."""
    takes_all: bool
    """Whether it has `**` for whatever else there is."""

    def check(self, columns: Collection[str], *, for_team: bool) -> None:
        """Raise ConfigError for a parameter that nothing fills, by its name."""
        for name in self.may_take:
            if name in GIVEN and name in columns:
                raise ConfigError(
                    f"The reward function `{self.name}` takes `{name}`, which is a column of the data and also what kapelle gives "
                    "it. Rename the column."
                )
        known = [*GIVEN[:-1], *([] if for_team else ["agent"]), *columns]
        for name in self.needs:
            if name == "agent" and for_team:
                raise ConfigError(
                    f"The reward function `{self.name}` takes `agent` and pays the whole team. Name its agent: "
                    f"`reward={{'NAME': {self.name}}}`."
                )
            if name not in known:
                raise ConfigError(
                    f"The reward function `{self.name}` takes `{name}`, which is neither one of {', '.join(GIVEN)} nor a column "
                    f"of every row ({', '.join(sorted(columns)) or 'there are none'}).{did_you_mean(name, known)}"
                )

    async def __call__(self, given: Mapping[str, Any]) -> float | None:
        """Return what it pays for one episode; EpisodeError where it raises, or returns no finite number."""
        own = {name: value for name, value in given.items() if self.takes_all or name in self.may_take}
        try:
            found = self.function(**own)
            if inspect.isawaitable(found):
                found = await found
        except Exception as error:
            raise EpisodeError(
                f"The reward function `{self.name}` raised {type(error).__name__}: {error}"
            ) from error
        return self._number(found)

    def _number(self, found: object) -> float | None:
        if found is None:
            return None
        if isinstance(found, Sequence | Mapping) and not isinstance(found, str):
            raise EpisodeError(
                f"The reward function `{self.name}` returned {type(found).__name__}. It is called once for each episode and returns "
                f"one number. One that was written for batches is called by another: `def one(completion, answer): return "
                f"{self.name}([completion], answer=[answer])[0]`."
            )
        value = finite(found)
        if value is None:
            raise EpisodeError(
                f"The reward function `{self.name}` returned {str(found)[:40]!r}, not a finite number."
            )
        return value


def read_function(name: str, function: Any) -> RewardFunction:
    """Return a function with what it takes; ConfigError for what cannot be called by the names of its parameters."""
    if not callable(function):
        raise ConfigError(
            f"The reward `{name}` is {type(function).__name__}, not a function that returns a number."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            f"The reward function `{name}` does not say what it takes. Write `lambda completion: …` around it."
        ) from None
    needs: list[str] = []
    may_take: list[str] = []
    takes_all = False
    for each in parameters:
        if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL):
            raise ConfigError(
                f"The reward function `{name}` takes `{each.name}` by its place. Give it names: {', '.join(GIVEN)}, columns."
            )
        if each.kind is each.VAR_KEYWORD:
            takes_all = True
            continue
        may_take.append(each.name)
        if each.default is each.empty:
            needs.append(each.name)
    return RewardFunction(name, function, tuple(needs), tuple(may_take), takes_all)


def source_hash(function: Any) -> str:
    """Return a hash of a function's source, so that a resumed run can report a change; empty where there is none to read."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):
        return ""


def given_for(episode: Episode, row: Mapping[str, Json], answer: str | None) -> dict[str, Any]:
    """Return what functions that pay the team may take; `answer` is the text that a workflow named as the team's."""
    last = {turn.agent: turn.text for turn in episode.turns}
    completions = {agent: last[agent] for agent in episode.agents if agent in last}
    spoken_last = episode.turns[-1].text if episode.turns else ""
    completion = spoken_last if answer is None else answer
    given = {"completion": completion, "completions": completions, "episode": episode}
    return {**row, **given, "question": episode.task.question}
