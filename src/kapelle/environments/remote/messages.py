"""Tasks, messages and other values as messages of the environment contract; the conversion is lossless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kapelle.types import Message, Task
from kapelle.wire import environment_v1_pb2 as pb

DEEPEST = 30
"""Levels of lists and mappings; protobuf reads 100 levels of messages, of which a mapping takes three."""
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
DIGITS = 4300
"""Most digits of a whole number, which is Python's own limit."""


def to_value(value: object, place: str, depth: int = 0) -> pb.Value:
    """Return a value as a message; TypeError, naming its place, for an unsupported value."""
    if depth > DEEPEST:
        raise TypeError(f"{place[:200]} lies more than {DEEPEST} levels deep")
    if value is None:
        return pb.Value()
    if isinstance(value, bool):
        return pb.Value(boolean=value)
    if isinstance(value, int):
        if _LEAST <= value <= _MOST:
            return pb.Value(integer=value)
        return pb.Value(large_integer=str(value))
    if isinstance(value, float):
        return pb.Value(number=value)
    if isinstance(value, str):
        return pb.Value(text=_whole(value, place))
    if isinstance(value, Mapping):
        return pb.Value(map=to_map(value, place, depth))
    if isinstance(value, list | tuple):
        items = [to_value(inner, f"{place}.{index}", depth + 1) for index, inner in enumerate(value)]
        return (
            pb.Value(tuple=pb.Values(items=items))
            if isinstance(value, tuple)
            else pb.Value(list=pb.Values(items=items))
        )
    raise TypeError(f"{place} is a {type(value).__name__}, which has no form in a message")


def to_map(values: Mapping[Any, Any], place: str, depth: int = 0) -> pb.Map:
    """Return a mapping as a message, in its order."""
    return pb.Map(
        entries=[
            pb.Entry(
                key=to_value(key, f"a key of {place}", depth + 1),
                value=to_value(value, f"{place}.{key}", depth + 1),
            )
            for key, value in values.items()
        ]
    )


def from_value(value: pb.Value) -> Any:
    """Return the value of a message; ValueError for an invalid one."""
    kind = value.WhichOneof("kind")
    if kind is None:
        return None
    if kind in ("list", "tuple"):
        items = [from_value(item) for item in getattr(value, kind).items]
        return tuple(items) if kind == "tuple" else items
    if kind == "map":
        return from_map(value.map)
    if kind == "large_integer":
        if len(value.large_integer) > DIGITS:
            raise ValueError(f"a whole number of more than {DIGITS} digits")
        return int(value.large_integer)
    return getattr(value, kind)


def from_map(values: pb.Map) -> dict[Any, Any]:
    """Return the mapping of a message; ValueError for an unhashable key."""
    try:
        return {from_value(entry.key): from_value(entry.value) for entry in values.entries}
    except TypeError as error:
        raise ValueError(f"a key that cannot be one: {error}") from None


def to_task(task: Task) -> pb.Task:
    """Return a task as a message."""
    return pb.Task(
        id=_whole(task.id, "a task's id"),
        question=_whole(task.question, "a task's question"),
        data=to_map(task.data, "a task's data"),
        part=_whole(task.part, "a task's part"),
        system=_whole(task.system, "a task's system message"),
        messages=[pb.Conversation(messages=map(to_message, read)) for read in task.messages],
        rendered=task.rendered,
    )


def from_task(task: pb.Task) -> Task:
    """Return the task of a message."""
    messages = tuple(tuple(map(from_message, read.messages)) for read in task.messages)
    return Task(
        task.id,
        task.question,
        from_map(task.data),
        task.part,
        system=task.system,
        messages=messages,
        rendered=task.rendered,
    )


def to_message(message: Message) -> pb.Message:
    """Return a message of a conversation as one of the wire."""
    return pb.Message(
        role=message.role, content=message.content, speaker=message.speaker, structured=message.structured
    )


def from_message(message: pb.Message) -> Message:
    """Return the message of a conversation."""
    speaker = message.speaker if message.HasField("speaker") else None
    structured = message.structured if message.HasField("structured") else None
    return Message(message.role, message.content, speaker, structured=structured)


def _whole(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TypeError(f"{place} is a text with half a character (a lone surrogate)") from None
    return text
