"""Calls of tools, compared with the accepted ones of the Berkeley Function Calling Leaderboard.

An accepted call lists for each argument every value that is right; the empty text among them means that
the argument may be left out (BFCL v4, its `possible_answer` files). Calls side by side are matched in any
order, as there.

Stricter than the leaderboard where two different values would be the same: numbers and formulas in texts (`tool_words.py`),
true and 1, and lists and mappings inside others, which it compares one level deep and we to the bottom, there with its rules for texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

from kapelle.grading.text.exact import composed
from kapelle.grading.text.json_answer import same_json
from kapelle.grading.text.tool_text import Call, Form, NotCalls, parse_calls
from kapelle.grading.text.tool_words import same_words
from kapelle.grading.verdict import Grade, no_answer, right, wrong
from kapelle.types import Json

AcceptedCall = Mapping[str, Mapping[str, Sequence[Json]]]
"""One tool's name, and for each argument the values that are right: `{"sqrt": {"x": [2, 2.0]}}`."""

ALL_FORMS: tuple[Form, ...] = ("hermes", "llama", "pythonic")


def grade_tool_call(
    text: str,
    accepted: Sequence[AcceptedCall],
    forms: Sequence[Form] = ALL_FORMS,
    schemas: Sequence[Json] = (),
) -> Grade:
    """Return whether a text makes exactly the accepted calls; none accepted asks for no call at all.

    `schemas` are those of the tools, with `name` and `parameters`: where they ask for a fraction (`number`, BFCL's `float`),
    5.0 is right where 5 is accepted. Elsewhere a whole number is asked for as one. What they require may not be left out.
    """
    try:
        calls = parse_calls(text, forms)
    except NotCalls as problem:
        return no_answer(str(problem))
    shown = "; ".join(f"{call.name}({', '.join(call.arguments)})" for call in calls) or "no call"
    expected = "; ".join(name for call in accepted for name in call) or "no call"
    if not calls and accepted:
        return no_answer("The text calls no tool in the form asked for.")
    if len(calls) != len(accepted) or not _matched(calls, accepted, _parameters(schemas)):
        return wrong(shown, expected)
    return right(shown)


def may_be_left_out(values: Json, required: bool = False) -> bool:
    """Return whether an argument with these right values may be left out; what its tool requires may where no value is right."""
    if not isinstance(values, list):
        return False
    some = any(value != "" for value in values)
    return not some or ("" in values and not required)


def required_arguments(schemas: Sequence[Json], tool: str) -> Sequence[Json]:
    """Return the names of the arguments that a tool requires."""
    names = _inside(_parameters(schemas).get(tool), "required")
    return names if isinstance(names, list) else ()


def _parameters(schemas: Sequence[Json]) -> Mapping[str, Json]:
    """Return the schema of each tool's arguments, by the tool's name."""
    tools = [each.get("function", each) for each in schemas if isinstance(each, dict)]
    return {str(tool.get("name")): tool.get("parameters") for tool in tools if isinstance(tool, dict)}


def _matched(calls: Sequence[Call], accepted: Sequence[AcceptedCall], parameters: Mapping[str, Json]) -> bool:
    """Return whether each call can have an accepted one of its own (augmenting paths)."""
    partners = [
        [place for place, one in enumerate(accepted) if _accepts(one, call, parameters.get(call.name))]
        for call in calls
    ]
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


def _accepts(accepted: AcceptedCall, call: Call, schema: Json) -> bool:
    [(name, options)] = accepted.items()
    required = _inside(schema, "required") or ()
    arguments = {composed(each): value for each, value in call.arguments.items()}
    options = {composed(each): values for each, values in options.items()}
    return composed(call.name) == composed(name) and _fits(arguments, options, schema, required)


def _fits(
    arguments: Mapping[str, Json], options: Mapping[str, Json], schema: Json, required: Sequence[Json] = ()
) -> bool:
    if any(name not in options for name in arguments):
        return False
    return all(
        _one_of(arguments[name], values, _inside(schema, "properties", name))
        if name in arguments
        else may_be_left_out(values, name in required)
        for name, values in options.items()
    )


def _inside(schema: Json, *names: str) -> Json:
    """Return a part of a schema; None where there is none."""
    for name in names:
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _one_of(value: Json, options: Json, schema: Json) -> bool:
    if not isinstance(options, list):
        return _same(value, options, schema)
    if value == "" and not _is_text(options, schema):
        return False  # the mark of what may be left out
    return any(_same(value, option, schema) for option in options)


def _is_text(options: Sequence[Json], schema: Json) -> bool:
    """Return whether an argument is a text, by its schema or else by the values that are right."""
    kind = _inside(schema, "type")
    if kind is None:
        return all(isinstance(option, str) for option in options)
    return kind in {"string", "any"}


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
        # A whole number is asked for, unless the tool asks for a fraction; that one is right where a fraction is.
        return _inside(schema, "type") in {"number", "float"} and same_json(value, option)
    return same_json(value, option)
