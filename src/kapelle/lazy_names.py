"""Names that a package offers and imports by their first use, so that importing the package costs nothing.

    from kapelle.algorithms import GRPO        # imports kapelle.algorithms.grpo, here and now

A package states them three times: in a table (name → module), in `__getattr__` and `__dir__` made here, and under
`TYPE_CHECKING` for editors and type checkers. `tests/repository/test_lazy_names.py` holds the three together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

OFFERING = ("kapelle", "kapelle.algorithms", "kapelle.environments", "kapelle.workflows")
"""The packages with such names."""


def classes(catalogue: Mapping[str, str]) -> dict[str, str]:
    """Return class → module of a catalogue, which maps names in recipes to `module:Class`."""
    targets = (target.rpartition(":") for target in catalogue.values())
    return {name: module for module, _, name in targets}


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package; `homes` maps each name to the module that defines it."""

    def attribute(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        if name.islower() and name[0] != "_" and find_spec(f"{package}.{name}") is not None:
            return import_module(
                f"{package}.{name}"
            )  # `kapelle.algorithms.GRPO` after `import kapelle` alone
        raise AttributeError(_missing(package, name, homes))

    def names() -> list[str]:
        return sorted({*homes, *vars(sys.modules[package]).get("__all__", ())})

    return attribute, names


def _missing(package: str, name: str, known: Iterable[str]) -> str:
    from kapelle.errors import did_you_mean

    hint = "" if name.startswith("__") else did_you_mean(name, known)
    return f"module '{package}' has no attribute '{name}'.{hint}"


class Suggesting:
    """Says which name was meant in `from kapelle.algorithms import GPRO`, where Python asks for a module last."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ImportError for what is written like a class and is none of these packages; None for all others."""
        package, _, name = fullname.rpartition(".")
        if package in OFFERING and name[:1].isupper():
            raise ImportError(_missing(package, name, dir(sys.modules[package])), name=package)
        return None


def install() -> None:
    """Let wrong names be explained; once is enough."""
    if not any(isinstance(finder, Suggesting) for finder in sys.meta_path):
        sys.meta_path.append(Suggesting())
