"""Find the program in a text and parse it without the syntax warnings of Python."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings

from kapelle.environments.grading.text.extraction import MAX_TEXT, own_turn


def tree_of(program: str) -> ast.Module:
    """Return the syntax tree of a program; raise SyntaxError if the program is invalid.

    Python warns about strings with unknown escapes (a SyntaxWarning since 3.12). This warning is meant for the author of the
    program. In a grader, the warning would be printed during a run, or it would stop the run if warnings are errors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(program)


# -------- The program in a text

_LANGUAGES = frozenset({"python", "python3", "py"})
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def program_of(text: str) -> str | None:
    """Return the program in a model's turn, unchanged, or None if the turn contains no program.

    The program is the last fenced block marked as Python. Without such a block, it is the last block without a language that
    parses as a program, or otherwise the first block without a language. A block that only calls the definitions of an earlier
    block is a usage example and is ignored. A text without a fence is considered a program in its entirety. Thinking and text
    after the end of the turn are ignored.
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
    """Return the language and the content of each fenced block by the rules of CommonMark.

    A block that is not closed ends with the text.
    """
    if "```" not in said and "~~~" not in said:
        return []
    from markdown_it import MarkdownIt

    # A tag on its own line (`<answer>`) must not hide a program.
    parser = MarkdownIt("commonmark").disable("html_block")
    parser.core.ruler.enableOnly(["normalize", "block"])
    # If there is no block, accept fences that are indented too far.
    for text in (said, re.sub(r"(?m)^[ \t]+(?=```|~~~)", "", said)):
        if fences := [token for token in parser.parse(text) if token.type == "fence"]:
            return [(_language(token.info), token.content) for token in fences]
    return []


def _language(info: str) -> str:
    """Return the language from an info string such as `python title="a.py"` or `{.python}`."""
    named = info.strip().strip("{}").removeprefix(".").lower()
    return re.split(r"[\s,:{]", named, maxsplit=1)[0]


def runnable(program: str) -> str:
    """Return a program in a form that can be run: a program that is indented as a whole is dedented."""
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
    """Return whether a string is a program that does more than evaluate values such as `[1, 2]` or `3`."""
    tree = _tree(program)
    return tree is not None and not all(
        isinstance(node, ast.Expr) and not any(isinstance(part, ast.Call) for part in ast.walk(node))
        for node in tree.body
    )


def _only_uses(program: str, earlier: list[str]) -> bool:
    """Return whether a program defines nothing and uses a definition of an earlier program."""
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
