"""Equality of trees of plain values that tells types and orders apart."""

from __future__ import annotations

from collections.abc import Callable


def same_tree(a: object, b: object, same_leaf: Callable[[object, object], bool]) -> bool:
    """Return whether both are built alike, a tuple being no list, with leaves that are the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same_tree(a[key], b[key], same_leaf) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same_tree(x, y, same_leaf) for x, y in zip(a, b, strict=True))
    return same_leaf(a, b)
