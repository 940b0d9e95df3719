"""Where the system has no `fcntl` (Windows), `filelock` keeps two trainers apart, and commands that only look still work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kapelle.errors import RunDirectoryError
from kapelle.runs import lock

WITHOUT = """
import importlib.abc, os, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for name in ("fcntl", "resource"):
    sys.modules.pop(name, None)
del os.register_at_fork, os.sysconf
from kapelle.cli import main
sys.exit(max(main(words) for words in (["--help"], ["recipes", "ls"], ["info"], ["train", "demo", "--dry-run"])))
"""


def test_two_trainers_are_kept_apart_without_fcntl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HAS_FCNTL", False)
    first = lock.RunLock(tmp_path / "lock")
    first.recheck()
    with pytest.raises(RunDirectoryError, match="is in use by another process"):
        lock.RunLock(tmp_path / "lock")
    first.release()
    with pytest.raises(RunDirectoryError, match="no longer held"):
        first.recheck()
    lock.RunLock(tmp_path / "lock").release()


@pytest.mark.slow
def test_looking_needs_neither_fcntl_nor_resource_nor_fork(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (ended.returncode, ended.stderr) == (0, "")
