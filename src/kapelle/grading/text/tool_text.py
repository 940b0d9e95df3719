"""Calls of tools as models write them, read without running any of it.

Three forms: `hermes` (`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen),
`llama` (the text begins with `{"name": …, "parameters": {…}}`, several of them, or a list of such; the names that others give
these, `arguments` and `input`, OpenAI's `tool_calls` and Mistral's `[TOOL_CALLS]` are read, too), `pythonic`
(`[weather(city="Bern"), math.sqrt(x=2)]`). Python's own parser reads the last one, after a check that what
stands outside the strings can only be calls and literals; nothing is evaluated.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from kapelle.grading.text.extraction import said
from kapelle.grading.text.json_answer import NotJson, parse_json, unfenced
from kapelle.types import Json

Form = Literal["hermes", "llama", "pythonic"]

MAX_CALLS = 64
MAX_PYTHON = 10_000
"""Characters of a pythonic call."""
MAX_DEPTH = 16
"""Brackets in brackets of a pythonic call."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call: a tool's name and its arguments by name, JSON values."""

    name: str
    arguments: Mapping[str, Json]


class NotCalls(Exception):
    """A text that tries to call tools and does not succeed."""


def parse_calls(text: str, forms: Sequence[Form]) -> tuple[Call, ...]:
    """Return the calls of a text in the first of the forms that it uses; empty when it calls nothing.

    NotCalls for a text that uses a form and breaks it.
    """
    spoken = said(text)
    if spoken.text is None:
        raise NotCalls(spoken.problem)
    for form in forms:
        calls = _FORMS[form](spoken.text)
        if calls is not None:
            if len(calls) > MAX_CALLS:
                raise NotCalls(f"It makes {len(calls)} calls; at most {MAX_CALLS} are read.")
            return tuple(calls)
    return ()


_HERMES = re.compile(r"</?tool_call>")


def _hermes(text: str) -> list[Call] | None:
    marks = list(_HERMES.finditer(text))
    if not marks:
        return None
    calls = []
    in_turns = all((mark[0] == "<tool_call>") == (place % 2 == 0) for place, mark in enumerate(marks))
    if not in_turns:
        raise NotCalls("The tool_call tags do not open and close in turns.")
    # A last one that is not closed ends with the text.
    ends = [mark.start() for mark in marks[1::2]] + [len(text)] * (len(marks) % 2)
    for opening, end in zip(marks[::2], ends, strict=True):
        inside = _unwrapped(_json(text[opening.end() : end]))
        calls += [_call(each, ("arguments",)) for each in inside]
    return calls


def _llama(text: str) -> list[Call] | None:
    if text.lstrip().startswith(_MISTRAL):
        return _mistral(text)
    body = unfenced(text.strip().removeprefix("<|python_tag|>")).strip()
    if not body.startswith(("{", "[{")) and not re.match(r"\[\s*\{", body[:40]):
        return None
    parts = [_json(part) for part in _values(body)]
    return [_call(each, _ARGUMENTS) for part in parts for each in _unwrapped(part)]


_ARGUMENTS = ("parameters", "arguments", "input")
_MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([A-Za-z_][\w.-]{0,127})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _mistral(text: str) -> list[Call]:
    """Return calls behind `[TOOL_CALLS]`: a list of objects, or each tool's name before its arguments."""
    calls: list[Call] = []
    for part in text.strip().split(_MISTRAL)[1:]:
        named = _NAMED.match(part)
        if named is not None:
            arguments = _json(part[named.end() :])
            calls.append(_call({"name": named[1], "arguments": arguments}, _ARGUMENTS))
            continue
        values = [_json(each) for each in _values(part.strip())]
        calls += [_call(each, _ARGUMENTS) for value in values for each in _unwrapped(value)]
    return calls


def _unwrapped(value: Json) -> list[Json]:
    """Return the calls of a value: a list of them, or a message as OpenAI's interface writes it, `tool_calls` or `function`."""
    if isinstance(value, list):
        return [call for each in value for call in _unwrapped(each)]
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list) and set(value) <= _MESSAGE:
        return _unwrapped(value["tool_calls"])
    if isinstance(value, dict) and isinstance(value.get("function"), dict) and set(value) <= _WRAPPED:
        return [value["function"]]
    return [value]


_MESSAGE = frozenset({"tool_calls", "role", "content"})
_WRAPPED = frozenset({"function", "id", "type", "index"})


_NEXT = re.compile(r"\s*(?:<\|python_tag\|>|[;,])?\s*")


def _values(text: str) -> list[str]:
    """Return the JSON objects and lists that a text begins with, one behind the other; prose may follow, without brackets."""
    found: list[str] = []
    place = 0
    while place < len(text) and text[place] in "{[" and len(found) <= MAX_CALLS:
        end = _end(text, place)
        found.append(text[place:end])
        between = _NEXT.match(text, end)
        place = between.end() if between else end
    behind = text[place:]
    if re.search(r"[\[\]{}]", behind):
        raise NotCalls("Behind its calls stands what may be another call.")
    return found


_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


def _end(text: str, place: int) -> int:
    """Return where the bracket that opens at a place is closed; the end of the text where it never is."""
    depth = 0
    for match in _BRACKET.finditer(text, place):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth == 0:
            return match.end()
    return len(text)


def _json(text: str) -> Json:
    try:
        return parse_json(text)
    except NotJson as problem:
        raise NotCalls(f"A call cannot be read. {problem}") from None


def _call(value: Json, names: Sequence[str]) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise NotCalls("A call is an object with a `name`.")
    given = [name for name in names if name in value]
    if len(given) != 1 or set(value) - {"name", "id", "type", *given}:
        raise NotCalls(f"A call has a `name`, `{names[0]}` and nothing else.")
    arguments = value[given[0]]
    if isinstance(arguments, str):
        # As OpenAI's interface writes them: JSON in a text.
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise NotCalls(f"The `{given[0]}` of a call are an object.")
    return Call(value["name"], arguments)


_STRINGS = re.compile(r"'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\"")
_OPENS = re.compile(r"\[?\s*[^\W\d][\w.]*\s*\(")
# Outside its strings a list of calls holds names, numbers, brackets and signs before numbers: no operator,
# so that the tree is no deeper than the brackets.
_SKELETON = re.compile(r"[\w.,:=()\[\]{}\s\"+-]*")
_OPERATION = re.compile(
    r"[^(\[{,:=\s]\s*[-+](?<![0-9][eE][-+])|[-+]\s*[^0-9.\s]|(?:\.\s*\w+\s*){8}|\w{64}|[\w\"]\s*\""
    r"|\b(?:not|and|or|in|is|if|else|for|lambda|await|yield|async|from|import)\b"
)


_CODE = re.compile(r"```(?:python|py|tool_code|tool_call)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


def _pythonic(text: str) -> list[Call] | None:
    fence = _CODE.fullmatch(text.strip())
    body = (fence[1] if fence and "```" not in fence[1] else text).strip()
    if not _OPENS.match(body):
        return None
    if len(body) > MAX_PYTHON:
        raise NotCalls(f"The calls have {len(body):,} characters; at most {MAX_PYTHON:,} are read.")
    skeleton = _STRINGS.sub('"', body)
    if not _SKELETON.fullmatch(skeleton) or _OPERATION.search(skeleton) or _deep(skeleton):
        raise NotCalls("Only calls with literal arguments are read.")
    try:
        lines = ast.parse(body).body
    except (SyntaxError, ValueError) as problem:
        raise NotCalls(f"The calls cannot be read: {problem}.") from None
    calls: list[Call] = []
    for line in lines:
        if not isinstance(line, ast.Expr):
            raise NotCalls("Only calls stand there, one behind the other, in a list or in a line each.")
        tree = line.value
        calls += map(_python_call, tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree])
    return calls


def _deep(skeleton: str) -> bool:
    depth = 0
    for character in skeleton:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_DEPTH:
            return True
    return False


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise NotCalls("A call names its tool and each of its arguments: tool(name=value).")
    arguments: dict[str, Json] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise NotCalls("A call gives each argument once, by name.")
        arguments[keyword.arg] = _literal(keyword.value)
    return Call(_dotted(node.func), arguments)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise NotCalls("A tool has a name.")


def _literal(node: ast.expr) -> Json:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | bool | None):
        return node.value
    if isinstance(node, ast.Constant) and isinstance(node.value, float) and abs(node.value) < float("inf"):
        return Decimal(repr(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _literal(node.operand)
        if isinstance(value, int | Decimal) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) for key in node.keys if key is not None]
        if len(keys) == len(node.values) == len({str(key) for key in keys}) and all(
            isinstance(k, str) for k in keys
        ):
            return dict(zip(keys, map(_literal, node.values), strict=True))
    raise NotCalls("An argument is a literal: text, number, true, false, none, list or mapping.")


_FORMS: Mapping[Form, Callable[[str], list[Call] | None]] = {
    "hermes": _hermes,
    "llama": _llama,
    "pythonic": _pythonic,
}


def write_calls(calls: Sequence[Call], form: Form) -> str:
    """Return a text that makes these calls in a form; `parse_calls` reads them back."""
    return _WRITERS[form](calls)


def _written_hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)


def _written_llama(calls: Sequence[Call]) -> str:
    objects = [_object(call, "parameters") for call in calls]
    return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


def _object(call: Call, arguments: str) -> str:
    return json.dumps({"name": call.name, arguments: dict(call.arguments)}, ensure_ascii=False)


def _written_pythonic(calls: Sequence[Call]) -> str:
    inside = (
        f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"
        for call in calls
    )
    return f"[{', '.join(inside)}]"


_WRITERS: Mapping[Form, Callable[[Sequence[Call]], str]] = {
    "hermes": _written_hermes,
    "llama": _written_llama,
    "pythonic": _written_pythonic,
}
