"""Functions that tests use as tools."""

from __future__ import annotations

import time
from typing import Literal

from kapelle.environments.tools.contract import ToolFault


def forecast(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> str:
    """Return the forecast of a city.

    More about it, which no agent needs.
    """
    return f"{city}: {20 + days} {unit}"


def mean(numbers: list[float], weights: set[float] | None = None) -> float:
    """Return the mean."""
    return sum(numbers) / len(numbers)


def average(numbers: list[float], offset: float | None = None) -> float:
    """Return the mean of numbers."""
    return sum(numbers) / len(numbers) + (offset or 0.0)


def fail(kindly: bool) -> str:
    """Fail."""
    if kindly:
        raise ToolFault("It is closed on Sundays.")
    raise RuntimeError("broken")


def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "slept"


def untyped(x) -> str:  # type: ignore[no-untyped-def]
    """Take anything."""
    return str(x)


def bundled(*numbers: int) -> str:
    """Take many."""
    return str(numbers)


def unknown(value: Missing) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Take a value of an unknown type."""
    return str(value)


async def later(x: int) -> str:
    """Answer later.

    Args:
        x: What is answered,
            after a while.

    Returns:
        The same as text.
    """
    return str(x)


def loose(rows: list, filters: dict[str, int] | None = None, unit: Literal["C", "F"] | None = None) -> list:  # type: ignore[type-arg]
    """Return rows."""
    return rows


NOT_A_FUNCTION = 5
