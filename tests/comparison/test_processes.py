"""Work in processes of its own: what fails or dies is reported, and everything else is done."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kapelle.comparison.processes import in_processes
from kapelle.errors import ConfigError


def work(kind: str, place: str) -> None:
    if kind == "fail":
        raise ConfigError("no good")
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    Path(place).write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")


def test_what_fails_or_dies_takes_nothing_with_it(tmp_path: Path) -> None:
    kinds = ["write", "die", "fail", "write"]
    before = os.environ.get("OMP_NUM_THREADS")
    found = dict(in_processes(work, [(kind, str(tmp_path / str(k))) for k, kind in enumerate(kinds)], 1))
    assert {k: failure and failure.reason for k, failure in found.items()} == {
        0: None,
        1: "its process ended with exit code -9",
        2: "ConfigError: no good",
        3: None,
    }
    assert "Traceback" in found[2].details if found[2] else False
    told = [(tmp_path / str(k)).read_text().split() for k in (0, 3)]
    assert [threads for _, threads in told] == ["1", "1"]
    assert told[0][0] != told[1][0], "who has died is replaced"
    assert str(os.getpid()) not in {pid for pid, _ in told}
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_processes_are_used_again(tmp_path: Path) -> None:
    list(in_processes(work, [("write", str(tmp_path / str(k))) for k in range(3)], 1))
    assert len({(tmp_path / str(k)).read_text() for k in range(3)}) == 1


def test_nothing_to_do_starts_nothing() -> None:
    assert list(in_processes(work, [], 4)) == []
