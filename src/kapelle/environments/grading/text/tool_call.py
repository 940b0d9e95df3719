"""Compare tool calls with the accepted calls of the Berkeley Function Calling Leaderboard (BFCL).

An accepted call lists every correct value of each argument. An empty string among these values means that the argument is
optional (as in the `possible_answer` files of BFCL v4). As in BFCL, parallel calls are matched in any order.

The comparison is stricter than that of the leaderboard, which treats some different values as equal. This module distinguishes
different numbers and formulas in strings (`same_words`), distinguishes true from 1, and compares nested lists and mappings at
all levels.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate
from typing import Literal

from kapelle.environments.grading.text.extraction import MAX_TEXT, clean, said
from kapelle.environments.grading.text.json_answer import NotJson, parse_json, same_json, unfenced
from kapelle.environments.grading.text.match import composed
from kapelle.environments.grading.verdict import Grade, no_answer, right, wrong
from kapelle.types import Json

# -------- Tool calls as models write them, read without executing anything
#
# There are eight forms.
# - `hermes`: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as in Hermes, Qwen2.5 and Qwen3.
# - `llama`: the text begins with `{"name": …, "parameters": {…}}`, several such objects, or a list of them. The alternative keys
#   `arguments` and `input`, OpenAI's `tool_calls` and Mistral's `[TOOL_CALLS]` are accepted too.
# - `pythonic`: `[weather(city="Bern"), math.sqrt(x=2)]`. Python's own parser reads it after a check that the text outside the
#   strings can only be calls and literals; nothing is evaluated.
# The other forms are those of the chat templates of these model families:
# - `mistral`: `[TOOL_CALLS] [{…}]` or `[TOOL_CALLS]name[ARGS]{…}`; text before them is allowed.
# - `deepseek`: V3 and R1 with a fence around the arguments, V3.1 without.
# - `glm` (4.5): `<tool_call>name`, then alternately `<arg_key>` and `<arg_value>`.
# - `qwen_coder` (Qwen3-Coder and Qwen3.5): `<function=name>` and `<parameter=key>` inside `<tool_call>`.
# - `harmony` (gpt-oss): messages on the channel `commentary` to `functions.name`.

Form = Literal["hermes", "llama", "pythonic", "mistral", "deepseek", "glm", "qwen_coder", "harmony"]

MAX_CALLS = 64
MAX_PYTHON = 10_000
"""Maximum number of characters in the calls of a text in Python syntax."""
MAX_DEPTH = 16
"""Maximum depth of nested brackets in calls in Python syntax, and of nested schemas that are checked."""


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A tool call with the name of the tool and a mapping from argument names to JSON values."""

    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class UnreadCall:
    """A tool call whose arguments are not a JSON object; the arguments are stored as the string that the model wrote."""

    name: str
    arguments: str


class NotCalls(Exception):
    """Raised for a text with an invalid tool call."""


def parse_calls(text: str, forms: Sequence[Form], schemas: Sequence[Json] = ()) -> tuple[ReadCall, ...]:
    """Return the calls of a text in the first of `forms` that the text uses, or an empty tuple if it contains no calls.

    Raises NotCalls if the text does not follow the form that it uses. The forms `glm` and `qwen_coder` write strings without
    quotes; the `schemas` of the tools define which values are strings.
    """
    spoken = said(text)
    # A token that ends a message in harmony ends the turn in the other forms.
    own = clean(text) if "harmony" in forms and len(text) <= MAX_TEXT else None
    for form in forms:
        if form != "harmony" and spoken.text is None:
            raise NotCalls(spoken.problem)
        if form == "harmony":
            calls = None if own is None else _harmony(own)
        elif form in _IN_PAIRS:
            bodies, parameters = _tagged(spoken.text or ""), _parameters(schemas)
            calls = None if bodies is None else [_IN_PAIRS[form](body, parameters) for body in bodies]
        else:
            calls = _FORMS[form](spoken.text or "")
        if calls is not None:
            if len(calls) > MAX_CALLS:
                raise NotCalls(f"It makes {len(calls)} calls; at most {MAX_CALLS} are read.")
            return tuple(calls)
    return ()


_TAGS = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
_SPANS: Mapping[Form, re.Pattern[str]] = {
    "hermes": _TAGS,
    "glm": _TAGS,
    "qwen_coder": _TAGS,
    "llama": re.compile(r"\A.*[\]}]", re.DOTALL),  # no bracket follows its calls
    "mistral": re.compile(r"\[TOOL_CALLS\].*[\]}]", re.DOTALL),
    "pythonic": re.compile(r"\A.*", re.DOTALL),
    "deepseek": re.compile(r"<｜tool▁calls?▁begin｜>(?:.*<｜tool▁calls?▁end｜>|.*)", re.DOTALL),
}
"""Mapping from each form to a regular expression for the part of a text that contains calls."""


def beside_calls(text: str, form: Form) -> str:
    """Return the part of a text outside its calls; this part is empty for forms in which a text consists only of calls."""
    if form == "harmony":
        others = (each for each in harmony_messages(text) if each.recipient is None)
        return "\n".join(each.text for each in others if each.channel != "analysis").strip()
    return _SPANS[form].sub("", text).strip()


def _is_quoted(text: str, form: Form) -> bool:
    """Return whether a call occurs in a code block, a comment, a quoted line or quotes."""
    for call in () if form == "harmony" else _SPANS[form].finditer(text):
        before, behind = text[: call.start()], text[call.end() :]
        around = before.rstrip()[-1:] + behind.lstrip()[:1]
        if (
            len(_FENCES.findall(before)) % 2
            or any(before.rfind(opening) > before.rfind(end) for opening, end in _COMMENTS)
            or before.rpartition("\n")[2].lstrip().startswith((">", "#", "//"))
            or around in _QUOTES
        ):
            return True
    return False


_FENCES = re.compile("```|~~~|\"\"\"|'''")
_COMMENTS = (("<!--", "-->"), ("/*", "*/"))
_QUOTES = ('""', "''", "``", "“”", "‘’", "«»")
# Marks of the forms in this module, of other forms (ReAct, Anthropic's) and of their JSON; a Python call with a named argument.
_MARK = re.compile(
    r"</?tool_call|<\|?(?:tool_call|python_tag|function|invoke)|\[TOOL_CALLS\]|<｜tool▁|to=functions\.|\bAction Input\s*:"
    r"|[\"'](?:arguments|parameters|input)[\"']\s*:|\w\(\s*[^\W\d]\w*\s*=(?!=)"
)
_WHOLE = re.compile(r"```[\w-]*[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


def _mentions_call(text: str, tools: Collection[str]) -> bool:
    """Return whether a text may contain a call in any form.

    The arguments of calls of `tools` may also be positional.
    """
    if _MARK.search(text):
        return True
    with suppress(NotCalls):
        if _pythonic(text):
            return True
    name = f"(?:{'|'.join(map(re.escape, tools))})" if tools else r"(?!)"
    in_json = rf"[\"']{name}[\"']\s*:\s*[\[{{]|[\"']\s*:\s*[\"']{name}[\"']"
    return bool(re.search(rf"\b{name}\s*\(\s*(?:[\"'\d\[{{-]|\w+\s*=)|<{name}\b|{in_json}", text))


_TAG = re.compile(r"</?tool_call>")


def _tagged(text: str) -> list[str] | None:
    """Return the strings between `<tool_call>` and `</tool_call>`, or None if the text has no such tag."""
    marks = list(_TAG.finditer(text))
    if not marks:
        return None
    if not all((mark[0] == "<tool_call>") == (place % 2 == 0) for place, mark in enumerate(marks)):
        raise NotCalls("The `tool_call` tags do not alternate between opening and closing.")
    # The end of the text closes the last tag.
    ends = [mark.start() for mark in marks[1::2]] + [len(text)] * (len(marks) % 2)
    return [text[opening.end() : end] for opening, end in zip(marks[::2], ends, strict=True)]


def _hermes(text: str) -> list[ReadCall] | None:
    bodies = _tagged(text)
    if bodies is None:
        return None
    return [_call(each, ("arguments",)) for body in bodies for each in _unwrapped(_json(body))]


def _llama(text: str) -> list[ReadCall] | None:
    if text.lstrip().startswith(_MISTRAL):
        calls: list[ReadCall] = []
        # Each `[TOOL_CALLS]` is followed by a list of objects, or by a tool's name and its arguments.
        for part in text.strip().split(_MISTRAL)[1:]:
            named = _NAMED.match(part)
            if named is not None:
                arguments = _json(part[named.end() :])
                calls.append(_call({"name": named[1], "arguments": arguments}, _ARGUMENTS))
                continue
            values = [_json(each) for each in _values(part.strip())]
            calls += [_call(each, _ARGUMENTS) for value in values for each in _unwrapped(value)]
        return calls
    body = unfenced(text.strip().removeprefix("<|python_tag|>")).strip()
    if not body.startswith(("{", "[{")) and not re.match(r"\[\s*\{", body[:40]):
        return None
    parts = [_json(part) for part in _values(body)]
    return [_call(each, _ARGUMENTS) for part in parts for each in _unwrapped(part)]


def _mistral(text: str) -> list[ReadCall] | None:
    place = text.find(_MISTRAL)
    return None if place < 0 else _llama(text[place:])


_DEEPSEEK = re.compile(
    "<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^<\n]{1,128}?)"
    "(?:<｜tool▁sep｜>(?P<plain>.*?)|\n```json\n(?P<fenced>.*?)\n```)(?:<｜tool▁call▁end｜>|$)",
    re.DOTALL,
)
_DEEPSEEK_MARK = re.compile("</?｜tool▁(?:calls|call)▁begin｜>")


def _deepseek(text: str) -> list[ReadCall] | None:
    first = _DEEPSEEK_MARK.search(text)
    if first is None:
        return None
    calls = []
    for found in _DEEPSEEK.finditer(text, first.start()):
        arguments = _json((found["plain"] or found["fenced"] or "").strip())
        calls.append(_call({"name": found["name"].strip(), "arguments": arguments}, ("arguments",)))
    if len(calls) != text.count("<｜tool▁call▁begin｜>") or not calls:
        raise NotCalls("A call cannot be read.")
    return calls


_GLM_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _glm(body: str, parameters: Mapping[str, Json]) -> ReadCall:
    name, _, _ = body.partition("<arg_key>")
    place, arguments = len(name), dict[str, Json]()
    while place < len(body):
        pair = _GLM_PAIR.match(body, place)
        if pair is None or pair[1].strip() in arguments:
            raise NotCalls("A call must be a name followed by pairs of a key and a value, each key once.")
        key = pair[1].strip()
        arguments[key] = _unquoted(pair[2], parameters.get(name.strip()), key)
        place = pair.end()
    if not _NAME.fullmatch(name.strip()):
        raise NotCalls("A call must begin with the name of its tool.")
    return ReadCall(name.strip(), arguments)


_NAME = re.compile(r"[\w.-]{1,128}")
_FUNCTION = re.compile(r"\s*<function=([\w.-]{1,128})>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)</parameter>\s*", re.DOTALL)


def _qwen_coder(body: str, parameters: Mapping[str, Json]) -> ReadCall:
    function = _FUNCTION.match(body)
    if function is None:
        raise NotCalls("A call must begin with `<function=` and the name of its tool.")
    place, arguments = function.end(), dict[str, Json]()
    while pair := _PARAMETER.match(body, place):
        if pair[1] in arguments:
            raise NotCalls("A call must give each argument once.")
        value = pair[2].removeprefix("\n").removesuffix("\n")
        arguments[pair[1]] = _unquoted(value, parameters.get(function[1]), pair[1])
        place = pair.end()
    if body[place:].strip() != "</function>":
        raise NotCalls("A call must have its parameters between `<function=…>` and `</function>`.")
    return ReadCall(function[1], arguments)


_IN_PAIRS: Mapping[Form, Callable[[str, Mapping[str, Json]], ReadCall]] = {
    "glm": _glm,
    "qwen_coder": _qwen_coder,
}
"""Mapping from each form that alternates keys and values, with unquoted strings, to the function that parses one call."""


def _unquoted(text: str, schema: Json, key: str) -> Json:
    """Return the value of an argument that is written without quotes if it is a string, and as JSON otherwise.

    If the schema allows the string but not the JSON value, the value is a string: 42 is read as a string if the schema allows a
    string or null. If the schema allows both, the argument is read as JSON.
    """
    own = _inside(schema, "properties", key)
    if _inside(own, "type") == "string":
        return text
    as_text = _may_be(text, own, schema, {})
    try:
        value = parse_json(text)
    except NotJson:
        # Templates write these values as Python does.
        return text if as_text else _OF_PYTHON.get(text.strip(), text)
    return text if as_text and not _may_be(value, own, schema, {}) else value


_OF_PYTHON: Mapping[str, Json] = {"True": True, "False": False, "None": None}


def _may_be(value: Json, schema: Json, root: Json, known: dict[str, bool], deep: int = 0) -> bool:
    """Return whether a value has a type that the schema allows; unknown parts of a schema allow every value.

    `known` caches the results for references.
    """
    if not isinstance(schema, dict) or deep > MAX_DEPTH:
        return schema is not False
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        if reference not in known:
            known[reference] = True  # in case the schema refers to itself
            there = _inside(root, *reference[2:].split("/"))
            known[reference] = _may_be(value, there, root, known, deep + 1)
        return known[reference]
    for name, holds in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        listed = schema.get(name)
        if isinstance(listed, list):
            answers = (_may_be(value, each, root, known, deep + 1) for each in listed)
            if not holds(answers):
                return False
    if isinstance(schema.get("enum"), list) and not any(same_json(value, each) for each in schema["enum"]):
        return False
    if "const" in schema and not same_json(value, schema["const"]):
        return False
    kinds = schema.get("type")
    if kinds is None or (value is None and schema.get("nullable") is True):
        return True
    return any(_is_kind(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds]))


def _is_kind(value: Json, kind: Json) -> bool:
    """Return whether a value has the given JSON Schema type; an unknown type allows every value."""
    if value is None or isinstance(value, bool):
        own = {"null"} if value is None else {"boolean"}
    elif isinstance(value, int | Decimal):
        own = {"number", "integer"} if value == Decimal(value).to_integral_value() else {"number"}
    else:
        own = {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}
    return kind in own or kind not in _KINDS


_KINDS = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})


@dataclass(frozen=True, slots=True)
class HarmonyMessage:
    """A message of a response in the format of gpt-oss."""

    channel: str
    """The channel of the message: `analysis` for thinking, `commentary` for calls and text before calls, or `final` for the
    final text."""
    recipient: str | None
    """The name of the called tool, such as `functions.look`, or None if the message is not a call."""
    text: str


_HARMONY = re.compile(r"<\|(start|channel|constrain|message|end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")


def harmony_messages(text: str) -> list[HarmonyMessage]:
    """Return the messages of a response; the last message may be incomplete.

    Text without harmony marks is returned as one message of the channel `final`.
    """
    messages: list[HarmonyMessage] = []
    header: dict[str, str] | None = {} if text.lstrip().startswith("<|") else None
    part, place = "start", 0
    channel, recipient = "final", None
    for mark in [*_HARMONY.finditer(text), None]:
        piece = text[place : len(text) if mark is None else mark.start()]
        if header is None:
            if piece or recipient is not None:
                messages.append(HarmonyMessage(channel, recipient, piece))
        else:
            header[part] = header.get(part, "") + piece
        if mark is None:
            break
        place = mark.end()
        if mark[1] == "message" and header is not None:
            channel = (header.get("channel", "").split() or ["final"])[0]
            found = _RECIPIENT.search(" ".join(header.values()))
            recipient = None if found is None else found[1]
            header = None
        elif mark[1] in ("start", "channel", "constrain"):
            header = header or {}
            part = mark[1]
        elif header is None:
            header, part = {}, "start"
    return messages


def _harmony(text: str) -> list[ReadCall] | None:
    called = [each for each in harmony_messages(text) if each.recipient is not None]
    if not called:
        return None
    return [
        _call({"name": str(each.recipient).removeprefix("functions."), "arguments": _json(each.text.strip() or "{}")},
              ("arguments",))
        for each in called
    ]  # fmt: skip


_ARGUMENTS = ("parameters", "arguments", "input")
_MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]{1,128})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def _unwrapped(value: Json) -> list[Json]:
    """Return the calls in a value: a list of calls, or a message of the OpenAI API with `tool_calls` or `function`."""
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
    """Return the consecutive JSON objects and lists at the start of a text as strings; prose without brackets may follow them."""
    found: list[str] = []
    place = 0
    while place < len(text) and text[place] in "{[" and len(found) <= MAX_CALLS:
        # `end` is the place of the closing bracket, or the end of the text.
        depth, end = 0, len(text)
        for mark in _BRACKET.finditer(text, place):
            depth += (mark[0] in "[{") - (mark[0] in "]}")
            if depth == 0:
                end = mark.end()
                break
        found.append(text[place:end])
        between = _NEXT.match(text, end)
        place = between.end() if between else end
    behind = text[place:]
    if re.search(r"[\[\]{}]", behind):
        raise NotCalls("There may be another call after its calls.")
    return found


_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


def _json(text: str) -> Json:
    try:
        return parse_json(text)
    except NotJson as problem:
        raise NotCalls(f"A call cannot be read. {problem}") from None


def _call(value: Json, names: Sequence[str]) -> ReadCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise NotCalls("A call must be an object with a `name`.")
    given = [name for name in names if name in value]
    if len(given) != 1 or set(value) - {"name", "id", "type", *given}:
        raise NotCalls(f"A call must have a `name`, `{names[0]}` and nothing else.")
    arguments = value[given[0]]
    if isinstance(arguments, str):
        # OpenAI's API writes the arguments as JSON in a string.
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise NotCalls(f"The `{given[0]}` of a call must be an object.")
    return ReadCall(value["name"], arguments)


_STRINGS = re.compile(r"'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\"")
_OPENS = re.compile(r"\[?\s*[^\W\d][\w.]*\(")
# Outside its strings, a list of calls has names, numbers, brackets and signs before numbers, but no operators, so the
# syntax tree is no deeper than the brackets.
_SKELETON = re.compile(r"[\w.,:=()\[\]{}\s\"+-]*")
_OPERATION = re.compile(
    r"[^(\[{,:=\s]\s*[-+](?<![0-9][eE][-+])|[-+]\s*[^0-9.\s]|(?:\.\s*\w+\s*){8}|\w{64}|[\w\"]\s*\""
    r"|\b(?:not|and|or|in|is|if|else|for|lambda|await|yield|async|from|import)\b"
)


_CODE = re.compile(r"```(?:python|py|tool_code|tool_call)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


def _pythonic(text: str) -> list[ReadCall] | None:
    fence = _CODE.fullmatch(text.strip())
    body = (fence[1] if fence and "```" not in fence[1] else text).strip()
    if not _OPENS.match(body):
        return None
    if len(body) > MAX_PYTHON:
        raise NotCalls(f"The calls have {len(body):,} characters; at most {MAX_PYTHON:,} are read.")
    skeleton = _STRINGS.sub('"', body)
    depths = accumulate((mark in "([{") - (mark in ")]}") for mark in skeleton)
    deep = max(depths, default=0) > MAX_DEPTH
    if not _SKELETON.fullmatch(skeleton) or _OPERATION.search(skeleton) or deep:
        raise NotCalls("Only calls with literal arguments are read.")
    try:
        lines = ast.parse(body).body
    except (SyntaxError, ValueError) as problem:
        raise NotCalls(f"The calls cannot be read: {problem}.") from None
    calls: list[ReadCall] = []
    for line in lines:
        if not isinstance(line, ast.Expr):
            raise NotCalls("The text must consist of calls only, in a list or one per line.")
        tree = line.value
        for node in tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]:
            if not isinstance(node, ast.Call) or node.args:
                raise NotCalls("A call must name its tool and each argument: tool(name=value).")
            arguments: dict[str, Json] = {}
            for keyword in node.keywords:
                if keyword.arg is None or keyword.arg in arguments:
                    raise NotCalls("A call must give each argument once, by name.")
                arguments[keyword.arg] = _literal(keyword.value)
            calls.append(ReadCall(_dotted(node.func), arguments))
    return calls


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise NotCalls("A call must name its tool.")


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
    raise NotCalls("An argument must be a literal: text, number, true, false, none, list or mapping.")


_FORMS: Mapping[Form, Callable[[str], list[ReadCall] | None]] = {
    "hermes": _hermes,
    "llama": _llama,
    "pythonic": _pythonic,
    "mistral": _mistral,
    "deepseek": _deepseek,
}


def write_calls(calls: Sequence[ReadCall | UnreadCall], form: Form) -> str:
    """Return a string with the given calls in the given form, which `parse_calls` can parse."""
    if form == "pythonic":
        return f"[{', '.join(map(_as_python, calls))}]"
    if form in _IN_PAIRS:
        return "\n".join(_as_pairs(call, form) for call in calls)
    written = [
        (call.name, call.arguments if isinstance(call, UnreadCall) else _as_json(dict(call.arguments)))
        for call in calls
    ]
    if form == "harmony":
        return "<|end|><|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
            for name, arguments in written
        ) + "<|call|>" * bool(written)
    if form == "deepseek":
        begin, sep, end = (f"<｜tool▁{mark}｜>" for mark in ("call▁begin", "sep", "call▁end"))
        inner = "".join(f"{begin}{name}{sep}{arguments}{end}" for name, arguments in written)
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
    key = "parameters" if form == "llama" else "arguments"
    objects = [f'{{"name": {_as_json(name)}, "{key}": {arguments}}}' for name, arguments in written]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if form == "mistral":
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


def _as_json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_python(call: ReadCall | UnreadCall) -> str:
    if isinstance(call, UnreadCall):
        return f"{call.name}({call.arguments})"
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def _as_pairs(call: ReadCall | UnreadCall, form: Form) -> str:
    if form == "glm":
        begin, pair = f"<tool_call>{call.name}", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>"
    else:
        begin, pair = f"<tool_call>\n<function={call.name}>", "<parameter={}>\n{}\n</parameter>"
    end = ["</function>"] * (form == "qwen_coder")
    arguments = (
        [call.arguments]
        if isinstance(call, UnreadCall)
        else [pair.format(key, _shown(value)) for key, value in call.arguments.items()]
    )
    return "\n".join([begin, *arguments, *end, "</tool_call>"])


def _shown(value: Json) -> str:
    return value if isinstance(value, str) else _as_json(value)


# -------- Comparison of strings in arguments: equal words regardless of their separators, equal numbers, equal formulas
#
# The Berkeley Function Calling Leaderboard drops all of ` ,./-_*^` before it compares (BFCL v4, `standardize_string`). Two
# strings that differ after that also differ here. In addition, this module distinguishes numbers that a mark changes (`1.5`
# and `15`, `-5` and `5`, `2/3` and `23`), formulas (`x*y`, `x/y` and `x-y`), and words with different operators between them.

_BETWEEN = re.compile(r"[ ,./_*^-]*")
_DATE = re.compile(
    r"(?<![0-9])([0-9]{4})([-/.])([0-9]{1,2})\2([0-9]{1,2})(?![0-9])"
    r"|(?<![0-9])([0-9]{1,2})([-/.])([0-9]{1,2})\6([0-9]{4})(?![0-9])"
)
_FUNCTIONS = frozenset({"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "abs", "pi", "lambda"})
_LETTERS = re.compile(r"[a-z]+")
_MATHEMATICS = re.compile(r"[0-9a-z\s.,:()+*/^=-]*")
_OPERATOR = re.compile(r"[*^+=/-]")
_ATTACHED = frozenset({"-", "."})
"""Separators between a word and a following number that may be omitted, as in `Bob-123` and `Jan.28`."""


def same_words(one: str, other: str) -> bool:
    """Return whether two strings are equal, ignoring case and separators between words; the comparison is symmetric."""
    left, right = (text.lower().replace("'", '"') for text in map(composed, (one, other)))
    if left == right:
        return True
    if is_formula(left) or is_formula(right):
        formulas = {re.sub(r"\s+", "", text).replace("**", "^").rstrip(".") for text in (left, right)}
        return len(formulas) == 1
    (characters, marks), (other_characters, other_marks) = _pieces(left), _pieces(right)
    # Operators at the same place must be equal: `price/unit` is not `price*unit`.
    return characters == other_characters and all(
        not a or not b or a == b for a, b in zip(marks, other_marks, strict=True)
    )


def is_formula(text: str) -> bool:
    """Return whether a string is a formula.

    A formula contains an operator, and all its words are single letters or names of functions.
    """
    if not _OPERATOR.search(text) or not _MATHEMATICS.fullmatch(text):
        return False
    runs = _LETTERS.findall(text)
    return bool(runs) and all(len(run) == 1 or run in _FUNCTIONS for run in runs)


def _pieces(text: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the characters of a string that BFCL compares and, for each character, the operators before it.

    Each character is paired with the preceding separators that change the value of a number. An empty character marks the end
    of the string.
    """
    text = _DATE.sub(lambda date: "-".join(part for part in date.groups() if part and part.isdigit()), text)
    characters, marks, before = list[tuple[str, str]](), list[str](), ""
    place = 0
    while place <= len(text):
        found = _BETWEEN.match(text, place)
        assert found is not None, "the pattern also matches the empty string"
        between, character = found[0], text[found.end() : found.end() + 1]
        if not character.isdigit():
            weight = ""
        elif before.isdigit():
            weight = re.sub("[ ,_]", "", between) or " " * bool(between)
        else:
            sign = re.split("[ ,_]", between)[-1]
            weight = "" if before and sign == between and sign in _ATTACHED else sign
        characters.append((weight, character))
        marks.append(re.sub("[ ,._]", "", between))
        before, place = character, found.end() + 1
    return characters, marks


AcceptedCall = Mapping[str, Mapping[str, Sequence[Json]]]
"""A mapping from the name of a tool to the correct values of each argument, for example `{"sqrt": {"x": [2, 2.0]}}`."""

ALL_FORMS: tuple[Form, ...] = ("hermes", "llama", "pythonic")


def grade_tool_call(
    text: str,
    accepted: Sequence[AcceptedCall],
    forms: Sequence[Form] = ALL_FORMS,
    schemas: Sequence[Json] = (),
) -> Grade:
    """Return whether a text makes exactly the accepted calls; if `accepted` is empty, the text must make no call.

    `schemas` are the schemas of the tools, with the keys `name` and `parameters`. If the schema type of an argument is `number`
    (`float` in BFCL), the value 5.0 matches an accepted value of 5; for other types, an accepted integer requires an integer.
    All required arguments must be given.
    """
    spoken = clean(text) if "harmony" in forms else said(text).text
    calls: tuple[ReadCall, ...] = ()
    form: Form | None = "harmony" if "harmony" in forms else None
    try:
        for each in forms:
            if calls := parse_calls(text, (each,), schemas):
                form = each
                break
        if spoken is None:
            raise NotCalls("The text contains characters that change how it is displayed.")
        fence = _WHOLE.fullmatch(spoken.strip())
        own = fence[1] if fence and "```" not in fence[1] else spoken
        if calls and form is not None and _is_quoted(own, form):
            raise NotCalls("A call is in a code block, a comment or quotes.")
        if _mentions_call(own if form is None else beside_calls(own, form), _parameters(schemas)):
            raise NotCalls("There may be another call beside its calls.")
        if not spoken.strip():
            raise NotCalls("The text is empty; if no call is correct, it must say so in words.")
    except NotCalls as problem:
        return no_answer(str(problem))
    shown = "; ".join(f"{call.name}({', '.join(call.arguments)})" for call in calls) or "no call"
    expected = "; ".join(name for call in accepted for name in call) or "no call"
    if not calls and accepted:
        return no_answer("The text calls no tool in the required form.")
    if len(calls) != len(accepted) or not _matched(calls, accepted, _parameters(schemas)):
        return wrong(shown, expected)
    return right(shown)


def may_be_left_out(values: Json, required: bool = False) -> bool:
    """Return whether a call may omit an argument with the given correct values.

    An argument may be omitted if it has no correct value but the empty string, or if the empty string is one of its correct
    values and the argument is not required.
    """
    if not isinstance(values, list):
        return False
    some = any(value != "" for value in values)
    return not some or ("" in values and not required)


def required_arguments(schemas: Sequence[Json], tool: str) -> Sequence[Json]:
    """Return the names of the required arguments of a tool."""
    names = _inside(_parameters(schemas).get(tool), "required")
    return names if isinstance(names, list) else ()


def _parameters(schemas: Sequence[Json]) -> Mapping[str, Json]:
    """Return a mapping from the name of each tool to the schema of its arguments."""
    tools = [each.get("function", each) for each in schemas if isinstance(each, dict)]
    return {str(tool.get("name")): tool.get("parameters") for tool in tools if isinstance(tool, dict)}


def _matched(
    calls: Sequence[ReadCall], accepted: Sequence[AcceptedCall], parameters: Mapping[str, Json]
) -> bool:
    """Return whether the calls can be matched one to one with the accepted calls (by augmenting paths)."""
    partners = list[list[int]]()
    for call in calls:
        schema = parameters.get(call.name)
        required = _inside(schema, "required") or ()
        arguments = {composed(each): value for each, value in call.arguments.items()}
        partners.append([])
        for place, one in enumerate(accepted):
            [(name, options)] = one.items()
            values = {composed(each): listed for each, listed in options.items()}
            if composed(call.name) == composed(name) and _fits(arguments, values, schema, required):
                partners[-1].append(place)
    taken: dict[int, int] = {}

    def place_found(call: int, seen: set[int]) -> bool:
        for place in partners[call]:
            if place in seen:
                continue
            seen.add(place)
            if place not in taken or place_found(taken[place], seen):
                taken[place] = call
                return True
        return False

    return all(place_found(call, set()) for call in range(len(calls)))


def _fits(
    arguments: Mapping[str, Json], options: Mapping[str, Json], schema: Json, required: Sequence[Json] = ()
) -> bool:
    if any(name not in options for name in arguments):
        return False
    for name, values in options.items():
        if name not in arguments:
            if not may_be_left_out(values, name in required):
                return False
            continue
        value, own = arguments[name], _inside(schema, "properties", name)
        if value == "" and isinstance(values, list):
            # An empty string marks an optional argument, unless its schema or its correct values show that it is a string.
            kind = _inside(own, "type")
            texts = all(isinstance(option, str) for option in values)
            if not (texts if kind is None else kind in {"string", "any"}):
                return False
        if not any(
            _same(value, option, own) for option in (values if isinstance(values, list) else [values])
        ):
            return False
    return True


def _inside(schema: Json, *names: str) -> Json:
    """Return the part of a schema at the given path of keys, or None if the path does not exist."""
    for name in names:
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _same(value: Json, option: Json, schema: Json) -> bool:
    if isinstance(value, str) and isinstance(option, str):
        return same_words(value, option)
    if isinstance(value, list) and isinstance(option, list):
        items = _inside(schema, "items")
        pairs = zip(value, option, strict=False)
        return len(value) == len(option) and all(_same(each, right, items) for each, right in pairs)
    if isinstance(value, dict) and isinstance(option, dict):
        return _fits(value, option, schema)
    if isinstance(value, Decimal) and isinstance(option, int):
        # An integer is required unless the tool requires a fraction; an integer is also correct where a fraction is required.
        return _inside(schema, "type") in {"number", "float"} and same_json(value, option)
    return same_json(value, option)
