"""Finds a Python interpreter that an unprivileged user can start: not every one can be reached by it."""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from kapelle.errors import SandboxError


@dataclass(frozen=True, slots=True)
class ReachableInterpreter:
    """A Python interpreter and what must be visible for it to start."""

    path: str
    needs: tuple[str, ...]
    """Files and folders outside /usr, which is visible anyway."""


@functools.cache
def reachable_interpreter() -> ReachableInterpreter:
    """Return the interpreter for contained programs: this one's base if it can be reached, else the system's.

    Raises SandboxError when there is none.
    """
    base = Path(sys.base_prefix).resolve()
    own = Path(os.path.realpath(sys.executable))
    if own.is_relative_to(base) and readable_by_others(own):
        return ReachableInterpreter(str(own), needs(own, base))
    for name in ("/usr/bin/python3", shutil.which("python3", path="/usr/local/bin:/opt/bin:/bin") or ""):
        path = Path(os.path.realpath(name))
        if name and path.is_file() and readable_by_others(path):
            return ReachableInterpreter(str(path), needs(path, path.parent.parent))
    raise SandboxError(
        f"No Python interpreter can be reached by an unprivileged user ({own} cannot). "
        "Install the system's: apt-get install python3."
    )


def needs(executable: Path, prefix: Path) -> tuple[str, ...]:
    """Return the files and folders that an interpreter needs, and nothing else below its prefix.

    A prefix may be a home, or ~/.local, where private files stand beside the libraries.
    """
    if prefix.is_relative_to("/usr"):
        return ()
    lib = prefix / "lib"
    if any(home.resolve().is_relative_to(prefix) for home in (Path.home(), *_home_of_owner(prefix))):
        parts = [*lib.glob("lib*.so*"), *lib.glob("python3*")]
    else:
        parts = [lib]
    # Some distributions keep the compiled half of the standard library there.
    return tuple(str(part) for part in (executable, *sorted(parts), prefix / "lib64") if part.exists())


def _home_of_owner(folder: Path) -> list[Path]:
    try:
        return [Path(pwd.getpwuid(folder.stat().st_uid).pw_dir)]
    except KeyError:
        return []


def readable_by_others(path: Path) -> bool:
    """Return whether an unprivileged user (another one when this is root) can start the file at a path."""
    if os.geteuid() != 0:
        return os.access(path, os.R_OK | os.X_OK)
    folders = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
    return folders and bool(path.stat().st_mode & stat.S_IXOTH)
