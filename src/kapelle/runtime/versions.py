"""The versions of what a process computes with."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


def versions_of(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the version of Python and of each package, by name; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
