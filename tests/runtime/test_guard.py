"""A guarded program ends with its owner, also after a kill, together with its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kapelle.runtime import guard

PROGRAM = """
import os, signal, subprocess, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
OWNER = """
import sys, time
sys.path[:] = {path!r}
from kapelle.runtime.guard import guarded
held = guarded([sys.executable, "-c", {program!r}, {file!r}, "plain"], {{}})
print(held.pid, flush=True)
time.sleep(600)
"""


def until(found: object, seconds: float = 60.0) -> None:
    """Wait until a call returns something true."""
    end = time.monotonic() + seconds
    while not found():  # type: ignore[operator]
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Return whether a process has ended, also while its exit code was not collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def started(file: Path) -> list[int]:
    until(file.exists)
    return [int(word) for word in file.read_text().split()]


pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes through /proc")


def test_it_ends_with_its_killed_owner(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    words = OWNER.format(path=sys.path, program=PROGRAM, file=str(file))
    owner = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        pids = [int(owner.stdout.readline()), *started(file)]
        assert not any(map(gone, pids))
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
    for pid in pids:
        until(lambda pid=pid: gone(pid))


@pytest.mark.parametrize("hearing", ["plain", "deaf"])
def test_it_ends_on_request(hearing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "guard.py"  # the same file, less patient
    short.write_text(Path(guard.__file__).read_text().replace("GRACE = 10.0", "GRACE = 0.2"))
    monkeypatch.setattr(guard, "__file__", str(short))
    file = tmp_path / "pids"
    held = guard.guarded([sys.executable, "-c", PROGRAM, str(file), hearing], dict(os.environ))
    pids = started(file)
    os.kill(held.pid, signal.SIGTERM)  # a signal to the terminal's processes is the owner's to act on
    guard.end(held)
    guard.end(held)
    assert held.returncode == 128 + (signal.SIGKILL if hearing == "deaf" else signal.SIGTERM)
    for pid in pids:
        until(lambda pid=pid: gone(pid))


def test_it_ends_with_its_program_and_reports_how() -> None:
    held = guard.guarded([sys.executable, "-c", "raise SystemExit(7)"], dict(os.environ))
    assert held.wait(60) == 7
    guard.end(held)
