"""Python reads this first where a tutorial is executed: packages that its first cell does not install are not there.

`HIDDEN_PACKAGES` has their names, separated by commas; see `tools/docs_site/notebooks.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HIDDEN = frozenset(os.environ.get("HIDDEN_PACKAGES", "").split(","))


class WithoutHidden:
    """A finder of modules that finds no hidden one."""

    def __init__(self, finder: Any) -> None:
        """Ask `finder` for all others."""
        self._finder = finder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is; None for a hidden one."""
        found: ModuleSpec | None = None
        if name.partition(".")[0] not in HIDDEN:
            found = self._finder.find_spec(name, path, target)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


sys.meta_path[:] = [WithoutHidden(finder) for finder in sys.meta_path]
