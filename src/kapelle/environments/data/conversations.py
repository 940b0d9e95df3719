"""Read the questions and answers in the columns of a row, which can be strings or conversations (lists of messages).

A conversation has the format of OpenAI (`role`, `content`, `tool_calls`) or ShareGPT (`from`, `value`). The messages, tool calls
and tools of a conversation are kept, so that the model's chat template can render them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

from kapelle.environments.grading.text.tool_call import ReadCall, UnreadCall, write_calls
from kapelle.environments.tools.contract import tools_prompt
from kapelle.errors import DataError, did_you_mean
from kapelle.runtime.row_files import DataRow
from kapelle.types import Json, Message, Task, as_text, worded

QUESTIONS = ("prompt", "question", "problem", "messages", "conversations")
"""The default columns that contain the question, in order of preference."""

MAX_QUESTION = 50_000
"""The maximum number of characters of a question. A longer question usually indicates a corrupt row."""

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Mapping from a role in the format of OpenAI, ShareGPT or Gemma to the role in chat templates."""

RENDERED = re.compile(
    r"<\|im_start\|>|<\|im_(?:system|user|assistant)\|>|<\|start_header_id\|>|<\|start_of_role\|>|<\|START_OF_TURN_TOKEN\|>"
    r"|<start_of_turn>|<\|turn>|<\|(?:system|user|assistant|start)\|>|<｜(?:User|Assistant)｜>|\[/?INST\]|\[SYSTEM_PROMPT\]"
)
"""Markers with which messages begin in the chat templates of common model families."""


# -------- Columns of a row


def field_of(row: DataRow, field: str, setting: str) -> Json:
    """Return a field of a row. A dot in the name selects a field inside an object.

    Raises DataError if the field is missing. The error message names the setting that specifies the field.
    """
    if field in row.fields:
        return row.fields[field]
    value: Json = row.fields
    for depth, key in enumerate(field.split(".")):
        known = value if isinstance(value, Mapping) else {}
        if key not in known:
            at = ".".join(field.split(".")[: depth + 1])
            verl = (
                " The row has verl's format: use `environment.question_field=prompt environment.answer_field=reward_model.ground_truth`."
                if {"prompt", "reward_model"} <= set(row.fields)
                else ""
            )
            raise DataError(
                f"{row.place} has no field '{at}'.{did_you_mean(key, known)} Set `environment.{setting}` to a field of the data.{verl}"
            )
        value = known[key]
    return value


def text_in(row: DataRow, field: str, setting: str) -> str:
    """Return a field as a non-empty string. Numbers are converted to strings. Raises DataError for any other value."""
    value = field_of(row, field, setting)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise row.unusable(
            f"the field '{field}' is {type(value).__name__}, not a string or a number", setting
        )
    if value != value:  # noqa: PLR0124 - NaN, a missing value in pandas
        raise row.unusable(f"the field '{field}' is NaN, a missing value")
    text = str(value)
    if not text.strip():
        raise row.unusable(f"the field '{field}' is empty")
    return text


# -------- Messages


def messages_in(row: DataRow, field: str, setting: str) -> tuple[Message, ...]:
    """Return the messages in a field that contains a conversation, a single message or a string.

    If the row has a column `tools`, the tools are added to the first user message. Raises DataError, which names the row, if a
    message lacks a role or text.
    """
    value = field_of(row, field, setting)
    if isinstance(value, str | int | float):
        value = {"role": "user", "content": text_in(row, field, setting)}
    entries = [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, list) or not entries:
        raise row.unusable(f"the field '{field}' is not a string, a message or a conversation", setting)
    read: list[Message] = []
    open_calls: list[tuple[str, str]] = []
    for number, entry in enumerate(entries):
        try:
            read.append(_message(_without_none(entry), open_calls, len(read)))
        except ValueError as fault:
            raise row.unusable(f"message {number} of the field '{field}' {fault}", setting) from None
    system = row.fields.get("system")  # ShareGPT's rows have this field
    if isinstance(value, list) and isinstance(system, str) and all(m.role != "system" for m in read):
        read = [Message("system", system), *read] if system.strip() else read
    tools = _tools(row)
    first = next((place for place, message in enumerate(read) if message.role == "user"), None)
    if tools and first is not None:
        content = read[first].content
        structured = json.dumps({"role": "user", "content": content, "tools": tools}, ensure_ascii=False)
        words = f"{tools_prompt(tools, 'hermes')}\n\n{content}"  # for templates that do not support tools
        read[first] = replace(read[first], content=words, structured=structured)
    return tuple(read)


def _message(entry: Json, open_calls: list[tuple[str, str]], place: int) -> Message:
    """Parse one message. Raises ValueError with a description of the error if the message is invalid.

    `open_calls` contains (id, tool name) for every call that has no result yet.
    """
    fields = entry if isinstance(entry, Mapping) else {}
    named, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    if not isinstance(named, str) or (content is None and not fields.get("tool_calls")):
        raise ValueError("needs a role and text (`role` and `content`, or `from` and `value`)")
    role = ROLES.get(named)
    if role is None:
        raise ValueError(
            f"has the unknown role '{named}'.{did_you_mean(named, ROLES)} Known roles are {', '.join(ROLES)}"
        )
    calls = fields.get("tool_calls") or []
    if named == "function_call":
        calls, content = [content], ""
    if isinstance(content, list):
        if any(not isinstance(part, Mapping) or "text" not in part for part in content):
            raise ValueError("has a part that is not text; images in rows are not supported")
        content = "".join(str(part["text"]) for part in content)
    elif role == "tool" and not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    text = content or ""
    if not isinstance(text, str):
        raise ValueError(f"has {type(content).__name__} as its text")  # noqa: TRY004 - the caller names the row
    row: dict[str, Json] = {"role": role, "content": text}
    if role == "assistant":
        if thoughts := fields.get("reasoning_content") or fields.get("thinking"):
            row["reasoning_content"] = thoughts
        if calls:
            read = [_call(call) for call in calls]
            given = [call.get("id") if isinstance(call, Mapping) else None for call in calls]
            ids = [str(name or f"call{place:03d}{k:02d}") for k, name in enumerate(given)]
            row["tool_calls"] = [
                {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for name, call in zip(ids, read, strict=True)
            ]
            open_calls[:] = [(name, call.name) for name, call in zip(ids, read, strict=True)]
            text = "\n".join(part for part in (text, write_calls(read, "hermes")) if part)
    elif role == "tool":
        # Rows of ShareGPT have no ids, so results are matched in the order of the calls.
        answered = next((call for call in open_calls if call[0] == fields.get("tool_call_id")), None)
        answered = answered or next(iter(open_calls), ("call00000", "tool"))
        open_calls[:] = [call for call in open_calls if call != answered]
        row |= {
            "tool_call_id": fields.get("tool_call_id") or answered[0],
            "name": fields.get("name") or answered[1],
        }
    return Message(role, text, structured=json.dumps(row, ensure_ascii=False) if len(row) > 2 else None)


def _call(value: Json) -> ReadCall | UnreadCall:
    """Parse a tool call in the format of OpenAI or a tool call of ShareGPT, which is a string."""
    try:
        call = json.loads(value) if isinstance(value, str) else value
        call = call.get("function", call)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise ValueError(f"has a tool call without name and arguments: {value!r:.60}") from None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return UnreadCall(name, arguments)
    return (
        ReadCall(name, arguments) if isinstance(arguments, dict) else UnreadCall(name, json.dumps(arguments))
    )


def _tools(row: DataRow) -> list[Json]:
    """Return the tools in the column `tools` of a row.

    The column contains JSON schemas in OpenAI's format or a JSON string of such schemas.
    """
    tools = row.fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return []
    listed = [_without_none(tool) for tool in tools]
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in listed]


def _without_none(value: Json) -> Json:
    """Return a value without the fields that are None.

    In Arrow, every struct has all fields that occur in its column, so missing fields are None.
    """
    if isinstance(value, Mapping):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


# -------- Questions and answers


@dataclass(frozen=True, slots=True)
class Question:
    """The question in a row: a conversation without the final answer, or a single message."""

    messages: tuple[Message, ...]
    """The messages of the question, without system messages."""
    system: str = ""
    """The text of the system messages."""

    @property
    def text(self) -> str:
        """The whole question as a single string."""
        return as_text(self.messages)

    def worded(self, wording: Callable[[str], str]) -> Question:
        """Return the question with the function `wording` applied to its last message, for example to insert the message into a prompt."""
        *before, last = self.messages
        return replace(self, messages=(*before, worded(last, wording)))

    def task(self, name: str, data: Mapping[str, Json] | None = None, *, rendered: bool = False) -> Task:
        """Return a task with this question. The argument `name` becomes `Task.id`.

        If `rendered` is true, the prompt is used unchanged and the tools of the row are omitted.
        """
        if rendered and len(self.messages) == 1 and not self.system:
            row = json.loads(self.messages[0].structured or "{}")
            return Task(name, row.get("content", self.text), data or {}, rendered=True)
        return Task(
            name, self.text, data or {}, system=self.system, messages=rounds(self.messages), rendered=rendered
        )


def rounds(*read: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """Return `Task.messages`, given the messages that an agent reads in each turn.

    The result is empty if every turn consists of a single user message.
    """
    plain = all(len(each) == 1 and each[0] == Message("user", each[0].content) for each in read)
    return () if plain else tuple(tuple(each) for each in read)


def read_question(row: DataRow, field: str, setting: str) -> Question:
    """Return the question in a field that contains a string or a conversation. A final answer in the conversation is removed.

    Raises DataError if the question is empty or too long.
    """
    messages = messages_in(row, field, setting)
    system = "\n\n".join(m.content for m in messages if m.role == "system" and m.content.strip())
    rest = [message for message in messages if message.role != "system"]
    while rest and rest[-1].role == "assistant":  # the final answer, in a data set for imitation learning
        rest.pop()
    text = as_text(rest)
    if not rest or not text.strip():
        raise row.unusable(f"the field '{field}' contains no question")
    if len(text) > MAX_QUESTION:
        raise row.unusable(f"the question has {len(text):,} characters; the limit is {MAX_QUESTION:,}")
    return Question(tuple(rest), system)


def question_in(row: DataRow, field: str, setting: str) -> str:
    """Return the question in a field as a single string. See `read_question`."""
    return read_question(row, field, setting).text


def answers_in(row: DataRow, field: str, setting: str) -> tuple[Message, ...]:
    """Return the answer in a field that contains a string, a message or a conversation that ends with an answer of the assistant."""
    value = field_of(row, field, setting)
    if isinstance(value, str):
        return (Message("assistant", value),)
    messages = messages_in(row, field, setting) if isinstance(value, list | Mapping) else ()
    if not messages or messages[-1].role != "assistant":
        raise row.unusable(
            f"the field '{field}' must be a string, or messages that end with the assistant's answer",
            setting,
        )
    return messages


def message_in(row: DataRow, field: str, setting: str) -> Message:
    """Return the last message of the answer in a field."""
    return answers_in(row, field, setting)[-1]


def answered(question: Question, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages of an answer that follow the messages of the question.

    The result begins with the first new message of the assistant.
    """
    rest = [message for message in messages if message.role != "system"]
    count = len(question.messages)
    repeats = len(rest) > count and all(
        (one.role, one.content.strip()) == (other.role, other.content.strip())
        for one, other in zip(rest[:count], question.messages, strict=True)
    )
    return tuple(dropwhile(lambda message: message.role != "assistant", rest[count if repeats else 0 :]))
