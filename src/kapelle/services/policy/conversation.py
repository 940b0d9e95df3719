"""Messages in OpenAI's form as the messages that an agent reads, with tools in the form that kapelle's agents know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from kapelle.environments.tools.contract import tools_prompt
from kapelle.grading.text.tool_call import Call, Form, NotCalls, parse_calls
from kapelle.services.http.refusals import wrong
from kapelle.services.policy.chat_form import ChatMessage, Tool, ToolCall
from kapelle.types import Json, Message


class Said(NamedTuple):
    """An answer of an agent: the words beside its calls, and the calls."""

    content: str | None
    """All words outside the calls, those of its thoughts too; what stands before the first call as it is, but for
    the spaces at its end. None for no words."""
    calls: tuple[Call, ...]


NAMED = ("system", "user")
"""Roles in which several may speak: an agent reads `NAME: ` before their words. An assistant's name is its own, and a
tool's answer belongs to its call."""


def read_messages(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], system: str | None
) -> list[Message]:
    """Return the conversation that an agent reads: the caller's, or its own system message where the caller has none.

    Tools stand before the first message that is no system message, where agents of the environment `tools` read them.
    """
    read = [read_message(message) for message in messages]
    if not any(message.role == "system" for message in read) and system:
        read.insert(0, Message("system", system))
    if tools:
        first = next((place for place, message in enumerate(read) if message.role == "user"), None)
        if first is None:
            raise wrong(
                "Tools need a message of the role `user`, before which the agent reads of them.", "tools"
            )
        prompt = tools_prompt([tool.function.model_dump(exclude_none=True) for tool in tools], "hermes")
        read[first] = Message("user", f"{prompt}\n\n{read[first].content}")
    return read


def read_message(message: ChatMessage) -> Message:
    """Return one message as an agent reads it; Refusal (400) for calls that are none."""
    role = "system" if message.role == "developer" else message.role
    if role != "assistant" and message.tool_calls:
        raise wrong("Only messages of the role `assistant` call tools.", "messages")
    words = message.text
    if message.name is not None and role in NAMED and words:
        words = f"{message.name}: {words}"  # chat templates know no names
    return Message(role, "\n".join([*([words] if words else []), *map(_written, message.tool_calls or [])]))


def _written(call: ToolCall) -> str:
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        raise wrong("The `arguments` of a tool call must be JSON.", "messages") from None
    return f"<tool_call>\n{json.dumps({'name': call.function.name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def parse_answer(text: str, forms: Sequence[Form] = ("hermes",)) -> Said:
    """Return an agent's text as words and calls; a text that breaks the form is words alone."""
    try:
        calls = parse_calls(text, forms)
    except NotCalls:
        return Said(text, ())
    if not calls:
        return Said(text, ())
    thoughts = text.rfind("</think>") + 1  # calls are read behind them
    first = text.index("<tool_call>", thoughts)
    behind = (each.partition("</tool_call>")[2].strip() for each in text[first:].split("<tool_call>"))
    before = text[:first].rstrip()
    return Said("\n".join([*([before] if before else []), *filter(None, behind)]) or None, calls)


def call_row(call: Call, identity: str) -> Json:
    """Return a call as OpenAI's clients read it."""
    arguments = json.dumps(call.arguments, ensure_ascii=False, default=_number)
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _number(value: object) -> float:
    return float(str(value))
