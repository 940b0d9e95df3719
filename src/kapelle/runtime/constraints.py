"""What a completion has to look like, as a grammar: constraints in llguidance's form of Lark, and calls of tools that are forced.

Nothing here needs the library: `models.token_masks` compiles these grammars for a model's tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def lark_of(constraint: Constraint, special: Mapping[str, int] | None = None) -> str:
    """Return a constraint as a grammar whose rule `start` is the whole completion; ConfigError where it is none.

    Marks of forced calls may be one of the `special` tokens, text → id, in place of their letters.
    """
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
    return f"{HEADER}\n{_with_special_tokens(text, special or {})}\n"


def json_rule(schema: Json, *, lenient: bool = False) -> str:
    """Return what stands in a grammar for JSON that a schema describes.

    A `lenient` one leaves out what the library cannot hold text to, such as `uniqueItems` and formats that it does not know.
    """
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": {**JSON_OPTIONS, "lenient": True} if lenient else JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"


def quoted(text: str) -> str:
    """Return a text as a string of a grammar."""
    return json.dumps(text)


def _with_special_tokens(grammar: str, special: Mapping[str, int]) -> str:
    def either(found: re.Match[str]) -> str:
        token = special.get(json.loads(found[2]))
        return found[0] if token is None else f"{found[0]} | <[{token}]>"

    return _MARK_RULE.sub(either, grammar)


_MARK_RULE = re.compile(r'^(mark_\d+: )("[^\n]*")$', re.MULTILINE)
"""How `forced_call` writes the rule of a mark."""


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
class PairForm:
    """How a model writes an argument of a call as a key and a value."""

    begin: str
    """What stands before the value: `KEY` is the argument's name."""
    pad: str
    """What stands between the value and its end."""
    end: str
    """The end of the value, which no text may hold."""
    never: str
    """Characters that no key may have."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes calls of tools."""

    begin: str
    """What stands before the first call; only after a text of its own can words stand before a call."""
    call: str
    """One call: `NAME` is its tool's name, and `ARGUMENTS` are its arguments, an object of JSON."""
    end: str = ""
    """What stands behind the last call."""
    between: str | None = None
    """What stands between two calls; None where an answer makes one."""
    pairs: PairForm | None = None
    """How arguments are written one by one, texts without quotes; None where they are an object."""


HERMES = CallForm(
    "<tool_call>\n",
    '{"name": "NAME", "arguments": ARGUMENTS}',
    "\n</tool_call>",
    "\n</tool_call>\n<tool_call>\n",
)
"""Hermes, Qwen2.5 and Qwen3."""
LLAMA = CallForm("", '{"name": "NAME", "parameters": ARGUMENTS}')
MISTRAL = CallForm("[TOOL_CALLS] [", '{"name": "NAME", "arguments": ARGUMENTS}', "]", ", ")
MISTRAL_NAMED = CallForm("[TOOL_CALLS]", "NAME[ARGS]ARGUMENTS", between="[TOOL_CALLS]")
"""Since Mistral's tokeniser 11."""
DEEPSEEK = CallForm(
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "NAME<｜tool▁sep｜>ARGUMENTS",
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
)
"""V3.1 and later."""
DEEPSEEK_FENCED = CallForm(
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```",
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>",
)
"""V3 and R1."""
GLM = CallForm(
    "<tool_call>",
    "NAME\nARGUMENTS",
    "</tool_call>",
    "</tool_call>\n<tool_call>",
    PairForm("<arg_key>KEY</arg_key>\n<arg_value>", "", "</arg_value>", "<"),
)
QWEN_CODER = CallForm(
    "<tool_call>\n",
    "<function=NAME>\nARGUMENTS</function>",
    "\n</tool_call>",
    "\n</tool_call>\n<tool_call>\n",
    PairForm("<parameter=KEY>\n", "\n", "</parameter>", "<>\n"),
)
"""Qwen3-Coder and Qwen3.5."""
HARMONY = CallForm("<|channel|>commentary to=functions.", "NAME <|constrain|>json<|message|>ARGUMENTS")
"""gpt-oss, whose turn ends after one call."""

CALL_FORMS = (HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, DEEPSEEK, DEEPSEEK_FENCED, GLM, QWEN_CODER, HARMONY)

_MARK = re.compile(r"(<[^<>=\s]+>|\[[A-Z_]+\])")
"""A piece of a form that models have as one token, often a special one."""
CALL_MARKS = frozenset(
    mark
    for form in CALL_FORMS
    for text in (form.begin, form.call, form.end, form.between or "")
    for mark in _MARK.findall(text)
)
"""Special tokens that may be allowed: forced calls are written with them."""


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
    `name` it is that tool. With `words` any text may stand before the call, whose first mark is then spelled and no special token,
    and with `several` further calls may follow. A tool that is not `strict` is held to what can be held of its schema: the rest is
    left out. ConfigError where no tool is left, and for what the form cannot write.
    """
    offered = [each.get("function", each) for each in tools]
    chosen = [each for each in offered if name is None or each["name"] == name]
    if not chosen:
        known = ", ".join(str(each["name"]) for each in offered) or "none"
        raise ConfigError(f"A call of the tool '{name:.80}' is asked for, and the tools are: {known:.1000}.")
    marks: dict[str, str] = {}

    def written(text: str) -> str:
        """Return a text as pieces of a rule, marks by rules of their own (`_MARK_RULE`)."""
        pieces = filter(None, _MARK.split(text))
        return " ".join(
            marks.setdefault(each, f"mark_{len(marks)}") if _MARK.fullmatch(each) else quoted(each)
            for each in pieces
        )

    call = f"({' | '.join(f'call_{number}' for number in range(len(chosen)))})"
    opening = "opening" if words and form.begin else written(form.begin)
    start = [opening, call]
    if several and form.between is not None:
        start.append(f"({written(form.between)} {call})*")
    start.append(written(form.end))
    lines = [f"start: {' '.join(filter(None, start))}"]
    if words and form.begin:
        literal = "".join(f"\\x{{{ord(character):x}}}" for character in form.begin)
        lines.append(f"opening[lazy]: /(?s:.*){literal}/")
    head, tail = form.call.split("ARGUMENTS")
    for number, tool in enumerate(chosen):
        called, schema = str(tool["name"]), tool.get("parameters")
        if '"NAME"' in head:
            called = json.dumps(called)[1:-1]
        elif not _PLAIN_NAME.fullmatch(called):
            raise ConfigError(
                f"The tool '{called:.80}' cannot be called in this model's form: its name may have letters, digits, `_`, `.` and `-`."
            )
        lenient = tool.get("strict") is not True
        if form.pairs is not None:
            arguments = _pairs(form.pairs, f"value_{number}", called, schema or {}, lines, lenient=lenient)
        else:
            nothing = {"type": "object", "properties": {}, "additionalProperties": False}
            arguments = json_rule(schema or nothing, lenient=lenient)
        pieces = (written(head.replace("NAME", called)), arguments, written(tail))
        lines.append(f"call_{number}: {' '.join(filter(None, pieces))}")
    lines += [f"{rule}: {quoted(mark)}" for mark, rule in marks.items()]
    return Constraint.grammar("\n".join(lines))


_PLAIN_NAME = re.compile(r"[\w.-]{1,128}")

# -------- Arguments as keys and values in turns, as GLM and Qwen3-Coder write them: texts as they are, everything else as JSON

_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_OF_TEXTS = {"type", "enum", "const", "pattern", "minLength", "maxLength"}
_REMARKS = {"title", "description", "default", "examples", "deprecated", "$comment"}
"""What a schema says that holds no value to anything."""


def _pairs(form: PairForm, rule: str, tool: str, schema: Json, lines: list[str], *, lenient: bool) -> str:
    """Return the pairs of a tool's arguments as pieces of a rule, and add the rules of its texts, `rule` and a number, to the lines.

    Arguments come in the order of the schema. ConfigError for what pairs cannot be held to.
    """
    if not isinstance(schema, Mapping):
        raise ConfigError(f"The parameters of the tool '{tool}' are no schema of an object.")
    beyond = sorted(set(schema) - _OF_OBJECTS - _REMARKS)
    if beyond or schema.get("type", "object") != "object":
        raise ConfigError(
            f"The arguments of the tool '{tool}' are written one by one in this model's form, which cannot be held to "
            f"`{(beyond or ['type'])[0]}`. Describe them by `properties` and `required`."
        )
    required: Any = schema.get("required") or []
    given: Any = schema.get("properties") or {}
    named = {key: given.get(key, {}) for key in [*given, *required]}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    pairs = []
    for number, (key, value) in enumerate(named.items()):
        if value is False and key not in required:
            continue
        if key != key.strip() or any(character in key for character in form.never):
            raise ConfigError(
                f"The argument '{key:.80}' of the tool '{tool}' cannot be written in this model's form."
            )
        if isinstance(value, Mapping) and value.get("type") == "string":
            ending = _plain_text(form, f"{rule}_{number}", f"'{key}' of the tool '{tool}'", value, lines)
        else:
            inner = {**value, **shared} if isinstance(value, Mapping) else value
            rule_of_value = json_rule(inner, lenient=lenient)
            ending = f"{rule_of_value} {quoted(f'{form.pad}{form.end}{chr(10)}')}"
        pair = f"{quoted(form.begin.replace('KEY', key))} {ending}"
        pairs.append(pair if key in required else f"({pair})?")
    return " ".join(pairs)


def _plain_text(form: PairForm, rule: str, place: str, schema: Mapping[str, Any], lines: list[str]) -> str:
    """Return a text without quotes and what follows it as a piece of a rule, whose own rules are added to the lines."""
    beyond = sorted(set(schema) - _OF_TEXTS - _REMARKS)
    if beyond:
        raise ConfigError(
            f"Texts have no quotes in this model's form, and cannot be held to `{beyond[0]}`, as {place} is. Use `pattern` or `enum`."
        )
    least, most, pattern = schema.get("minLength", 0), schema.get("maxLength", ""), schema.get("pattern")
    if "enum" in schema or "const" in schema:
        listed = [each for each in schema.get("enum", [schema.get("const")]) if isinstance(each, str)]
        fitting = [
            each
            for each in listed
            if least <= len(each) <= (len(each) if most == "" else most)
            and schema.get("const", each) == each
            and (pattern is None or re.search(pattern, each))
            and form.end not in each
        ]
        if not fitting:
            raise ConfigError(f"There is no text that {place} may be.")
        return f"({' | '.join(map(quoted, fitting))}) {quoted(f'{form.pad}{form.end}{chr(10)}')}"
    # The text ends at the first end of a value, which is a part of the lexeme: else it would be read as a part of the text.
    ended = form.end.replace("/", r"\/")
    texts = [f"/(?s:.{{{least},{most}}}){form.pad}{ended}/", f"~/(?s:.*){ended}(?s:.+)/"]
    if pattern is not None:
        before = "" if pattern.startswith("^") else "(?s:.*)"
        behind = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else "(?s:.*)"
        inner = pattern.removeprefix("^") if behind else pattern.removeprefix("^").removesuffix("$")
        texts.append(_pattern(f"{before}(?:{inner}){behind}{form.pad}{form.end}"))
    lines += [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: {' & '.join(texts)}"]
    return f'{rule} "\\n"'
