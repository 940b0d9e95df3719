"""Convert constraints on completions to grammars in llguidance's dialect of Lark, and create constraints that force tool calls.

This module does not need llguidance: `models.token_masks` compiles the grammars for a model's tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kapelle.errors import ConfigError
from kapelle.types import Constraint, Json

HEADER = '%llguidance {"no_forcing": true}'
"""Grammar header that allows every tokenisation of a text. Choices are an exception: only the tokenisation of the tokeniser is allowed
(`lark_of`)."""

JSON_OPTIONS: Mapping[str, Json] = {"whitespace_pattern": "[ ]?"}
"""Options for JSON that allow at most one space where JSON allows any whitespace, because a model could fill its token limit with
spaces."""

LONGEST = 1_000_000
"""Maximum number of characters of a constraint."""
DEEPEST = 64
"""Maximum depth of a JSON schema, because schema compilers are recursive."""


Tokenise = Callable[[str], Sequence[int]]
"""Function that returns the tokens of a string, or no tokens if they do not decode to exactly this string."""


def lark_of(
    constraint: Constraint, special: Mapping[str, int] | None = None, tokenise: Tokenise | None = None
) -> str:
    """Return a constraint as a grammar, in which the rule `start` describes the whole completion.

    Raises ConfigError if the constraint is invalid. The argument `special` maps the texts of special tokens to their ids. A marker of
    a forced call can be written either as a special token or as ordinary characters. A choice must be written with the tokens that
    `tokenise` returns. If `tokenise` is None or returns no tokens, all tokenisations of the choice are allowed.
    """
    text = constraint.text
    if len(text) > LONGEST:
        raise ConfigError(
            f"The {_name(constraint)} of a constraint has {len(text):,} characters, but at most {LONGEST:,} are allowed."
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
            raise ConfigError(f"Choices must be a list of non-empty strings, not {text:.80}.")
        rules = [f"{CHOICE}_{number}" for number in range(len(choices))]
        lines = [
            f"start: {' | '.join(rules)}",
            *(f"{r}: {quoted(c)}" for r, c in zip(rules, choices, strict=True)),
        ]
        return f"{HEADER}\n{_in_tokens(chr(10).join(lines), {}, tokenise)}\n"
    if constraint.kind == "endpoint":
        raise ConfigError("The fields of an endpoint's request cannot constrain a model in this process.")
    return f"{HEADER}\n{_in_tokens(text, special or {}, tokenise)}\n"


def json_rule(schema: Json, *, lenient: bool = False) -> str:
    """Return the grammar rule for JSON that satisfies a schema.

    With `lenient`, schema keywords that llguidance does not support (`uniqueItems`) are ignored.
    """
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": {**JSON_OPTIONS, "lenient": True} if lenient else JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"


def quoted(text: str) -> str:
    """Return a string as a string literal for a grammar."""
    return json.dumps(text)


def _in_tokens(grammar: str, special: Mapping[str, int], tokenise: Tokenise | None) -> str:
    """Replace strings by tokens in the rules of markers and choices of a grammar, which may come from a grammar sent to a server."""

    def mark(found: re.Match[str]) -> str:
        token = special.get(json.loads(found[2]))
        return found[0] if token is None else f"{found[0]} | <[{token}]>"

    def choice(found: re.Match[str]) -> str:
        tokens = tokenise(json.loads(found[2])) if tokenise is not None else ()
        return found[1] + " ".join(f"<[{token}]>" for token in tokens) if tokens else found[0]

    return _CHOICE_RULE.sub(choice, _MARK_RULE.sub(mark, grammar))


_MARK_RULE = re.compile(r'^(mark_\d+: )("[^\n]*")$', re.MULTILINE)
"""Regular expression of the rule of a marker in `forced_call`."""
CHOICE = "kapelle_choice"
_CHOICE_RULE = re.compile(rf'^({CHOICE}_\d+: )("[^\n]*")$', re.MULTILINE)
"""Regular expression of the rule of a choice in `lark_of`."""


def _pattern(regex: str) -> str:
    return "/(?:" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", regex, flags=re.DOTALL) + ")/"


def _json(constraint: Constraint) -> Json:
    try:
        value = json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"A constraint's {_name(constraint)} is not valid JSON ({error}).") from None
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
        f"A constraint's {_name(constraint)} has more than {DEEPEST} levels. Put its inner parts into `$defs`."
    )


def _name(constraint: Constraint) -> str:
    return constraint.kind.replace("_", " ").replace("json", "JSON")


# -------- Tool calls


@dataclass(frozen=True, slots=True)
class PairForm:
    """The format in which a model writes an argument of a tool call as a key and a value."""

    begin: str
    """Text before the value, in which `KEY` stands for the name of the argument."""
    pad: str
    """Text between the value and the end marker."""
    end: str
    """Marker at the end of the value, which values cannot contain."""
    never: str
    """Characters that keys cannot contain."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The format in which a model writes tool calls."""

    begin: str
    """Text before the first call. Other text before a call is allowed only if this text is not empty."""
    call: str
    """Format of one call. `NAME` stands for the name of the tool, and `ARGUMENTS` stands for the arguments as a JSON object."""
    end: str = ""
    """Text after the last call of a message."""
    between: str | None = None
    """Text between two calls, or None if a message contains only one call."""
    pairs: PairForm | None = None
    """Format in which arguments are written one by one with unquoted strings, or None if arguments are written as one JSON object."""


HERMES = CallForm(
    "<tool_call>\n",
    '{"name": "NAME", "arguments": ARGUMENTS}',
    "\n</tool_call>",
    "\n</tool_call>\n<tool_call>\n",
)
"""The format of Hermes, Qwen2.5 and Qwen3."""
LLAMA = CallForm("", '{"name": "NAME", "parameters": ARGUMENTS}')
MISTRAL = CallForm("[TOOL_CALLS] [", '{"name": "NAME", "arguments": ARGUMENTS}', "]", ", ")
MISTRAL_NAMED = CallForm("[TOOL_CALLS]", "NAME[ARGS]ARGUMENTS", between="[TOOL_CALLS]")
"""The format of Mistral models since version 11 of the tokeniser."""
DEEPSEEK = CallForm(
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "NAME<｜tool▁sep｜>ARGUMENTS",
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
)
"""The format of DeepSeek V3.1 and later."""
DEEPSEEK_FENCED = CallForm(
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```",
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>",
)
"""The format of DeepSeek V3 and R1."""
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
"""The format of Qwen3-Coder and Qwen3.5."""
HARMONY = CallForm("<|channel|>commentary to=functions.", "NAME <|constrain|>json<|message|>ARGUMENTS")
"""The format of gpt-oss, in which a turn ends after one call."""

CALL_FORMS = (HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, DEEPSEEK, DEEPSEEK_FENCED, GLM, QWEN_CODER, HARMONY)

_MARK = re.compile(r"(<[^<>=\s]+>|\[[A-Z_]+\])")
"""Regular expression of the parts of a format that are often a single special token."""
CALL_MARKS = frozenset(
    mark
    for form in CALL_FORMS
    for text in (form.begin, form.call, form.end, form.between or "")
    for mark in _MARK.findall(text)
)
"""Special tokens that forced tool calls may contain."""


def forced_call(
    tools: Sequence[Mapping[str, Json]],
    name: str | None = None,
    form: CallForm = HERMES,
    *,
    words: bool = False,
    several: bool = False,
) -> Constraint:
    """Return a constraint that forces the completion to call one of the tools, with arguments that satisfy the schema of the tool.

    Each tool is given in the format of the OpenAI API, `{"type": "function", "function": {"name": …, "parameters": …}}`, or as the
    inner part of this object. If a `name` is given, only this tool can be called. With `words`, any text may precede the call; the
    first marker of the call is then written as ordinary characters. With `several`, more calls may follow. Unsupported parts of a
    schema are ignored unless the tool is `strict`. Raises ConfigError if there is no tool, or if the format of the model cannot
    express the calls.
    """
    offered = [each.get("function", each) for each in tools]
    chosen = [each for each in offered if name is None or each["name"] == name]
    if not chosen:
        known = ", ".join(str(each["name"]) for each in offered) or "none"
        raise ConfigError(f"Unknown tool '{name:.80}'. The tools are: {known:.1000}.")
    marks: dict[str, str] = {}

    def written(text: str) -> str:
        """Return a string as the parts of a rule, in which each marker is a reference to its own rule (`_MARK_RULE`)."""
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
                f"The tool name '{called:.80}' may contain only letters, digits, `_`, `.` and `-` in this model's form."
            )
        lenient = tool.get("strict") is not True
        if form.pairs is not None:
            arguments = _pairs(form.pairs, f"value_{number}", called, schema or {}, lines, lenient=lenient)
        else:
            arguments = json_rule(closed(schema or {"type": "object", "properties": {}}), lenient=lenient)
        pieces = (written(head.replace("NAME", called)), arguments, written(tail))
        lines.append(f"call_{number}: {' '.join(filter(None, pieces))}")
    lines += [f"{rule}: {quoted(mark)}" for mark, rule in marks.items()]
    return Constraint.grammar("\n".join(lines))


_PLAIN_NAME = re.compile(r"[\w.-]{1,128}")


def closed(schema: Json) -> Json:
    """Return the schema of an object without the properties that it does not name, which a caller does not expect.

    Schemas that state whether there may be other properties, or that combine several schemas, are returned unchanged.
    """
    if not isinstance(schema, Mapping) or set(schema) - (_OF_OBJECTS - {"additionalProperties"}) - _REMARKS:
        return schema
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, Mapping) or not isinstance(required, list):
        return schema
    if any(name not in [*named] for name in required):
        return schema
    return {**schema, "additionalProperties": False}


# -------- Arguments as pairs of key and value, as in GLM and Qwen3-Coder: unquoted strings, other values as JSON

_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_OF_TEXTS = {"type", "enum", "const", "pattern", "minLength", "maxLength"}
_REMARKS = {"title", "description", "default", "examples", "deprecated", "$comment"}
"""JSON schema keywords that do not affect which values are valid."""


def _pairs(form: PairForm, rule: str, tool: str, schema: Json, lines: list[str], *, lenient: bool) -> str:
    """Return the key-value pairs of a tool's arguments as parts of a rule, and add the rules of their strings to `lines`.

    The pairs are in the order of the schema. Raises ConfigError if the schema contains unsupported keywords.
    """
    if not isinstance(schema, Mapping):
        raise ConfigError(f"The parameters of the tool '{tool}' are not a JSON schema.")
    beyond = sorted(set(schema) - _OF_OBJECTS - _REMARKS)
    if beyond or schema.get("type", "object") != "object":
        raise ConfigError(
            f"This model's form does not support `{(beyond or ['type'])[0]}` in the parameters of the tool '{tool}'. Use `properties` and "
            "`required`."
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
    """Return an unquoted string and its end marker as a part of a rule, and add further rules for the string to `lines`."""
    beyond = sorted(set(schema) - _OF_TEXTS - _REMARKS)
    if beyond:
        raise ConfigError(
            f"This model's form does not support `{beyond[0]}` for strings, as in {place}. Use `pattern` or `enum`."
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
            raise ConfigError(f"No string satisfies the schema of {place}.")
        return f"({' | '.join(map(quoted, fitting))}) {quoted(f'{form.pad}{form.end}{chr(10)}')}"
    # The text ends at the first end of a value, which belongs to the lexeme; otherwise it would be a part of the text.
    ended = form.end.replace("/", r"\/")
    texts = [f"/(?s:.{{{least},{most}}}){form.pad}{ended}/", f"~/(?s:.*){ended}(?s:.+)/"]
    if pattern is not None:
        before = "" if pattern.startswith("^") else "(?s:.*)"
        behind = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else "(?s:.*)"
        inner = pattern.removeprefix("^") if behind else pattern.removeprefix("^").removesuffix("$")
        texts.append(_pattern(f"{before}(?:{inner}){behind}{form.pad}{form.end}"))
    lines += [f"{rule}[lazy]: {rule.upper()}", f"{rule.upper()}: {' & '.join(texts)}"]
    return f'{rule} "\\n"'
