r"""Recorded preferences: two answers to one question, of which one was chosen.

A row is a question and two answers, each a text, a message, or a conversation that ends with the answer:

    {"prompt": "…", "chosen": "…", "rejected": "…"}
    {"chosen": "\n\nHuman: …\n\nAssistant: …", "rejected": "…"}          question_field: null (HH-RLHF, 2204.05862)

A group of two episodes is a pair: the first says what was chosen and earns 1, the second what was rejected and earns
0, whoever of the team speaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from kapelle.environment import Recorded
from kapelle.environments.data.source import Row, Words, asked_in, said_in
from kapelle.environments.recorded.base import RecordedData, RecordedWorld, split_of
from kapelle.errors import DataError
from kapelle.types import Split, Task

_SPOKE = "\n\nAssistant:"
"""What opens an answer in a transcript."""


class Pair(NamedTuple):
    """A question, the answer that was chosen, and the other one."""

    question: str
    chosen: str
    rejected: str


class Preferences(RecordedData, Recorded):
    """Pairs on record."""

    name: Literal["preferences"] = "preferences"
    question_field: str | None = "prompt"
    """Null: both answers are transcripts that contain the conversation before them."""
    chosen_field: str = "chosen"
    """The field with the better answer."""
    rejected_field: str = "rejected"
    """The field with the worse answer."""

    def answers_per_task(self) -> int:
        """The chosen one and the rejected one."""
        return 2

    def check(self, agents: Sequence[str]) -> None:
        """Read every row; DataError names file, line and field of those that are no pair, if they are many."""
        self.skipped()

    def _key(self) -> tuple[str, str, Words]:
        if self.question_field is None:
            return self.chosen_field, "chosen_field", _before
        return self.question_field, "question_field", asked_in

    def _read(self, row: Row) -> Pair:
        pair = self._pair(row)
        if pair.chosen == pair.rejected:
            raise DataError(f"{row.place}: both answers are the same, so nothing is preferred. Drop the row.")
        return pair

    def _pair(self, row: Row) -> Pair:
        chosen = said_in(row, self.chosen_field, "chosen_field")
        rejected = said_in(row, self.rejected_field, "rejected_field")
        if self.question_field is not None:
            return Pair(asked_in(row, self.question_field, "question_field"), chosen, rejected)
        question = _before(row, self.chosen_field, "chosen_field")
        answers = [text.rpartition(_SPOKE)[2].strip() for text in (chosen, rejected)]
        return Pair(question, *answers)

    def size(self, split: Split) -> int | None:
        """Return the number of pairs."""
        return len(self.rows.of(split))

    def task(self, split: Split, index: int) -> Task:
        """Return the pair at an index."""
        return Task(f"{split}-{index}", self._pair(self.rows.of(split)[index]).question)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RecordedWorld:
        """Open the world of one pair."""
        pair = self._pair(split_of(self.rows, task.id))
        worth = {pair.chosen: 1.0, pair.rejected: 0.0}
        return RecordedWorld(
            {agent: [pair.question] for agent in agents}, lambda agent, text: worth.get(text)
        )

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str:
        """Return the chosen answer in even samples, the rejected one in odd ones."""
        pair = self._pair(split_of(self.rows, task.id))
        return pair.rejected if sample % 2 else pair.chosen


def _before(row: Row, field: str, setting: str) -> str:
    """Return what stands before the last answer of a transcript."""
    before, found, _ = said_in(row, field, setting).rpartition(_SPOKE)
    if not found:
        raise DataError(
            f"{row.place}: the field '{field}' is no transcript with '{_SPOKE.strip()}' in it. Set "
            "`environment.question_field` to the field that holds the question."
        )
    return before.strip()
