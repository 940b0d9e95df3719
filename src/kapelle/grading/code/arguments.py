"""Which arguments of a test program may be changed by what it calls, so that no expected value is worked out from them.

Standard library only: the file is copied into sandboxes as it stands.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection
from typing import Any

_SHOWS = frozenset({"len", "list", "tuple", "print", "type", "str", "repr"})
"""Functions that say of an argument what it is, and work out nothing."""


def changeable(program: str, own: Collection[str]) -> frozenset[str]:
    """Return the names that a program only passes on, and else compares with what names nothing; `own` is what tests define.

    `k = strip(xs)` may change `xs` where `xs[:k] == [1, 2]` follows, and not where `k == len(set(xs))` does.
    """
    tree = ast.parse(program)
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    passed = {
        node.id for node in loads if isinstance(call := above[node], ast.Call) and node is not call.func
    }
    return frozenset(passed - {node.id for node in loads if not _is_harmless(node, above, own)})


def _is_harmless(name: ast.Name, above: dict[ast.AST, ast.AST], own: Collection[str]) -> bool:
    node: ast.AST = name
    while True:
        node, inner = above[node], node
        if isinstance(node, ast.Call) and inner is not node.func:
            called = _root(node.func)
            if called not in _SHOWS:
                return called is not None and called not in own and not hasattr(builtins, called)
        elif isinstance(node, ast.Compare):
            others = [side for side in (node.left, *node.comparators) if side is not inner]
            return not any(isinstance(part, ast.Name) for side in others for part in ast.walk(side))
        elif not (isinstance(node, ast.Subscript) and inner is node.value):
            # What is called, or named alone as a statement, is nobody's argument.
            return isinstance(node, ast.Call)


def _root(called: ast.expr) -> str | None:
    while isinstance(called, (ast.Attribute, ast.Call)):
        called = called.value if isinstance(called, ast.Attribute) else called.func
    return called.id if isinstance(called, ast.Name) else None


def classes(program: str, own: Collection[str]) -> frozenset[str]:
    """Return the names, capital first, whose calls a program gives to other calls of the candidate's, or compares with them."""
    tree = ast.parse(program)
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_candidates(node, own)]
    found = set()
    for call in calls:
        node: ast.AST = call
        while isinstance(above.get(node), (ast.List, ast.Tuple, ast.Call, ast.Compare, ast.Dict, ast.Assign)):
            node = above[node]
            others = [part for part in ast.walk(node) if part in calls and part is not call]
            if others and isinstance(call.func, ast.Name):
                found.add(call.func.id)
    return frozenset(name for name in found if name[:1].isupper())


def _is_candidates(call: ast.Call, own: Collection[str]) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id not in own and not hasattr(builtins, call.func.id)


def change(old: Any, new: Any) -> None:
    """Give a container the content of another one, in place, as deep as both go alike."""
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            old[:] = new
        for place, (before, after) in enumerate(zip(old, new, strict=True)):
            if type(before) is type(after) and isinstance(before, (list, dict, set)):
                change(before, after)
            else:
                old[place] = after
    elif isinstance(old, dict) and isinstance(new, dict):
        kept = dict(old)
        old.clear()
        old.update(new)
        for key in kept.keys() & new.keys():
            if type(kept[key]) is type(new[key]) and isinstance(kept[key], (list, dict, set)):
                change(kept[key], new[key])
                old[key] = kept[key]
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray) and isinstance(new, bytearray):
        old[:] = new
