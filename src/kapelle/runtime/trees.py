"""Trees of mappings, lists and tuples: what checkpoints hold and settings are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def leaves(tree: object, place: str = "") -> Iterator[tuple[str, object]]:
    """Yield what hangs in a tree, in order, with the dotted path of keys and indices to it, behind `place`."""
    if not isinstance(tree, Mapping | list | tuple):
        yield place, tree
        return
    for key, each in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(each, f"{place}.{key}" if place else str(key))
