"""Recorded trajectories: the turns of agents, to be learned by imitation (SFT).

A row is a question and what each agent answered, or a whole conversation:

    {"question": "47+85", "notes": "2,12+1", "answer": "132"}     answers: {reasoner: notes, actor: answer}
    {"messages": [{"role": "user", …}, {"role": "assistant", …}, …]}      messages_field: messages
    {"messages": […], "completion": "…", "agent": "actor"}                what `kapelle collect` writes

Of a conversation every message that a model wrote is a turn, and what stands before it (system messages left out:
the team has its own) is what the agent reads; `workflow.name: parallel` plays all of them. A row with an agent's name
is played by that agent alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kapelle.environment import Recorded
from kapelle.environments.data.source import Row, Words, asked_in, field_of, messages_of, said_in
from kapelle.environments.recorded.base import (
    SPEAKS,
    RecordedData,
    RecordedWorld,
    split_of,
)
from kapelle.errors import DataError, did_you_mean, need_known
from kapelle.types import Split, Task

Spoken = tuple[tuple[str, str], ...]
"""(what the agent read, what it wrote), turn by turn."""


class Trajectories(RecordedData, Recorded):
    """Answers on record; each is worth 1."""

    name: Literal["trajectories"] = "trajectories"
    question_field: str = "question"
    """The field that asks."""
    answer_field: str = "answer"
    """The turn of every agent that `answers` does not name; with `messages_field`, the turn after those messages, if any."""
    answers: Mapping[str, str] = {}
    """Agent → the field that holds its turn."""
    messages_field: str | None = None
    """A conversation, in OpenAI's or ShareGPT's form, in place of question and answer."""
    agent_field: str | None = None
    """The one agent whose turns these are; null gives them to all agents."""

    def answers_per_task(self) -> int:
        """One record a task."""
        return 1

    def check(self, agents: Sequence[str]) -> None:
        """Read every row; DataError names file, line and field of those without a record, if they are many."""
        for agent in self.answers:
            need_known("environment.answers", "agent", agent, agents)
        for split in ("train", "test"):
            for row in self.rows.of(split):
                self._speakers(row, agents)

    def _key(self) -> tuple[str, str, Words]:
        if self.messages_field is None:
            return self.question_field, "question_field", asked_in
        return self.messages_field, "messages_field", asked_in

    def _read(self, row: Row) -> None:
        for agent in (*self.answers, ""):
            # Where `answers` names every agent, nobody is left for `answer_field`.
            if agent or not self.answers or self.answer_field in row.fields:
                self._spoken(row, agent)

    def _speakers(self, row: Row, agents: Sequence[str]) -> tuple[str, ...]:
        if self.agent_field is None:
            return tuple(agents)
        name = said_in(row, self.agent_field, "agent_field")
        if name not in agents:
            raise DataError(f"{row.place}: agent '{name}' is not in the team.{did_you_mean(name, agents)}")
        return (name,)

    def _spoken(self, row: Row, agent: str) -> Spoken:
        if self.messages_field is None:
            question = asked_in(row, self.question_field, "question_field")
            field = self.answers.get(agent, self.answer_field)
            return (
                (
                    question,
                    said_in(row, field, f"answers.{agent}" if agent in self.answers else "answer_field"),
                ),
            )
        return self._conversation(row, self.messages_field)

    def _conversation(self, row: Row, field: str) -> Spoken:
        value = field_of(row, field, "messages_field")
        messages = messages_of(row, value if isinstance(value, list) else [], field, "messages_field")
        if self.answer_field in row.fields:
            messages.append(("assistant", said_in(row, self.answer_field, "answer_field")))
        turns: list[tuple[str, str]] = []
        read: list[str] = []
        for role, content in messages:
            if role in SPEAKS:
                turns.append(("\n\n".join(read), content))
                read = []
            elif role != "system":
                read.append(content)
        if not turns:
            raise DataError(f"{row.place}: nobody speaks in the field '{field}'. Fix or drop the row.")
        return tuple(turns)

    def size(self, split: Split) -> int | None:
        """Return the number of rows."""
        return len(self.rows.of(split))

    def task(self, split: Split, index: int) -> Task:
        """Return the record at an index; its question is what is read first."""
        row = self.rows.of(split)[index]
        if self.messages_field is None:
            return Task(f"{split}-{index}", asked_in(row, self.question_field, "question_field"))
        return Task(f"{split}-{index}", self._conversation(row, self.messages_field)[0][0])

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RecordedWorld:
        """Open the world of one record."""
        row = split_of(self.rows, task.id)
        spoken = {agent: self._spoken(row, agent) for agent in self._speakers(row, agents)}

        def worth(agent: str, text: str) -> float | None:
            return 1.0 if text in [said for _, said in spoken[agent]] else None

        return RecordedWorld({agent: [read for read, _ in turns] for agent, turns in spoken.items()}, worth)

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str:
        """Return the agent's recorded turn."""
        spoken = self._spoken(split_of(self.rows, task.id), agent)
        return spoken[min(turn, len(spoken) - 1)][1]
