"""The syntax tree of a program that others wrote, without what Python has to say about its style."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings

from kapelle.environments.grading.text.extraction import MAX_TEXT, own_turn


def tree_of(program: str) -> ast.Module:
    """Return the syntax tree of a program; SyntaxError for what is none.

    A string with an unknown escape is a warning of Python's (a SyntaxWarning from 3.12 on), which is meant for its author: here it
    would be printed in the middle of a run, or end it where warnings are errors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(program)


# -------- Where the program of a text stands

_LANGUAGES = frozenset({"python", "python3", "py"})
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def program_of(text: str) -> str | None:
    """Return the program that a turn hands in, letter by letter; None when it hands in none.

    It is the last fenced block of Python; where no block says that it is Python, the last one of no named language
    that is a program (or that is no worse than the others: a body to go on with). A block that only calls what an earlier one defines is
    an example of its use. A text without any fence is the program as a whole. Thoughts and what follows the end of the turn
    do not count.
    """
    if len(text) > MAX_TEXT:
        return None
    said = own_turn(text)
    blocks = _blocks(said)
    if not blocks:
        return said if said.strip() else None
    named = [program for language, program in blocks if language in _LANGUAGES and program.strip()]
    unnamed = [program for language, program in blocks if not language and program.strip()]
    if not named:
        # What a program prints often stands in a block behind it.
        named = [program for program in unnamed if _does_something(program)] or unnamed[:1]
    while len(named) > 1 and _only_uses(named[-1], named[:-1]):
        named.pop()
    return named[-1] if named else None


def _blocks(said: str) -> list[tuple[str, str]]:
    """Return language and content of the fenced blocks, by CommonMark's rules; an unclosed one ends with the text."""
    if "```" not in said and "~~~" not in said:
        return []
    from markdown_it import MarkdownIt

    # A tag on a line of its own (`<answer>`) hides no program.
    parser = MarkdownIt("commonmark").disable("html_block")
    parser.core.ruler.enableOnly(["normalize", "block"])
    # Where there is no block by the rules, fences that are indented too far were meant to be some.
    for text in (said, re.sub(r"(?m)^[ \t]+(?=```|~~~)", "", said)):
        if fences := [token for token in parser.parse(text) if token.type == "fence"]:
            return [(_language(token.info), token.content) for token in fences]
    return []


def _language(info: str) -> str:
    """Return the language that an info string names: `python title="a.py"`, `{.python}`."""
    named = info.strip().strip("{}").removeprefix(".").lower()
    return re.split(r"[\s,:{]", named, maxsplit=1)[0]


def runnable(program: str) -> str:
    """Return a program that can be run: one that was moved to the right as a whole is moved back."""
    if _tree(program) is not None:
        return program
    moved = textwrap.dedent(program)
    return moved if _tree(moved) is not None else program


def _tree(program: str) -> ast.Module | None:
    try:
        return tree_of(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _does_something(program: str) -> bool:
    """Return whether a text is a program, and not only values that look like one (`[1, 2]`, `3`)."""
    tree = _tree(program)
    return tree is not None and not all(
        isinstance(node, ast.Expr) and not any(isinstance(part, ast.Call) for part in ast.walk(node))
        for node in tree.body
    )


def _only_uses(program: str, earlier: list[str]) -> bool:
    """Return whether a program defines nothing and uses what an earlier one defines."""
    if program.lstrip().startswith(">>>"):
        return True
    tree = _tree(program)
    if tree is None or any(isinstance(node, _DEFINITIONS) for node in tree.body):
        return False
    used = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    trees = [found for each in earlier if (found := _tree(each)) is not None]
    return any(node.name in used for each in trees for node in each.body if isinstance(node, _DEFINITIONS))
