"""What a completion has to look like, as a grammar: constraints in llguidance's form of Lark, and calls of tools that are forced.

Nothing here needs the library: `models.token_masks` compiles these grammars for a model's tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kapelle.errors import ConfigError
from kapelle.types import Constraint, Json

HEADER = '%llguidance {"no_forcing": true}'
"""Every spelling in tokens is allowed, so that what is allowed depends on the text alone, not on a tokeniser's habits."""

JSON_OPTIONS: Mapping[str, Json] = {"whitespace_pattern": "[ ]?"}
"""JSON has at most one space where it may have any: a model that is fond of spaces would fill its limit with them."""

LONGEST = 1_000_000
"""Most characters of a constraint."""
DEEPEST = 64
"""Most levels of a schema: compilers of schemas call themselves for each."""


def lark_of(constraint: Constraint) -> str:
    """Return a constraint as a grammar whose rule `start` is the whole completion; ConfigError where it is none."""
    text = constraint.text
    if len(text) > LONGEST:
        raise ConfigError(
            f"A constraint has {len(text):,} characters; at most {LONGEST:,} are read. Make the {_name(constraint)} smaller."
        )
    if constraint.kind == "json_schema":
        return f"{HEADER}\nstart: {json_rule(_json(constraint))}\n"
    if constraint.kind == "json_object":
        return f"{HEADER}\nstart: {json_rule({'type': 'object'})}\n"
    if constraint.kind == "regex":
        return f"{HEADER}\nstart: {_pattern(text)}\n"
    if constraint.kind == "choices":
        choices = _json(constraint)
        if not choices or not all(isinstance(each, str) and each for each in choices):
            raise ConfigError(f"Choices are texts, at least one and none of them empty, not {text:.80}.")
        return f"{HEADER}\nstart: {' | '.join(map(quoted, choices))}\n"
    return f"{HEADER}\n{text}\n"


def json_rule(schema: Json) -> str:
    """Return what stands in a grammar for JSON that a schema describes."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"


def quoted(text: str) -> str:
    """Return a text as a string of a grammar."""
    return json.dumps(text)


def _pattern(regex: str) -> str:
    return "/(?:" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", regex, flags=re.DOTALL) + ")/"


def _json(constraint: Constraint) -> Json:
    try:
        value = json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"A constraint's {_name(constraint)} is no JSON ({error}).") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return value
    raise ConfigError(
        f"A constraint's {_name(constraint)} is nested more than {DEEPEST} levels deep. Name its inner parts in `$defs`."
    )


def _name(constraint: Constraint) -> str:
    return constraint.kind.replace("_", " ").replace("json", "JSON")


# -------- Calls of tools


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes one call of a tool: a JSON object between two texts."""

    begin: str = "<tool_call>\n"
    """What stands before the object; only after a text of its own can words stand before a call."""
    end: str = "\n</tool_call>"
    name: str = "name"
    """Key of the tool's name."""
    arguments: str = "arguments"
    """Key of the arguments."""


HERMES = CallForm()
"""Hermes and Qwen."""
LLAMA = CallForm("", "", arguments="parameters")


def forced_call(
    tools: Sequence[Mapping[str, Json]],
    name: str | None = None,
    form: CallForm = HERMES,
    *,
    words: bool = False,
    several: bool = False,
) -> Constraint:
    """Return the constraint: the completion calls one of the tools, with arguments of its schema.

    `tools` are in OpenAI's form, `{"type": "function", "function": {"name": …, "parameters": …}}`, or the inner part of it. With a
    `name` it is that tool. With `words` any text may stand before the call, and with `several` further calls may follow on
    lines of their own. ConfigError where no tool is left.
    """
    offered = [each.get("function", each) for each in tools]
    chosen = [each for each in offered if name is None or each["name"] == name]
    if not chosen:
        known = ", ".join(str(each["name"]) for each in offered) or "none"
        raise ConfigError(f"A call of the tool '{name}' is asked for, and the tools are: {known}.")
    rules = [f"call_{number}" for number in range(len(chosen))]
    lines = [HEADER]
    call = f"({' | '.join(rules)})"
    start = [call]
    if form.begin:
        start = ["opening", call] if words else [quoted(form.begin), call]
    if form.end:
        start.append(quoted(form.end))
    if several and form.begin and form.end:
        start.append(f"({quoted(chr(10) + form.begin)} {call} {quoted(form.end)})*")
    lines.append(f"start: {' '.join(start)}")
    if words and form.begin:
        literal = "".join(f"\\x{{{ord(character):x}}}" for character in form.begin)
        lines.append(f"opening[lazy]: /(?s:.*){literal}/")
    for rule, tool in zip(rules, chosen, strict=True):
        schema = tool.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        head = f"{{{json.dumps(form.name)}: {json.dumps(tool['name'])}, {json.dumps(form.arguments)}: "
        lines.append(f"{rule}: {quoted(head)} {json_rule(schema)} {quoted('}')}")
    return Constraint.grammar("\n".join(lines[1:]))
