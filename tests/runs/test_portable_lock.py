"""Without `fcntl`, `filelock` keeps two trainers apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from kapelle.errors import RunDirectoryError
from kapelle.runs import lock


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
