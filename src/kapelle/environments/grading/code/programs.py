"""Find the program in a text, and parse it without Python's style warnings."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings

from kapelle.environments.grading.text.extraction import MAX_TEXT, own_turn


def tree_of(program: str) -> ast.Module:
    """Return the syntax tree of a program; SyntaxError for an invalid one.

    Python warns of a string with an unknown escape (a SyntaxWarning from 3.12 on). The warning is meant for its author; here it
    would be printed during a run, or end it if warnings are errors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(program)


# -------- The program of a text

_LANGUAGES = frozenset({"python", "python3", "py"})
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def program_of(text: str) -> str | None:
    """Return the program of a turn, unchanged; None if it has none.

    It is the last fenced block marked as Python. Without such a block it is the last block without a named language that is a
    program, or else the first block without one. A block that only calls what an earlier one defines is an example of its use. A
    text without a fence is a program in its entirety. Thoughts and text after the end of the turn are ignored.
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
        # A later block is often the output of the program.
        named = [program for program in unnamed if _does_something(program)] or unnamed[:1]
    while len(named) > 1 and _only_uses(named[-1], named[:-1]):
        named.pop()
    return named[-1] if named else None


def _blocks(said: str) -> list[tuple[str, str]]:
    """Return language and content of the fenced blocks, by CommonMark's rules; an unclosed one ends with the text."""
    if "```" not in said and "~~~" not in said:
        return []
    from markdown_it import MarkdownIt

    # A tag on its own line (`<answer>`) must not hide a program.
    parser = MarkdownIt("commonmark").disable("html_block")
    parser.core.ruler.enableOnly(["normalize", "block"])
    # Without any block, accept fences that are indented too far.
    for text in (said, re.sub(r"(?m)^[ \t]+(?=```|~~~)", "", said)):
        if fences := [token for token in parser.parse(text) if token.type == "fence"]:
            return [(_language(token.info), token.content) for token in fences]
    return []


def _language(info: str) -> str:
    """Return the language that an info string names: `python title="a.py"`, `{.python}`."""
    named = info.strip().strip("{}").removeprefix(".").lower()
    return re.split(r"[\s,:{]", named, maxsplit=1)[0]


def runnable(program: str) -> str:
    """Return a program that can be run: dedented if it is indented as a whole."""
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
    """Return whether a text is a program, and more than a list of values (`[1, 2]`, `3`)."""
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
