"""The syntax tree of a program that others wrote, without what Python has to say about its style."""

from __future__ import annotations

import ast
import warnings


def tree_of(program: str) -> ast.Module:
    """Return the syntax tree of a program; SyntaxError for what is none.

    A string with an unknown escape is a warning of Python's (a SyntaxWarning from 3.12 on), which is for whoever wrote it: here it
    would be printed in the middle of a run, or end it where warnings are errors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(program)
