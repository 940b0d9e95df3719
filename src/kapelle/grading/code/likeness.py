"""Whether an object of the candidate's is like one that the tests made, by what both show of themselves.

Standard library only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

from typing import Any

MOST_MADE = 4
MOST_MORE = 3
"""Values that an object may show beyond those that it was made of."""


class Made:
    """The first objects that a test made, with what they were made of: whether their class says so."""

    def __init__(self) -> None:
        self._seen: list[tuple[Any, Any]] = []

    def wants_more(self) -> bool:
        """Return whether there is room for another one."""
        return len(self._seen) < MOST_MADE

    def add(self, state: Any, given: tuple[Any, ...]) -> None:
        """Remember the state of one as it was made."""
        if state is not None:
            self._seen.append((state, given))

    def tells(self, state: Any, given: tuple[Any, ...]) -> bool:
        """Return whether a state tells what an object was made of, so that nobody is in it who does not know that.

        It shows it, in this order and little else, and nothing else that was made is in the same.
        """
        if state is None or not given or not shows(state, given):
            return False
        if len(leaves(state)) > len(leaves(given)) + MOST_MORE + 1:
            return False
        return not any(alike(state, seen) and not alike(given, other) for seen, other in self._seen)


def shows(state: Any, given: Any) -> bool:
    """Return whether all values stand in a state, in this order."""
    shown = iter(leaves(state))
    return all(any(alike(leaf, each) for each in shown) for leaf in leaves(given))


def alike(one: Any, other: Any) -> bool:
    """Return whether two values of built-in types are the same, types included; nothing is like an object of the candidate's."""
    left, right = leaves(one), leaves(other)
    return (
        type(one) is type(other)
        and len(left) == len(right)
        and all(map(_same, left, right))
        and bool(one == other)
    )


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and type(one).__name__ != "Remote" and bool(one == other)


def leaves(value: Any) -> list[Any]:
    """Return the values that stand in lists, tuples and dictionaries, in their order."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else [value]
