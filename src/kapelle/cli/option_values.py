"""Readers of the values of options: each returns what a text means, or says why it means nothing. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` on."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    return read


def positive(text: str) -> float:
    """Return a positive number."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return number


def gigabytes(text: str) -> float:
    """Return a positive number of gigabytes."""
    try:
        number = positive(text)
    except argparse.ArgumentTypeError:
        number = 1e9
    if number >= 1e9:
        raise argparse.ArgumentTypeError(f"'{text}' is not an amount of memory in gigabytes")
    return number


def share(text: str) -> float:
    """Return a number from 0 to below 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < 1.0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a share from 0 to below 1")
    return number
