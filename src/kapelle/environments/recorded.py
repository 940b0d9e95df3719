"""What environments of recorded answers share: where rows are, how their fields are read, and their world.

The teacher says what the record says, the workflow plays it, and the world pays what the record is worth: so data of
all kinds are groups of episodes, and what learns from episodes learns from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pydantic import Field, model_validator

from kapelle.configured import Configured
from kapelle.environment import Outcome
from kapelle.environments.data_source import DataSource, Row, Splits
from kapelle.errors import DataError, EpisodeError, did_you_mean
from kapelle.types import Json, Split

SPEAKS = {"assistant", "gpt", "function_call"}
"""Roles of messages that a model wrote, in OpenAI's and in ShareGPT's words."""


class RecordedData(Configured):
    """Where recorded rows come from."""

    path: str
    """A folder with a file per split, one file, or `owner/name` on the Hugging Face hub."""
    config: str | None = None
    """Configuration of the hub's data set."""
    train: str = "train"
    """File (suffix optional) or hub split to train on."""
    test: str = "test"
    """File or hub split to evaluate on."""
    test_share: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of the questions held out for testing where `path` is one file; a hash of each decides."""

    @model_validator(mode="after")
    def _apart(self) -> RecordedData:
        if self.train == self.test:
            raise ValueError(
                f"`train` and `test` both name '{self.train}'. Nothing is tested on what it trains on."
            )
        return self

    @property
    def source(self) -> DataSource:
        """Where the rows are."""
        return DataSource(self.path, self.config, self.train, self.test, self.test_share)

    @property
    def reward_range(self) -> tuple[float, float]:
        """A record is worth something between nothing and all."""
        return (0.0, 1.0)

    @property
    def sources(self) -> Mapping[Split, str]:
        """The file or hub split of each."""
        return {"train": self.source.describe("train"), "test": self.source.describe("test")}

    def extract(self, text: str) -> str | None:
        """Return the whole text: a record is an answer word for word."""
        return text.strip() or None


def field_of(row: Row, field: str, setting: str) -> Json:
    """Return a field of a row; dots reach into objects. DataError, naming the setting, when it is not there."""
    value: Json = row.fields
    for depth, key in enumerate(field.split(".")):
        known = value if isinstance(value, Mapping) else {}
        if key not in known:
            at = ".".join(field.split(".")[: depth + 1])
            raise DataError(
                f"{row.place} has no field '{at}'.{did_you_mean(key, known)} Set `environment.{setting}` to the field "
                "that the data have."
            )
        value = known[key]
    return value


def said_in(row: Row, field: str, setting: str) -> str:
    """Return what was said in a field: text, a message, or the last message of a conversation."""
    value = field_of(row, field, setting)
    if isinstance(value, list) and value:
        value = value[-1]
    if isinstance(value, Mapping):
        value = value.get("content", value.get("value"))
    if not isinstance(value, str):
        raise DataError(
            f"{row.place}: the field '{field}' holds no text, message or conversation. Mend or drop the row, or set "
            f"`environment.{setting}`."
        )
    return value


def asked_in(row: Row, field: str, setting: str) -> str:
    """Return what was asked in a field: text, or a conversation, whose messages are written under one another.

    A single message stands alone; of several each has its role before it.
    """
    value = field_of(row, field, setting)
    if not isinstance(value, list):
        return said_in(row, field, setting)
    messages = messages_of(row, value, field, setting)
    if len(messages) == 1:
        return messages[0][1]
    return "\n\n".join(f"{role}: {content}" for role, content in messages)


def messages_of(row: Row, value: Sequence[Json], field: str, setting: str) -> list[tuple[str, str]]:
    """Return (role, text) of a conversation in OpenAI's form (`role`, `content`) or ShareGPT's (`from`, `value`)."""
    messages = []
    for number, entry in enumerate(value):
        fields = entry if isinstance(entry, Mapping) else {}
        role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(
                f"{row.place}: message {number} of the field '{field}' has no role and text (`role` and `content`, or "
                f"`from` and `value`). Mend or drop the row, or set `environment.{setting}`."
            )
        messages.append((role, content))
    return messages


def split_of(splits: Splits, task_id: str) -> Row:
    """Return the row of a task called `<split>-<index>`."""
    split, _, index = task_id.rpartition("-")
    return splits.of("train" if split == "train" else "test")[int(index)]


class RecordedWorld:
    """One record: what each agent reads before each of its turns, and what its last words are worth."""

    def __init__(self, heard: Mapping[str, Sequence[str]], worth: Callable[[str, str], float | None]) -> None:
        """Take what each agent hears, turn by turn, and `worth` of (agent, text): None for words not on record."""
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
        """Take what was said; it is worth something at the end."""
        self._taken += 1
        self._last |= actions
        return {}

    async def score(self, agent: str, text: str) -> float:
        """Return what a text is worth; EpisodeError for words that are not on record."""
        worth = self._worth(agent, text)
        if worth is None:
            raise EpisodeError("These words are not on record, so nothing says what they are worth.")
        return worth

    def outcome(self) -> Outcome:
        """Return what the last words were worth; nobody is paid for words that are not on record."""
        worth = {agent: self._worth(agent, text) for agent, text in self._last.items()}
        known = {agent: value for agent, value in worth.items() if value is not None}
        if not known:
            return Outcome(
                info={"unscored": "what was said is not on record, so nothing says what it is worth"}
            )
        return Outcome(known, sum(known.values()) / len(known))

    async def close(self) -> None:
        """Hold nothing."""
