"""Environments of recorded answers: labelled solutions, preferences and trajectories.

A teacher replays the recorded answers, the workflow runs them as episodes, and the environment returns the recorded rewards. All
kinds of data therefore become groups of episodes, from which algorithms learn as from any other episodes.
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
from kapelle.environments.data.source import DataWithQuestions, Splits, Words
from kapelle.environments.grading.text.tool_call import Form, NotCalls, parse_calls
from kapelle.environments.questions import place_of
from kapelle.errors import DataError, EpisodeError, did_you_mean, need_known
from kapelle.runtime.row_files import DataRow
from kapelle.types import Json, Message, Split, Task, as_text


class RecordedData(DataWithQuestions, Answerable):
    """Base class of environments with recorded answers."""

    def extract(self, text: str) -> str | None:
        """Return the whole text, because recorded answers are compared word for word."""
        return text.strip() or None


class RecordedState(Scorable):
    """The state of an episode of one record.

    A record defines what each agent reads before each of its turns, and the reward of the agent's last answer.
    """

    def __init__(
        self, reads: Mapping[str, Sequence[str]], reward: Callable[[str, str], float | None]
    ) -> None:
        """Take what each agent reads in each turn, and a function that returns the reward of (agent, text).

        The function returns None for a text that is not recorded.
        """
        self._reads = reads
        self._reward = reward
        self._steps = 0
        self._last: dict[str, str] = {}

    def observe(self, agent: str) -> str:
        """Return the text that the agent reads before its next turn."""
        reads = self._reads.get(agent)
        if not reads:
            raise EpisodeError(f"The record has no turn of agent '{agent}'. Use `workflow.name: parallel`.")
        return reads[min(self._steps, len(reads) - 1)]

    def movers(self) -> tuple[str, ...]:
        """Return the agents that have further recorded turns."""
        return tuple(agent for agent, reads in self._reads.items() if len(reads) > self._steps)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Store the answers, which are scored at the end of the episode."""
        self._steps += 1
        self._last |= actions
        return {}

    async def score(self, agent: str, text: str) -> float:
        """Return the score of a recorded text. Raises EpisodeError if the text is not recorded."""
        reward = self._reward(agent, text)
        if reward is None:
            raise EpisodeError("This text is not recorded, so it has no known score.")
        return reward

    def outcome(self) -> Outcome:
        """Return the outcome with the rewards of the last answers. Only recorded answers have a reward."""
        rewards = {agent: self._reward(agent, text) for agent, text in self._last.items()}
        known = {agent: value for agent, value in rewards.items() if value is not None}
        if not known:
            return Outcome(info={"unscored": "the answers are not recorded, so they have no reward"})
        return Outcome(known, sum(known.values()) / len(known))

    async def close(self) -> None:
        """Do nothing, because the episode holds no resources."""


# -------- Solutions with a label


class Solved(NamedTuple):
    """A question and its solutions, as pairs (text, label)."""

    question: Question
    solutions: tuple[tuple[str, float], ...]


class Labelled(RecordedData, Recorded):
    """Recorded solutions with correctness labels, as training data for a verifier.

        {"question": "…", "solution": "…", "is_correct": true}
        {"question": "…", "small": {"solution": "…", "is_correct": false}, "large": {…}}      a dot selects a field inside an object

    All rows with the same question form one task. Sample k of the group is the k-th solution, and its reward is the label.
    """

    name: Literal["labelled"] = "labelled"
    question_field: str = "question"
    """The field that contains the question."""
    solutions: Mapping[str, str] = Field(default={"solution": "is_correct"}, min_length=1)
    """Mapping from a field that contains a solution to the field that contains its label. A label is true, false or a number from 0 to
    1."""

    def answers_per_task(self) -> int:
        """Return the maximum number of solutions of a question."""
        return max(len(each.solutions) for questions in self._questions.values() for each in questions)

    def check(self, agents: Sequence[str]) -> None:
        """Read all rows. Raises DataError, which names files, lines and fields, if too many rows lack a solution or a label."""
        _ = self._questions

    def _key(self) -> tuple[str, str, Words]:
        return self.question_field, "question_field", question_in

    def _read(self, row: DataRow) -> list[tuple[str, float]]:
        found = []
        for solution, label in self.solutions.items():
            text, value = message_in(row, solution, "solutions").content, field_of(row, label, "solutions")
            if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
                raise row.unusable(
                    f"the label '{label}' is {value!r}, not true, false or a number from 0 to 1"
                )
            found.append((text, float(value)))
        return found

    @cached_property
    def _questions(self) -> dict[str, tuple[Solved, ...]]:
        """The questions of each split with all their solutions."""
        by_split = {}
        for split, rows in (("train", self.rows.train), ("test", self.rows.test)):
            found: dict[Question, dict[str, float]] = {}
            for row in rows:
                for text, label in self._read(row):
                    # If a solution has two labels, the first one counts.
                    found.setdefault(self.question_of(row), {}).setdefault(text, label)
            by_split[split] = tuple(
                Solved(question, tuple(labels.items())) for question, labels in found.items()
            )
        return by_split

    def _question(self, task: Task) -> Solved:
        split, index = place_of(task.id)
        return self._questions[split][index]

    def size(self, split: Split) -> int | None:
        """Return the number of questions in a split."""
        return len(self._questions[split])

    def task(self, split: Split, index: int) -> Task:
        """Return the question at an index."""
        question = self._questions[split][index].question
        return question.task(f"{split}-{index}", rendered=self.rendered_prompts)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RecordedState:
        """Start an episode of one question and return its state."""
        labels = dict(self._question(task).solutions)
        return RecordedState(
            {agent: [task.question] for agent in agents}, lambda agent, text: labels.get(text)
        )

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str:
        """Return the solution with the index `sample` modulo the number of solutions."""
        solutions = self._question(task).solutions
        return solutions[sample % len(solutions)][0]


# -------- Pairs of a chosen and a rejected answer


class Pair(NamedTuple):
    """A question with its chosen answer and its rejected answer."""

    question: Question
    chosen: Message
    rejected: Message


class Preferences(RecordedData, Recorded):
    r"""Recorded preferences: two answers to the same question, of which one is chosen.

    A row contains a question and two answers (each a string or a message), or two conversations that differ in their last message:

        {"prompt": "…", "chosen": "…", "rejected": "…"}
        {"chosen": [{"role": "user", …}, {"role": "assistant", …}], "rejected": […]}       without a column `prompt`
        {"chosen": "\n\nHuman: …\n\nAssistant: …", "rejected": "…"}                        the same (HH-RLHF, arXiv:2204.05862)

        {"messages": […], "completion": "…", "reward": 1.0, …}               written by `kapelle collect`; needs no further settings

    Collected rows with the same conversation are compared: the answer with the highest reward is preferred to the answer with the
    lowest reward. A conversation is excluded if all its answers have the same reward.

    A pair becomes a group of two episodes. For each agent of the team, the first episode contains the chosen answer with reward 1,
    and the second episode contains the rejected answer with reward 0.
    """

    name: Literal["preferences"] = "preferences"
    question_field: str | None = "prompt"
    """The field that contains the question. In rows without `prompt`, the default is the field `question`, `messages` or
    `conversations`. If null, or if there is no such field, both answers must include the preceding conversation."""
    chosen_field: str = "chosen"
    """The field that contains the chosen answer."""
    rejected_field: str = "rejected"
    """The field that contains the rejected answer."""

    def answers_per_task(self) -> int:
        """Return 2, because each task has a chosen answer and a rejected answer."""
        return 2

    @cached_property
    def rows(self) -> Splits:
        """The usable rows of both splits. Rows that were written by `kapelle collect` are combined into pairs."""
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
    def _question_column(self) -> str | None:
        """The field that contains the question, or None if both answers contain the question."""
        first = self.source.first_row()
        if self.question_field != "prompt" or first is None or was_collected(first, "chosen"):
            return self.question_field
        return next((name for name in QUESTIONS if first.fields.get(name) is not None), None)

    def _key(self) -> tuple[str, str, Words]:
        if self._question_column is None:
            return self.chosen_field, "chosen_field", _before
        return self._question_column, "question_field", question_in

    def _read(self, row: DataRow) -> Pair:
        pair = self._pair(row)
        if pair.chosen == pair.rejected:
            raise row.unusable("both answers are the same")
        return pair

    def _pair(self, row: DataRow) -> Pair:
        fields = ((self.chosen_field, "chosen_field"), (self.rejected_field, "rejected_field"))
        if self._question_column is not None:
            begin = self.question_of(row)
            found = (answered(begin, answers_in(row, *field)) for field in fields)
            (question, chosen), (other, rejected) = (
                (replace(begin, messages=(*begin.messages, *before)), last) for *before, last in found
            )
        else:
            (question, chosen), (other, rejected) = (_whole(row, *field) for field in fields)
        if question != other:
            raise row.unusable(
                f"'{self.chosen_field}' and '{self.rejected_field}' differ before their last messages"
            )
        return Pair(question, chosen, rejected)

    def task(self, split: Split, index: int) -> Task:
        """Return the question of the pair at an index."""
        question = self._pair(self.rows.of(split)[index]).question
        return question.task(f"{split}-{index}", rendered=self.rendered_prompts)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RecordedState:
        """Start an episode of one pair and return its state."""
        pair = self._pair(self.rows.row_of(task.id))
        answers = ((pair.chosen, 1.0), (pair.rejected, 0.0))

        def reward(agent: str, text: str) -> float | None:
            return next((value for answer, value in answers if _is_answer(answer, text)), None)

        return RecordedState({agent: [task.question] for agent in agents}, reward)

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str | Message:
        """Return the chosen answer if `sample` is even, and the rejected answer if it is odd."""
        pair = self._pair(self.rows.row_of(task.id))
        return _answer(pair.rejected if sample % 2 else pair.chosen)


COLLECTED = ("messages", "completion", "agent", "reward")
"""Fields that occur in every row that `kapelle collect` writes. See `runs.exports`."""


def was_collected(row: DataRow | None, other: str) -> bool:
    """Return whether a row is a turn that `kapelle collect` wrote and lacks the field named by `other`."""
    return row is not None and other not in row.fields and all(field in row.fields for field in COLLECTED)


def paired(rows: Sequence[DataRow]) -> tuple[DataRow, ...]:
    """Return a pair for every conversation of collected rows whose answers have different rewards.

    Raises DataError if there is no such conversation.
    """
    answers: dict[str, list[DataRow]] = {}
    for row in rows:
        reward = row.fields.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise row.unusable(f"the field 'reward' is {reward!r:.40}, not a number")
        conversation = json.dumps([row.fields.get("agent"), row.fields.get("messages")])
        answers.setdefault(conversation, []).append(row)
    pairs = []
    for own in answers.values():
        better = max(own, key=lambda row: cast("float", row.fields["reward"]))
        worse = min(own, key=lambda row: cast("float", row.fields["reward"]))
        if better.fields["reward"] != worse.fields["reward"]:
            messages = cast("list[Json]", better.fields["messages"])
            fields = {
                "prompt": [each for each in messages if not _system(each)],
                "chosen": better.fields.get("completion"),
                "rejected": worse.fields.get("completion"),
            }
            pairs.append(DataRow(f"{better.place} and {worse.place}", fields))
    if rows and not pairs:
        raise DataError(
            f"{rows[0].place.rpartition(', ')[0]}: none of {len(answers)} conversations has two answers with different rewards. "
            "Collect more episodes of each task with `kapelle collect --samples 8`, without --min-reward."
        )
    return tuple(pairs)


def _system(message: Json) -> bool:
    """Return whether a message is a system message. The system message of the team replaces such messages."""
    return isinstance(message, Mapping) and message.get("role") == "system"


def _whole(row: DataRow, field: str, setting: str) -> tuple[Question, Message]:
    """Return the conversation before the last message of a field, and the last message. The field contains messages or a transcript."""
    value = field_of(row, field, setting)
    is_transcript = isinstance(value, str)
    messages = _transcript(row, value, field) if is_transcript else messages_in(row, field, setting)
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise DataError(
            f"{row.place}: the field '{field}' must contain a conversation that ends with the assistant's answer. Fix or remove "
            "the row, or set `environment.question_field` to the field with the question."
        )
    system = "\n\n".join(message.content for message in messages if message.role == "system")
    return Question(tuple(m for m in messages[:-1] if m.role != "system"), system), messages[-1]


def _before(row: DataRow, field: str, setting: str) -> str:
    """Return the conversation before the last message of a field as a single string."""
    return _whole(row, field, setting)[0].text


_SPEAKER = re.compile(r"\n\n(Human|Assistant):")


def _transcript(row: DataRow, text: str, field: str) -> tuple[Message, ...]:
    """Return the messages of a transcript in which the messages begin with `Human:` or `Assistant:`."""
    opening, *parts = _SPEAKER.split(f"\n\n{text.lstrip()}")
    if opening.strip() or not parts:
        raise DataError(
            f"{row.place}: the field '{field}' must contain a transcript that begins with 'Human:'. Fix the row, or set "
            "`environment.question_field` to the field with the question."
        )
    roles = {"Human": "user", "Assistant": "assistant"}
    return tuple(
        Message(roles[name], content.strip()) for name, content in zip(parts[::2], parts[1::2], strict=True)
    )


def _answer(message: Message) -> str | Message:
    """Return a recorded message in the format of `Recorded.recorded`.

    The result is the text of the message, or the message itself if it contains more than text.
    """
    return message.content if message.structured is None else message


def _is_answer(answer: Message, text: str) -> bool:
    """Return whether a text is a recorded answer: the same text, or a text with the same tool calls in the format of the chat template."""
    if answer.structured is None or "tool_calls" not in json.loads(answer.structured):
        return text == answer.content
    try:
        return parse_calls(text, get_args(Form)) == parse_calls(answer.content, ("hermes",))
    except NotCalls:
        return False


# -------- Recorded turns of agents, which are imitated


def _conversation_text(row: DataRow, field: str, setting: str) -> str:
    """Return a conversation, including the assistant's messages, as a single string."""
    return as_text([message for message in messages_in(row, field, setting) if message.role != "system"])


Turns = tuple[tuple[tuple[Message, ...], Message], ...]
"""The turns of an agent, as pairs (messages that the agent reads, answer of the agent)."""
_COLLECTED = ("messages", "completion", "agent")


class Trajectories(RecordedData, Recorded):
    """Recorded trajectories: the turns of agents, for supervised fine-tuning (SFT).

    A row contains a question with the answer of each agent, or a whole conversation:

        {"question": "47+85", "notes": "2,12+1", "answer": "132"}     answers: {reasoner: notes, actor: answer}
        {"messages": [{"role": "user", …}, {"role": "assistant", …}, …]}      messages_field: messages
        {"messages": […], "completion": "…", "agent": "actor"}                written by `kapelle collect`; needs no further settings

    Every message of the assistant in a conversation is a turn. Before each turn, the agent reads the preceding messages. The system
    message of the conversation becomes the system message of the task. For collected rows, the team's own system message is used
    instead. The workflow `parallel` runs all turns. A row that names an agent belongs only to that agent. If no agent that
    collected rows name is in the team, the rows belong to all agents.
    """

    name: Literal["trajectories"] = "trajectories"
    question_field: str = "question"
    """The field that contains the question."""
    answer_field: str = "answer"
    """The field that contains the turn of every agent that is not listed in `answers`. If `messages_field` is set, this field contains
    a further turn after the messages, if the row has such a field."""
    answers: Mapping[str, str] = {}
    """Mapping from an agent to the field that contains the turn of this agent."""
    messages_field: str | None = None
    """The field that contains a conversation in the format of OpenAI or ShareGPT, instead of a question and an answer. If null, the
    field `messages` or `conversations` is used if rows have no question and answer."""
    agent_field: str | None = None
    """The field that contains the name of the agent to which the turns belong. If null, the turns belong to all agents."""

    def answers_per_task(self) -> int:
        """Return 1, because each task has one record."""
        return 1

    @cached_property
    def _named(self) -> tuple[str | None, str, str | None]:
        """The fields that contain the conversation, the answer and the agent. By default, they are chosen by the names of the columns."""
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
    def _question_column(self) -> str:
        """The field that contains the question, for rows that are not conversations with several turns."""
        return "prompt" if self._named == (None, "completion", None) else self.question_field

    @cached_property
    def _agents_on_record(self) -> frozenset[Json]:
        agent = self._named[2]
        return frozenset(
            row.fields.get(agent) for row in self.rows.train + self.rows.test if agent is not None
        )

    def check(self, agents: Sequence[str]) -> None:
        """Read all rows. Raises DataError, which names files, lines and fields, if too many rows lack a record."""
        for agent in self.answers:
            need_known("environment.answers", "agent", agent, agents)
        for split in ("train", "test"):
            for row in self.rows.of(split):
                self._agents_of(row, agents)

    def _key(self) -> tuple[str, str, Words]:
        messages = self._named[0]
        if messages is None:
            return self._question_column, "question_field", question_in
        return messages, "messages_field", _conversation_text

    def _read(self, row: DataRow) -> None:
        for agent in (*self.answers, ""):
            # If `answers` names every agent, rows do not need the field `answer_field`.
            if agent or not self.answers or self._named[1] in row.fields:
                self._turns(row, agent)

    def _agents_of(self, row: DataRow, agents: Sequence[str]) -> tuple[str, ...]:
        field = self._named[2]
        if field is None:
            return tuple(agents)
        name = message_in(row, field, "agent_field").content
        if self.agent_field is None and self._agents_on_record.isdisjoint(agents):
            return tuple(agents)  # the turns come from another team, such as a single model
        if name not in agents:
            raise DataError(f"{row.place}: agent '{name}' is not in the team.{did_you_mean(name, agents)}")
        return (name,)

    def _turns(self, row: DataRow, agent: str) -> Turns:
        messages, answer, _ = self._named
        if messages is None:
            field = self.answers.get(agent, answer)
            setting = f"answers.{agent}" if agent in self.answers else "answer_field"
            question = self.question_of(row)
            return _turns(answered(question, answers_in(row, field, setting)), question.messages)
        return self._conversation(row, messages)

    def _conversation(self, row: DataRow, field: str) -> Turns:
        messages = messages_in(row, field, "messages_field")
        answer = self._named[1]
        if answer in row.fields:
            messages = (*messages, message_in(row, answer, "answer_field"))
        turns = _turns(messages)
        if not turns:
            raise row.unusable(f"the field '{field}' contains no answer by the assistant")
        return turns

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index. The question of the task is the text that is read before the first answer."""
        row = self.rows.of(split)[index]
        messages = self._named[0]
        if messages is None:
            task = self.question_of(row).task(f"{split}-{index}", rendered=self.rendered_prompts)
            read = [before for before, _ in self._turns(row, "")] if self._named[1] in row.fields else []
            return replace(task, messages=rounds(*read)) if len(read) > 1 else task
        system_of = () if self._named == _COLLECTED else messages_in(row, messages, "messages_field")
        system = "\n\n".join(message.content for message in system_of if message.role == "system")
        read = [before for before, _ in self._conversation(row, messages)]
        return Task(f"{split}-{index}", as_text(read[0]), system=system, messages=rounds(*read))

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RecordedState:
        """Start an episode of one record and return its state."""
        row = self.rows.row_of(task.id)
        turns = {agent: self._turns(row, agent) for agent in self._agents_of(row, agents)}

        def reward(agent: str, text: str) -> float | None:
            return 1.0 if any(_is_answer(answer, text) for _, answer in turns[agent]) else None

        reads = {agent: [as_text(before) for before, _ in own] for agent, own in turns.items()}
        return RecordedState(reads, reward)

    def recorded(self, agent: str, task: Task, turn: int, sample: int) -> str | Message:
        """Return the recorded turn of an agent."""
        answers = 0  # in the conversation so far, including answers that the agent only reads
        for before, answer in self._turns(self.rows.row_of(task.id), agent):  # noqa: B007 - used after the loop
            answers += sum(message.role == "assistant" for message in before)
            if turn <= answers:
                break
            answers += 1
        return _answer(answer)


def _turns(messages: Sequence[Message], before: Sequence[Message] = ()) -> Turns:
    """Return the answers in a list of messages, each with the messages that the agent reads before it.

    An answer at the beginning of a conversation, such as a greeting, is not a turn. The agent reads such a message like any other
    message.
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
