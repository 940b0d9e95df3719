"""Defines types of options for argparse.

Each type converts a string or raises ArgumentTypeError. This module uses only the standard library.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int) -> Callable[[str], int]:
    """Return a function that converts a string to an integer of at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    return read


def _number(text: str, least: float, below: float, meaning: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number < below:
        raise argparse.ArgumentTypeError(f"'{text}' is not {meaning}")
    return number


def positive(text: str) -> float:
    """Convert a string to a positive number."""
    return _number(text, math.ulp(0.0), math.inf, "a positive number")


def gigabytes(text: str) -> float:
    """Convert a string to a positive number of gigabytes."""
    return _number(text, math.ulp(0.0), 1e9, "an amount of memory in gigabytes")


def share(text: str) -> float:
    """Convert a string to a number that is at least 0 and less than 1."""
    return _number(text, 0.0, 1.0, "a share from 0 to below 1")
