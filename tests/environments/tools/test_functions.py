from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.environments.tools import tool_library

from kapelle.environments.tools.contract import ToolFault, fit_arguments
from kapelle.environments.tools.functions import Functions, function_tool
from kapelle.errors import ConfigError

LIBRARY = "tests.environments.tools.tool_library"


def test_the_schema_is_the_signature() -> None:
    schema = function_tool(tool_library.average).schema
    assert (schema.name, schema.description) == ("average", "Return the mean of numbers.")
    assert schema.parameters == {
        "type": "object",
        "properties": {
            "numbers": {"type": "array", "items": {"type": "number"}},
            "offset": {"type": ["number", "null"], "default": None},
        },
        "required": ["numbers"],
    }


def test_a_result_becomes_text() -> None:
    assert function_tool(tool_library.average).call({"numbers": [1.0, 2.0]}) == "1.5"
    assert function_tool(tool_library.forecast).call({"city": "Bern"}) == "Bern: 21 C"


def test_a_coroutine_is_awaited_and_its_docstring_describes_the_arguments() -> None:
    tool = function_tool(tool_library.later)
    assert tool.schema.description == "Answer later."
    assert tool.schema.parameters["properties"] == {
        "x": {"type": "integer", "description": "What is answered, after a while."}
    }
    assert tool.call({"x": 3}) == "3"


def test_an_argument_without_a_given_type_takes_any_value() -> None:
    def keep(value: Any = None, more: Any | None = None) -> str:
        return repr((value, more))

    assert function_tool(keep).schema.parameters["properties"] == {
        "value": {"default": None},
        "more": {"default": None},
    }


def test_plain_containers_and_none_have_schemas() -> None:
    tool = function_tool(tool_library.loose)
    assert tool.schema.parameters["properties"] == {
        "rows": {"type": "array"},
        "filters": {
            "type": ["object", "null"],
            "additionalProperties": {"type": "integer"},
            "default": None,
        },
        "unit": {"enum": ["C", "F", None], "default": None},
    }
    assert fit_arguments({"rows": [1], "unit": None}, tool.schema.parameters) == {"rows": [1], "unit": None}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (f"{LIBRARY}:forcast", "Did you mean 'forecast'"),
        (f"{LIBRARY}:NOT_A_FUNCTION", "not a function"),
        (f"{LIBRARY}:untyped", "`x`"),
        (f"{LIBRARY}:bundled", "`numbers`"),
        (f"{LIBRARY}:mean", "`weights`"),
        (f"{LIBRARY}:unknown", "Missing"),
        ("no.such.module:f", "imported"),
    ],
)
def test_a_function_without_a_schema_is_rejected(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Functions(functions=(target,)).check()


SCHEMA = {
    "properties": {
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "note": {"type": ["string", "null"]},
    },
    "required": ["count"],
}


@pytest.mark.parametrize(
    ("arguments", "fitted"),
    [
        ({"count": 3}, {"count": 3}),
        ({"count": Decimal("3.0")}, {"count": 3}),
        ({"count": 1, "size": Decimal("2.5")}, {"count": 1, "size": 2.5}),
        (
            {"count": 1, "unit": "F", "tags": ["a"], "note": None},
            {"count": 1, "unit": "F", "tags": ["a"], "note": None},
        ),
        ({"count": 1, "place": {"city": "Bern"}}, {"count": 1, "place": {"city": "Bern"}}),
    ],
)
def test_arguments_that_fit(arguments: dict[str, Any], fitted: dict[str, Any]) -> None:
    got = fit_arguments(arguments, SCHEMA)
    assert got == fitted
    assert [type(value) for value in got.values()] == [type(value) for value in fitted.values()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "the arguments lack `count`."),
        ({"count": "3"}, "`count` must be integer, not string."),
        ({"count": True}, "`count` must be integer, not boolean."),
        ({"count": Decimal("2.5")}, "`count` must be integer, not number."),
        ({"count": 1, "unit": "K"}, "`unit` must be one of 'C', 'F', not 'K'."),
        ({"count": 1, "tags": ["a", 5]}, "item 1 of `tags` must be string, not integer."),
        ({"count": 1, "place": {}}, "`place` lacks `city`."),
        ({"count": 1, "place": {"city": "Bern", "zip": 1}}, "There is no argument `zip`."),
        ({"count": 1, "note": 5}, "`note` must be string or null, not integer."),
        ({"count": 1, "cuont": 1}, "There is no argument `cuont`. Did you mean 'count'?"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolFault) as fault:
        fit_arguments(arguments, SCHEMA)
    assert str(fault.value).startswith(message)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(["count", "size", "tags", "place", "other"]), JSON, max_size=4))
def test_no_arguments_break_the_check(arguments: dict[str, Any]) -> None:
    try:
        fitted = fit_arguments(arguments, SCHEMA)
    except ToolFault:
        return
    assert fitted.keys() == arguments.keys()
