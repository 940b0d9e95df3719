"""How fields of a row are read: dotted names, text, messages and conversations, and what is no usable text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kapelle.environments.data.source import Row
from kapelle.errors import DataError, did_you_mean
from kapelle.types import Json

MAX_QUESTION = 50_000
"""Characters of a question; a longer one fits no model that trains here, and is most often a damaged row."""


def field_of(row: Row, field: str, setting: str) -> Json:
    """Return a field of a row; dots reach into objects. DataError, naming the setting, when it is not there."""
    if field in row.fields:
        return row.fields[field]
    value: Json = row.fields
    for depth, key in enumerate(field.split(".")):
        known = value if isinstance(value, Mapping) else {}
        if key not in known:
            at = ".".join(field.split(".")[: depth + 1])
            raise DataError(
                f"{row.place} has no field '{at}'.{did_you_mean(key, known)} Set `environment.{setting}` to the field "
                f"that the data have.{_as_verl(row)}"
            )
        value = known[key]
    return value


def _as_verl(row: Row) -> str:
    """Return what to set for a row in the form of verl and siiRL; empty for others."""
    if not {"prompt", "reward_model"} <= set(row.fields):
        return ""
    return " The row has verl's form: `environment.question_field=prompt environment.answer_field=reward_model.ground_truth`."


def text_in(row: Row, field: str, setting: str) -> str:
    """Return a field as text that is not empty; numbers are written out. DataError for anything else."""
    value = field_of(row, field, setting)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(
            f"{row.place}: the field '{field}' holds {type(value).__name__}, not text or a number. "
            f"Fix or drop the row, or set `environment.{setting}`."
        )
    text = str(value)
    if not text.strip():
        raise DataError(f"{row.place}: the field '{field}' is empty. Fix or drop the row.")
    return text


def question_in(row: Row, field: str, setting: str) -> str:
    """Return the question of a field: text, or a conversation as verl's `prompt` is one.

    A conversation's system messages are left out, because each agent has its own (`team.agents`); a single message
    stands alone, several have their roles before them. DataError for an empty or oversized question.
    """
    value = field_of(row, field, setting)
    if isinstance(value, list):
        messages = [said for said in messages_of(row, value, field, setting) if said[0] != "system"]
        text = _joined(messages)
    else:
        text = text_in(row, field, setting)
    if not text.strip():
        raise DataError(f"{row.place}: the field '{field}' asks nothing. Fix or drop the row.")
    if len(text) > MAX_QUESTION:
        raise DataError(
            f"{row.place}: the question has {len(text):,} characters; at most {MAX_QUESTION:,} are read. Drop the row."
        )
    return text


def said_in(row: Row, field: str, setting: str) -> str:
    """Return the answer in a field: text, a message, or the last message of a conversation."""
    value = field_of(row, field, setting)
    if isinstance(value, list) and value:
        value = value[-1]
    if isinstance(value, Mapping):
        value = value.get("content", value.get("value"))
    if not isinstance(value, str):
        raise DataError(
            f"{row.place}: the field '{field}' holds no text, message or conversation. Fix or drop the row, or set "
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
    return _joined(messages_of(row, value, field, setting))


def _joined(messages: Sequence[tuple[str, str]]) -> str:
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
                f"`from` and `value`). Fix or drop the row, or set `environment.{setting}`."
            )
        messages.append((role, content))
    return messages
