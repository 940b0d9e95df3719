"""Rows and functions that a program passes instead of naming them: they live in its memory."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kapelle.environments.data.source import Row
from kapelle.errors import DataError

IN_MEMORY = "in-memory"
"""Path of rows, and module of functions, that a program passed instead of naming them."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a program passed in memory."""

    train: tuple[Row, ...] = ()
    test: tuple[Row, ...] = ()
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def rows_in_memory(rows: Iterable[object], where: str) -> tuple[Row, ...]:
    """Return rows that a program passed; DataError names the first that is no mapping of JSON."""
    found = []
    for number, row in enumerate(rows, start=1):
        place = f"Row {number} of `{where}`"
        if not isinstance(row, Mapping):
            raise DataError(
                f"{place} is {type(row).__name__}, not a mapping of column → value. Write {{'question': …}} for each."
            )
        for column, value in row.items():
            if not isinstance(column, str):
                raise DataError(f"{place} has a column named {column!r}, which is no text.")
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{place}: the column '{column}' has no form in JSON: {error}. Drop or change it."
                ) from None
        found.append(Row(place, dict(row)))
    if not found:
        raise DataError(
            f"`{where}` has no rows. Give at least one, such as {{'question': '2+2', 'answer': '4'}}."
        )
    return tuple(found)


def name_of(function: Any) -> str | None:
    """Return `module:function` for what any process can import; None for what lives in this one alone."""
    module, name = inspect.getmodule(function), getattr(function, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or vars(module).get(name) is not function:
        return None
    return f"{module.__name__}:{name}"
