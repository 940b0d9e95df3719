"""Recorded answers as environments: labelled solutions, preferences, and whole trajectories.

The teacher says what the record says, the workflow plays it, and the world pays what the record is worth: so data of
all kinds are groups of episodes, and what learns from episodes learns from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal, NamedTuple, cast, get_args

from pydantic import Field

from kapelle.environment import Answerable, Outcome, Recorded, Scorable
from kapelle.environments.data.conversations import (
    QUESTIONS,
    Question,
    answered,
    answers_in,
    field_of,
    message_in,
    messages_in,
    question_in,
    rounds,
)
from kapelle.environments.data.source import AskingData, Splits, Words
from kapelle.environments.grading.text.tool_call import Form, NotCalls, parse_calls
from kapelle.errors import DataError, EpisodeError, did_you_mean, need_known
from kapelle.runtime.row_files import DataRow
from kapelle.types import Json, Message, Split, Task, as_text


class RecordedData(AskingData, Answerable):
    """Where recorded rows come from."""

    def extract(self, text: str) -> str | None:
        """Return the whole text: a record is an answer word for word."""
        return text.strip() or None


def split_of(splits: Splits, task_id: str) -> DataRow:
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
        """Return the score of a recorded text; EpisodeError for any other."""
        worth = self._worth(agent, text)
        if worth is None:
            raise EpisodeError("This text is not on record, so it has no known score.")
        return worth

    def outcome(self) -> Outcome:
        """Return the scores of the last answers; only recorded answers earn anything."""
        worth = {agent: self._worth(agent, text) for agent, text in self._last.items()}
        known = {agent: value for agent, value in worth.items() if value is not None}
        if not known:
            return Outcome(
                info={"unscored": "what was said is not on record, so nothing says what it is worth"}
            )
        return Outcome(known, sum(known.values()) / len(known))

    async def close(self) -> None:
        """Hold nothing."""


# -------- Solutions with a label


class Solved(NamedTuple):
    """A question and its solutions, (text, label) each."""

    question: Question
    solutions: tuple[tuple[str, float], ...]


class Labelled(RecordedData, Recorded):
    """Recorded solutions with a label that says whether each is right: data for a verifier.

        {"question": "…", "solution": "…", "is_correct": true}
        {"question": "…", "small": {"solution": "…", "is_correct": false}, "large": {…}}      dots reach into objects

    All rows of one question are one task, and sample k of its group says the k-th solution and earns its label.
    """

    name: Literal["labelled"] = "labelled"
    question_field: str = "question"
    """The field that asks."""
    solutions: Mapping[str, str] = Field(default={"solution": "is_correct"}, min_length=1)
    """Field of a solution → field of its label: true, false, or a number between 0 and 1."""

    def answers_per_task(self) -> int:
        """As many as the question with most."""
        return max(len(each.solutions) for questions in self._questions.values() for each in questions)

    def check(self, agents: Sequence[str]) -> None:
        """Read every row; DataError names file, line and field of those without solution or label, if they are many."""
        _ = self._questions

    def _key(self) -> tuple[str, str, Words]:
        return self.question_field, "question_field", question_in

    def _read(self, row: DataRow) -> list[tuple[str, float]]:
        found = []
        for solution, label in self.solutions.items():
            text, value = message_in(row, solution, "solutions").content, field_of(row, label, "solutions")
            if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
                raise DataError(
                    f"{row.place}: the label '{label}' is {value!r}, not true, false or a number from 0 to 1. Fix or drop "
                    "the row."
                )
            found.append((text, float(value)))
        return found

    @cached_property
    def _questions(self) -> dict[str, tuple[Solved, ...]]:
        """Each split's questions with all their solutions."""
        by_split = {}
        for split, rows in (("train", self.rows.train), ("test", self.rows.test)):
            found: dict[Question, dict[str, float]] = {}
            for row in rows:
                for text, label in self._read(row):
                    # Of two labels for one text the first one counts.
                    found.setdefault(self.question_of(row), {}).setdefault(text, label)
            by_split[split] = tuple(Solved(asked, tuple(labels.items())) for asked, labels in found.items())
        return by_split

    def _question(self, task: Task) -> Solved:
        split, _, index = task.id.rpartition("-")
        return self._questions["train" if split == "train" else "test"][int(index)]

    def size(self, split: Split) -> int | None:
        """Return the number of questions."""
        return len(self._questions[split])

    def task(self, split: Split, index: int) -> Task:
        """Return the question at an index."""
        question = self._questions[split][index].question
        return question.task(f"{split}-{index}", rendered=self.rendered_prompts)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RecordedWorld:
        """Open the world of one question."""
        worth = dict(self._question(task).solutions)
        return RecordedWorld(
            {agent: [task.question] for agent in agents}, lambda agent, text: worth.get(text)
        )

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str:
        """Return solution `sample`, counted round and round."""
        solutions = self._question(task).solutions
        return solutions[sample % len(solutions)][0]


# -------- Pairs of a chosen and a rejected answer


class Pair(NamedTuple):
    """A question, the answer that was chosen, and the other one."""

    question: Question
    chosen: Message
    rejected: Message


class Preferences(RecordedData, Recorded):
    r"""Recorded preferences: two answers to one question, of which one was chosen.

    A row is a question and two answers, each a text or a message, or two conversations that differ in their last message:

        {"prompt": "…", "chosen": "…", "rejected": "…"}
        {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}       without a column `prompt`
        {"chosen": "\n\nHuman: …\n\nAssistant: …", "rejected": "…"}                         likewise (HH-RLHF, 2204.05862)

        {"messages": […], "completion": "…", "reward": 1.0, …}               what `kapelle collect` writes, without further settings

    Of collected rows those that answer the same conversation are compared: the answer with the greatest reward is chosen over
    the one with the least, and conversations whose answers all earned the same are left out.

    A group of two episodes is a pair: the first says what was chosen and earns 1, the second what was rejected and earns
    0, whoever of the team speaks.
    """

    name: Literal["preferences"] = "preferences"
    question_field: str | None = "prompt"
    """The field with the question. Rows without `prompt` may have it in `question`, `messages` or `conversations`. null, and rows with none
    of these: both answers hold the conversation before them."""
    chosen_field: str = "chosen"
    """The field with the better answer."""
    rejected_field: str = "rejected"
    """The field with the worse answer."""

    def answers_per_task(self) -> int:
        """The chosen one and the rejected one."""
        return 2

    @cached_property
    def rows(self) -> Splits:
        """The usable rows of both splits; pairs of them where `kapelle collect` wrote them."""
        key, setting, words = self._key()
        first, second = self.source.read()
        default = (self.question_field, self.chosen_field, self.rejected_field) == (
            "prompt",
            "chosen",
            "rejected",
        )
        if default and was_collected(self.source.first_row(), "chosen"):
            first, second = paired(first), second if second is None else paired(second)
        return self.source.apart(first, second, key, setting, words, self._read, self.max_unusable)

    @cached_property
    def _asked(self) -> str | None:
        """The field with the question; None where it stands in both answers."""
        first = self.source.first_row()
        if self.question_field != "prompt" or first is None or was_collected(first, "chosen"):
            return self.question_field
        return next((name for name in QUESTIONS if first.fields.get(name) is not None), None)

    def _key(self) -> tuple[str, str, Words]:
        if self._asked is None:
            return self.chosen_field, "chosen_field", _before
        return self._asked, "question_field", question_in

    def _read(self, row: DataRow) -> Pair:
        pair = self._pair(row)
        if pair.chosen == pair.rejected:
            raise DataError(f"{row.place}: both answers are the same, so nothing is preferred. Drop the row.")
        return pair

    def _pair(self, row: DataRow) -> Pair:
        fields = ((self.chosen_field, "chosen_field"), (self.rejected_field, "rejected_field"))
        if self._asked is not None:
            asked = self.question_of(row)
            found = (answered(asked, answers_in(row, *field)) for field in fields)
            (question, chosen), (other, rejected) = (
                (replace(asked, messages=(*asked.messages, *before)), last) for *before, last in found
            )
        else:
            (question, chosen), (other, rejected) = (_whole(row, *field) for field in fields)
        if question != other:
            raise DataError(
                f"{row.place}: '{self.chosen_field}' and '{self.rejected_field}' differ before their last messages. Only the "
                "last message may differ. Fix or drop the row."
            )
        return Pair(question, chosen, rejected)

    def task(self, split: Split, index: int) -> Task:
        """Return the pair at an index."""
        question = self._pair(self.rows.of(split)[index]).question
        return question.task(f"{split}-{index}", rendered=self.rendered_prompts)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RecordedWorld:
        """Open the world of one pair."""
        pair = self._pair(split_of(self.rows, task.id))
        answers = ((pair.chosen, 1.0), (pair.rejected, 0.0))

        def worth(agent: str, text: str) -> float | None:
            return next((value for answer, value in answers if _is_said(answer, text)), None)

        return RecordedWorld({agent: [task.question] for agent in agents}, worth)

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str | Message:
        """Return the chosen answer in even samples, the rejected one in odd ones."""
        pair = self._pair(split_of(self.rows, task.id))
        return _answer(pair.rejected if sample % 2 else pair.chosen)


COLLECTED = ("messages", "completion", "agent", "reward")
"""Fields of every row that `kapelle collect` writes; see `runs.exports`."""


def was_collected(row: DataRow | None, other: str) -> bool:
    """Return whether a row is a turn of an episode that `kapelle collect` wrote, and has no field `other`."""
    return row is not None and other not in row.fields and all(field in row.fields for field in COLLECTED)


def paired(rows: Sequence[DataRow]) -> tuple[DataRow, ...]:
    """Return a pair of every conversation of collected rows that was answered better and worse.

    DataError where there is none: nothing is preferred then.
    """
    answers: dict[str, list[DataRow]] = {}
    for row in rows:
        reward = row.fields.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise DataError(
                f"{row.place}: the field 'reward' holds {reward!r:.40}, no number. Fix or drop the row."
            )
        asked = json.dumps([row.fields.get("agent"), row.fields.get("messages")])
        answers.setdefault(asked, []).append(row)
    pairs = []
    for given in answers.values():
        better = max(given, key=lambda row: cast("float", row.fields["reward"]))
        worse = min(given, key=lambda row: cast("float", row.fields["reward"]))
        if better.fields["reward"] != worse.fields["reward"]:
            fields = {
                "prompt": [
                    each for each in cast("list[Json]", better.fields["messages"]) if not _system(each)
                ],
                "chosen": better.fields.get("completion"),
                "rejected": worse.fields.get("completion"),
            }
            pairs.append(DataRow(f"{better.place} and {worse.place}", fields))
    if rows and not pairs:
        raise DataError(
            f"{rows[0].place.rpartition(', ')[0]}: none of {len(answers)} conversations was answered twice with different rewards, so "
            "nothing is preferred. Collect more episodes of each task (`kapelle collect --samples 8`, without --min-reward)."
        )
    return tuple(pairs)


def _system(message: Json) -> bool:
    """Return whether a message is a system message: the team has its own."""
    return isinstance(message, Mapping) and message.get("role") == "system"


def _whole(row: DataRow, field: str, setting: str) -> tuple[Question, Message]:
    """Return the conversation before the last message of a field, and that message; of a transcript likewise."""
    value = field_of(row, field, setting)
    is_transcript = isinstance(value, str)
    messages = _transcript(row, value, field) if is_transcript else messages_in(row, field, setting)
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise DataError(
            f"{row.place}: the field '{field}' holds no conversation that ends with the assistant's answer. Fix or drop the row, or set "
            "`environment.question_field` to the field of the question."
        )
    system = "\n\n".join(message.content for message in messages if message.role == "system")
    return Question(tuple(m for m in messages[:-1] if m.role != "system"), system), messages[-1]


def _before(row: DataRow, field: str, setting: str) -> str:
    """Return the conversation before the last message of a field as one text."""
    return _whole(row, field, setting)[0].text


_SPEAKER = re.compile(r"\n\n(Human|Assistant):")


def _transcript(row: DataRow, text: str, field: str) -> tuple[Message, ...]:
    """Return the messages of a transcript in which `Human:` and `Assistant:` take turns."""
    opening, *parts = _SPEAKER.split(f"\n\n{text.lstrip()}")
    if opening.strip() or not parts:
        raise DataError(
            f"{row.place}: the field '{field}' is no transcript that begins with 'Human:'. Set `environment.question_field` to the "
            "field that holds the question."
        )
    roles = {"Human": "user", "Assistant": "assistant"}
    return tuple(
        Message(roles[name], content.strip()) for name, content in zip(parts[::2], parts[1::2], strict=True)
    )


def _answer(message: Message) -> str | Message:
    """Return a recorded message as `Recorded.recorded` does: one that is more than its text as a whole."""
    return message.content if message.structured is None else message


def _is_said(answer: Message, text: str) -> bool:
    """Return whether a text is a recorded answer: word for word, or with the same tool calls in the template's own form."""
    if answer.structured is None or "tool_calls" not in json.loads(answer.structured):
        return text == answer.content
    try:
        return parse_calls(text, get_args(Form)) == parse_calls(answer.content, ("hermes",))
    except NotCalls:
        return False


# -------- Turns of agents, to be imitated


def _conversation_text(row: DataRow, field: str, setting: str) -> str:
    """Return a conversation as one text, answers included."""
    return as_text([message for message in messages_in(row, field, setting) if message.role != "system"])


Spoken = tuple[tuple[tuple[Message, ...], Message], ...]
"""(messages that the agent read, its answer), turn by turn."""


_COLLECTED = ("messages", "completion", "agent")


class Trajectories(RecordedData, Recorded):
    """Recorded trajectories: the turns of agents, to be learned by imitation (SFT).

    A row is a question and what each agent answered, or a whole conversation:

        {"question": "47+85", "notes": "2,12+1", "answer": "132"}     answers: {reasoner: notes, actor: answer}
        {"messages": [{"role": "user", …}, {"role": "assistant", …}, …]}      messages_field: messages
        {"messages": […], "completion": "…", "agent": "actor"}                what `kapelle collect` writes, without further settings

    Of a conversation every message that a model wrote is a turn, and what stands before it is what the agent reads, its system
    message as the task's; those of collected rows are left out, since the team has its own. `workflow.name: parallel` plays all of
    them. A row with an agent's name is played by that agent alone. Collected rows of agents of whom none is in the team are for all agents.
    """

    name: Literal["trajectories"] = "trajectories"
    question_field: str = "question"
    """The field that asks."""
    answer_field: str = "answer"
    """The turn of every agent that `answers` does not name; with `messages_field`, the turn after those messages, if any."""
    answers: Mapping[str, str] = {}
    """Agent → the field that holds its turn."""
    messages_field: str | None = None
    """A conversation, in OpenAI's or ShareGPT's form, in place of question and answer; null takes `messages` or `conversations` of rows
    without them."""
    agent_field: str | None = None
    """The one agent whose turns these are; null gives them to all agents."""

    def answers_per_task(self) -> int:
        """One record a task."""
        return 1

    @cached_property
    def _named(self) -> tuple[str | None, str, str | None]:
        """The fields of a conversation, of an answer and of an agent: as set, or where `kapelle collect` puts them."""
        own = (self.messages_field, self.answer_field, self.agent_field)
        if (own, self.question_field, self.answers) != ((None, "answer", None), "question", {}):
            return own
        first = self.source.first_row()
        if was_collected(first, "question"):
            return _COLLECTED
        columns = () if first is None or "question" in first.fields else first.fields
        if "prompt" in columns and "completion" in columns:
            return (None, "completion", None)
        found = next((name for name in ("messages", "conversations") if name in columns), None)
        return own if found is None else (found, "answer", None)

    @property
    def _asked(self) -> str:
        """The field of the question, where it is no conversation of several turns."""
        return "prompt" if self._named == (None, "completion", None) else self.question_field

    @cached_property
    def _agents_on_record(self) -> frozenset[Json]:
        agent = self._named[2]
        return frozenset(
            row.fields.get(agent) for row in self.rows.train + self.rows.test if agent is not None
        )

    def check(self, agents: Sequence[str]) -> None:
        """Read every row; DataError names file, line and field of those without a record, if they are many."""
        for agent in self.answers:
            need_known("environment.answers", "agent", agent, agents)
        for split in ("train", "test"):
            for row in self.rows.of(split):
                self._speakers(row, agents)

    def _key(self) -> tuple[str, str, Words]:
        messages = self._named[0]
        if messages is None:
            return self._asked, "question_field", question_in
        return messages, "messages_field", _conversation_text

    def _read(self, row: DataRow) -> None:
        for agent in (*self.answers, ""):
            # Where `answers` names every agent, nobody is left for `answer_field`.
            if agent or not self.answers or self._named[1] in row.fields:
                self._spoken(row, agent)

    def _speakers(self, row: DataRow, agents: Sequence[str]) -> tuple[str, ...]:
        field = self._named[2]
        if field is None:
            return tuple(agents)
        name = message_in(row, field, "agent_field").content
        if self.agent_field is None and self._agents_on_record.isdisjoint(agents):
            return tuple(agents)  # another team's turns, such as those of a model that played alone
        if name not in agents:
            raise DataError(f"{row.place}: agent '{name}' is not in the team.{did_you_mean(name, agents)}")
        return (name,)

    def _spoken(self, row: DataRow, agent: str) -> Spoken:
        messages, answer, _ = self._named
        if messages is None:
            field = self.answers.get(agent, answer)
            setting = f"answers.{agent}" if agent in self.answers else "answer_field"
            asked = self.question_of(row)
            return _turns(answered(asked, answers_in(row, field, setting)), asked.messages)
        return self._conversation(row, messages)

    def _conversation(self, row: DataRow, field: str) -> Spoken:
        messages = messages_in(row, field, "messages_field")
        answer = self._named[1]
        if answer in row.fields:
            messages = (*messages, message_in(row, answer, "answer_field"))
        turns = _turns(messages)
        if not turns:
            raise DataError(
                f"{row.place}: the field '{field}' has no message of the assistant that answers another one. Fix or drop the row."
            )
        return turns

    def task(self, split: Split, index: int) -> Task:
        """Return the record at an index; its question is what is read first."""
        row = self.rows.of(split)[index]
        messages = self._named[0]
        if messages is None:
            task = self.question_of(row).task(f"{split}-{index}", rendered=self.rendered_prompts)
            read = [heard for heard, _ in self._spoken(row, "")] if self._named[1] in row.fields else []
            return replace(task, messages=rounds(*read)) if len(read) > 1 else task
        told = () if self._named == _COLLECTED else messages_in(row, messages, "messages_field")
        system = "\n\n".join(message.content for message in told if message.role == "system")
        read = [heard for heard, _ in self._conversation(row, messages)]
        return Task(f"{split}-{index}", as_text(read[0]), system=system, messages=rounds(*read))

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RecordedWorld:
        """Open the world of one record."""
        row = split_of(self.rows, task.id)
        spoken = {agent: self._spoken(row, agent) for agent in self._speakers(row, agents)}

        def worth(agent: str, text: str) -> float | None:
            return 1.0 if any(_is_said(said, text) for _, said in spoken[agent]) else None

        heard = {agent: [as_text(read) for read, _ in turns] for agent, turns in spoken.items()}
        return RecordedWorld(heard, worth)

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str | Message:
        """Return the agent's recorded turn."""
        answers = 0  # of the conversation so far, those in what the agent has read among them
        for heard, said in self._spoken(split_of(self.rows, task.id), agent):  # noqa: B007 - the last one stays
            answers += sum(message.role == "assistant" for message in heard)
            if turn <= answers:
                break
            answers += 1
        return _answer(said)


def _turns(messages: Sequence[Message], before: Sequence[Message] = ()) -> Spoken:
    """Return the answers in messages with what was read before each.

    An answer to nothing, such as a greeting at the beginning, is read like another message.
    """
    turns: list[tuple[tuple[Message, ...], Message]] = []
    read = list(before)
    for message in messages:
        if message.role == "assistant" and read and read[-1].role != "assistant":
            turns.append((tuple(read), message))
            read = []
        elif message.role != "system":
            read.append(message)
    return tuple(turns)
