"""Programs of others are read whatever Python has to say about their style."""

import ast
import warnings

import pytest

from kapelle.environments.grading.code.programs import tree_of


def test_an_escape_that_python_warns_of_is_read_and_nothing_is_reported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tree_of("x = '\\w'")
    assert ast.unparse(found) == r"x = '\\w'"
    with pytest.raises(SyntaxError):
        tree_of("x = ")
