"""Score the text of a program: whether it parses, and how well it follows common conventions.

No program is run or imported. Programs are untrusted, so the functions of this module take linear time, limit the length of the
text, traverse trees without recursion, and treat any failure of Python's parser as a program that does not parse.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from kapelle.environments.grading.code.programs import runnable, tree_of

MAX_PROGRAM = 20_000
"""Maximum number of characters in a program. A longer program scores 0."""
LONGEST_LINE = 99
"""Maximum number of characters in a line. The value is the largest line length that PEP 8 allows."""


def syntax_score(program: str) -> float:
    """Return 1 for a program that parses, otherwise the fraction of its lines that precede the syntax error."""
    if not program.strip() or len(program) > MAX_PROGRAM:
        return 0.0
    try:
        tree_of(runnable(program))
    except SyntaxError as error:
        lines = program.rstrip().count("\n") + 1
        return min(max((error.lineno or 1) - 1, 0), lines - 1) / lines
    except (
        ValueError,
        RecursionError,
        MemoryError,
    ):  # null characters, or nesting that is too deep for Python itself
        return 0.0
    return 1.0


def style_score(program: str) -> float:
    """Return the mean of the scores of `style_parts`, or 0 for a program that does not parse."""
    parts = style_parts(program)
    return sum(parts.values()) / len(parts) if parts else 0.0


def style_parts(program: str) -> Mapping[str, float]:
    """Return a score in [0, 1] for each convention, or an empty mapping for a program that is empty or does not parse.

    `layout`: lines have at most 99 characters, no tabs in their indentation and no trailing spaces. `names`: functions,
    arguments and variables are in snake_case, and classes are in CapWords (PEP 8). `docstrings`: every function and class
    without a leading underscore has a docstring (PEP 257). `imports`: every imported name is used, and no import uses `*`.
    `habits`: the program has no bare `except`, no default that is a list or dictionary, no comparison with `None`, `True` or
    `False` by `==`, no lambda that is assigned to a name, and no second statement on the same line.
    """
    if len(program) > MAX_PROGRAM:
        return {}
    text = runnable(program)
    try:
        tree = tree_of(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    nodes = list(ast.walk(tree))
    if not tree.body:
        return {}
    return {
        "layout": _share(text.rstrip("\n").split("\n"), _tidy),
        "names": _share(list(_names(nodes)), lambda named: named[1].fullmatch(named[0]) is not None),
        "docstrings": _share(
            [
                node
                for node in nodes
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and node.name[:1] != "_"
            ],
            lambda node: ast.get_docstring(node, clean=False) is not None,
        ),
        "imports": _imports(nodes),
        "habits": _habits(nodes),
    }


def _share(things: Sequence[object], good: Callable[..., bool]) -> float:
    """Return the fraction of `things` for which `good` returns True, or 1 if `things` is empty."""
    return sum(map(good, things)) / len(things) if things else 1.0


def _tidy(line: str) -> bool:
    indent = line[: len(line) - len(line.lstrip())]
    return len(line) <= LONGEST_LINE and "\t" not in indent and line == line.rstrip()


_SNAKE = re.compile(r"_*[a-z0-9][a-z0-9_]*|_+|[A-Z][A-Z0-9_]*")
"""Regular expression for the names of variables; constants may be in capitals."""
_FUNCTION = re.compile(r"_*[a-z0-9][a-z0-9_]*|_+")
_CLASS = re.compile(r"_*[A-Z][A-Za-z0-9]*")


def _names(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield each name that a program defines, with the regular expression that the name should match."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, _FUNCTION
        elif isinstance(node, ast.ClassDef):
            yield node.name, _CLASS
        elif isinstance(node, ast.arg):
            yield node.arg, _SNAKE
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, _SNAKE


def _imports(nodes: Sequence[ast.AST]) -> float:
    """Return the fraction of imported names that are used."""
    given = [
        alias.asname or alias.name.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", None) != "__future__"
        for alias in node.names
    ]
    read = {node.id for node in nodes if isinstance(node, ast.Name)}
    return _share(given, lambda name: name != "*" and name in read)


def _habits(nodes: Sequence[ast.AST]) -> float:
    """Return the fraction of statements without a bad habit."""
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    bad: set[int] = set()
    seen: set[int] = set()
    for node in statements:
        if node.lineno in seen and not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            bad.add(id(node))
        seen.add(node.lineno)
    # Each bad expression or handler counts as a bad statement.
    faults = sum(_faulty(node) for node in nodes)
    return max(0.0, 1.0 - (len(bad) + faults) / len(statements))


def _faulty(node: ast.AST) -> bool:
    if isinstance(node, ast.ExceptHandler):
        return node.type is None
    if isinstance(node, ast.arguments):
        defaults = [*node.defaults, *(each for each in node.kw_defaults if each is not None)]
        return any(isinstance(each, ast.List | ast.Dict | ast.Set) for each in defaults)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        singletons = any(
            isinstance(side, ast.Constant) and (side.value is None or isinstance(side.value, bool))
            for side in sides
        )
        return singletons and any(isinstance(sign, ast.Eq | ast.NotEq) for sign in node.ops)
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Lambda)
        and all(isinstance(target, ast.Name) for target in node.targets)
    )
