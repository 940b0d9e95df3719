"""Observations and actions of Gymnasium's and PettingZoo's spaces as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def observation_text(value: Any) -> str:
    """Return an observation as a player reads it: text as it is, arrays as nested lists, parts line by line.

    A mask of legal actions is left out; `actions_text` says it in words.
    """
    import numpy as np

    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        parts = {key: part for key, part in value.items() if key != "action_mask"}
        if len(parts) == 1:
            return observation_text(next(iter(parts.values())))
        return "\n".join(f"{key}: {observation_text(part)}" for key, part in parts.items())
    if isinstance(value, tuple | list):
        return " ".join(observation_text(part) for part in value)
    if isinstance(value, np.ndarray | np.generic):
        return _rows(value.tolist())
    return str(value)


def _rows(value: Any) -> str:
    if not isinstance(value, list):
        return f"{value:g}" if isinstance(value, float) else str(int(value))
    inner = [_rows(part) for part in value]
    return ("\n" if any(isinstance(part, list) for part in value) else " ").join(inner)


def legal_numbers(space: Any, mask: Any) -> list[int] | None:
    """Return the legal numbers of a discrete space, by its mask where there is one; None for a space of text.

    Raises TypeError for any other space: its actions are no text.
    """
    kind = type(space).__name__
    if kind == "Text":
        return None
    if kind != "Discrete":
        raise TypeError(f"actions of the space {space} cannot be written as a number or a text")
    numbers = [int(space.start) + k for k in range(int(space.n))]
    if mask is None:
        return numbers
    return [number for number, legal in zip(numbers, mask, strict=True) if legal]


def actions_text(legal: Sequence[int] | None) -> str:
    """Return the legal actions in words, empty where any text will do."""
    return "" if legal is None else f"Legal actions: <{' | '.join(map(str, legal))}>"


def read_number(text: str, legal: Sequence[int]) -> int | None:
    """Return the legal number that a text is, None for anything else."""
    said = text.strip()
    return next((number for number in legal if said == str(number)), None)
