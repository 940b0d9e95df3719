"""What environments of recorded answers share: where rows are, how their fields are read, and their world.

The teacher says what the record says, the workflow plays it, and the world pays what the record is worth: so data of
all kinds are groups of episodes, and what learns from episodes learns from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kapelle.environment import Answerable, Outcome, Scorable
from kapelle.environments.data.settings import DataSettings
from kapelle.environments.data.source import Row, Splits
from kapelle.errors import EpisodeError

SPEAKS = {"assistant", "gpt", "function_call"}
"""Roles of messages that a model wrote, in OpenAI's and in ShareGPT's words."""


class RecordedData(DataSettings, Answerable):
    """Where recorded rows come from."""

    def extract(self, text: str) -> str | None:
        """Return the whole text: a record is an answer word for word."""
        return text.strip() or None


def split_of(splits: Splits, task_id: str) -> Row:
    """Return the row of a task called `<split>-<index>`."""
    split, _, index = task_id.rpartition("-")
    return splits.of("train" if split == "train" else "test")[int(index)]


class RecordedWorld(Scorable):
    """One record: what each agent reads before each of its turns, and what its last answer is worth."""

    def __init__(self, heard: Mapping[str, Sequence[str]], worth: Callable[[str, str], float | None]) -> None:
        """Take what each agent reads, turn by turn, and `worth` of (agent, text): None for a text that is not on record."""
        self._heard = heard
        self._worth = worth
        self._taken = 0
        self._last: dict[str, str] = {}

    def observe(self, agent: str) -> str:
        """Return what the agent reads before its next turn."""
        heard = self._heard.get(agent)
        if not heard:
            raise EpisodeError(f"The record has no words for agent '{agent}'. Use `workflow.name: parallel`.")
        return heard[min(self._taken, len(heard) - 1)]

    def movers(self) -> tuple[str, ...]:
        """Return those whose record goes on."""
        return tuple(agent for agent, heard in self._heard.items() if len(heard) > self._taken)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Record the answers; they are scored at the end."""
        self._taken += 1
        self._last |= actions
        return {}

    async def score(self, agent: str, text: str) -> float:
        """Return the score of a text; EpisodeError for one that is not on record."""
        worth = self._worth(agent, text)
        if worth is None:
            raise EpisodeError("This text is not on record, so it has no known score.")
        return worth

    def outcome(self) -> Outcome:
        """Return the scores of the last answers; an answer that is not on record earns nothing."""
        worth = {agent: self._worth(agent, text) for agent, text in self._last.items()}
        known = {agent: value for agent, value in worth.items() if value is not None}
        if not known:
            return Outcome(
                info={"unscored": "what was said is not on record, so nothing says what it is worth"}
            )
        return Outcome(known, sum(known.values()) / len(known))

    async def close(self) -> None:
        """Hold nothing."""
