"""Let a package import its names when they are first used, so that importing the package is fast.

    from kapelle.algorithms import GRPO        # imports kapelle.algorithms.grpo, here and now

A package lists these names twice: in a table that maps names to modules, which it passes to `lazy`, and under `TYPE_CHECKING` for
editors and type checkers. The test `tests/repository/test_lazy_names.py` compares the two lists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def classes(catalogue: Mapping[str, str]) -> dict[str, str]:
    """Return a mapping from class names to modules, given a catalogue that maps names in recipes to `module:Class`."""
    targets = (target.rpartition(":") for target in catalogue.values())
    return {name: module for module, _, name in targets}


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package. The argument `homes` maps each name to the module that defines it."""

    def attribute(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        is_module = name.islower() and name[0] != "_" and find_spec(f"{package}.{name}") is not None
        if is_module:  # `kapelle.algorithms` after only `import kapelle`
            return import_module(f"{package}.{name}")
        message = f"module '{package}' has no attribute '{name}'."
        if name.startswith("__"):  # Python and tools test for many such names
            raise AttributeError(message)
        from kapelle.errors import did_you_mean

        message += did_you_mean(name, homes)
        # `from package import name` replaces an AttributeError with its own message, which lacks the suggestion.
        is_import = sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"  # noqa: SLF001
        raise ImportError(message) if is_import else AttributeError(message)

    def names() -> list[str]:
        return sorted({*homes, *vars(sys.modules[package]).get("__all__", ())})

    return attribute, names
