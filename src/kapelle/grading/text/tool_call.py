"""Calls of tools, compared with the accepted ones of the Berkeley Function Calling Leaderboard.

An accepted call lists for each argument every value that is right; the empty text among them means that
the argument may be left out (BFCL v4, its `possible_answer` files). Calls side by side are matched in any
order, as there.

Stricter than the leaderboard in two points, so that no two different values are the same: its text
comparison drops all of ` ,./-_*^`, ours makes each run of them one space unless a digit follows (`1.5`
is not `15`, `-5` not `5`, `2*3` not `2 3`; only spaces and commas always separate); and its mappings are compared one level deep, ours to the bottom.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from kapelle.grading.text.json_answer import same_json
from kapelle.grading.text.tool_text import Call, Form, NotCalls, parse_calls
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
    5.0 is right where 5 is accepted. Elsewhere a whole number is asked for as one.
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
    return call.name == name and _fits(call.arguments, options, schema)


def _fits(arguments: Mapping[str, Json], options: Mapping[str, Json], schema: Json) -> bool:
    if any(name not in options for name in arguments):
        return False
    return all(
        _one_of(arguments[name], values, _inside(schema, "properties", name))
        if name in arguments
        else _optional(values)
        for name, values in options.items()
    )


def _inside(schema: Json, *names: str) -> Json:
    """Return a part of a schema; None where there is none."""
    for name in names:
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _optional(values: Json) -> bool:
    # No right value at all: it has to be left out.
    return isinstance(values, list) and ("" in values or not values)


def _one_of(value: Json, options: Json, schema: Json) -> bool:
    if not isinstance(options, list):
        return _same(value, options, schema)
    return any(_same(value, option, schema) for option in options)


def _same(value: Json, option: Json, schema: Json) -> bool:
    if isinstance(value, str) and isinstance(option, str):
        return plain_words(value) == plain_words(option)
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


_SEPARATORS = re.compile(r"[ ,]+|[./_*^-]+(?![0-9])")


def plain_words(text: str) -> str:
    """Return a text in lower case with one space for each run of separators, those of numbers kept."""
    return " ".join(_SEPARATORS.sub(" ", text).split()).lower().replace("'", '"')
