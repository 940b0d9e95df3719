"""The tool `calculator`, which computes arithmetic expressions with powers and roots.

The results are exact for fractions. The parser limits the length of expressions, and no code is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from kapelle.environments.grading.math.calculation import (
    MAX_CHARACTERS,
    NoValueError,
    parse_expression,
    shown,
    value_of,
)
from kapelle.environments.tools.contract import Tool, Toolbox, ToolFault, ToolSettings, one_text
from kapelle.types import Json

_SCHEMA = one_text(
    "calculator",
    "Works out an expression with + - * / // ** sqrt() and brackets, exactly.",
    "expression",
    "such as (2+3)*4",
)


class Calculator(ToolSettings):
    """Settings of the tool `calculator`."""

    tool: Literal["calculator"] = "calculator"

    def open(self) -> Toolbox:
        """Return a toolbox that contains the calculator."""
        return Toolbox(Tool(_SCHEMA, calculate))


def calculate(arguments: Mapping[str, Json]) -> str:
    """Return the value of `expression` as a finite decimal number or a fraction. Irrational roots are given to twelve digits."""
    text = arguments["expression"]
    expression = parse_expression(text, powers=True)
    if expression is None:
        raise ToolFault(
            f"'{text[:60]}' is not a valid expression. Use numbers, + - * / // **, sqrt() and brackets, at most {MAX_CHARACTERS} "
            "characters."
        )
    try:
        value, exact = value_of(expression)
    except NoValueError as why:
        raise ToolFault(f"'{text}' {why}.") from None
    return shown(value, exact=exact)
