"""A calculator: exact arithmetic by a bounded parser, which never executes code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from kapelle.environments.tools.contract import Tool, Toolbox, ToolFault, ToolSettings, one_text
from kapelle.grading.math.calculation import MAX_CHARACTERS, decimal, parse_expression, work_out
from kapelle.types import Json

_SCHEMA = one_text(
    "calculator",
    "Works out an expression with + - * / // and brackets, exactly.",
    "expression",
    "such as (2+3)*4",
)


class Calculator(ToolSettings):
    """One tool, `calculator`."""

    tool: Literal["calculator"] = "calculator"

    def open(self) -> Toolbox:
        """Return the calculator."""
        return Toolbox(Tool(_SCHEMA, calculate))


def calculate(arguments: Mapping[str, Json]) -> str:
    """Return what `expression` is worth, as a decimal where that ends, else as a fraction."""
    text = arguments["expression"]
    expression = parse_expression(text)
    if expression is None:
        raise ToolFault(
            f"'{text[:60]}' is not an expression of numbers, + - * / // and brackets of at most {MAX_CHARACTERS} "
            "characters."
        )
    value = work_out(expression)
    if value is None:
        raise ToolFault(f"'{text}' divides by zero.")
    return decimal(value) or str(value)
