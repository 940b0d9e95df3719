"""Processes that take a run directory and write into it when they are told to; they load no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITER = """
import errno, fcntl, json, os, stat, sys
from pathlib import Path

if "no-folder-locks" in sys.argv:  # as NFS
    flock = fcntl.flock
    def only_files(descriptor, how):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, how)
    fcntl.flock = only_files

from kapelle.errors import KapelleError
from kapelle.runs.writer import RunDirectory

try:
    run = RunDirectory.create(
        Path(sys.argv[1]), config="a: 1\\n", provenance={}, resume="resume" in sys.argv
    )
    if run.resumed:
        run.rewind({})
except KapelleError as error:
    print(f"refused: {error}", flush=True)
    sys.exit()
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        os.execlp("sleep", "sleep", "600") if "exec" in sys.argv else None
        import time
        time.sleep(600)
    print(child, flush=True)
print("taken", flush=True)
for line in sys.stdin:
    what, step = line.split()
    try:
        if what == "row":
            run.record_metrics(int(step), {"pid": float(os.getpid())})
        elif what == "status":
            run.report("training", int(step))
        elif what == "episodes":
            run.record_episodes(int(step), [])
        elif what == "latest":
            run.point_latest(run.checkpoints / f"{int(step):08d}")
        print("written", flush=True)
    except KapelleError as error:
        print(f"stopped: {error}", flush=True)
"""


class Writer:
    """A process that takes a run directory and writes into it when told to."""

    def __init__(self, path: Path, *how: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), *how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def told(self, what: str, step: int = 0) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {step}\n")
        self.process.stdin.flush()
        return self.said()

    @property
    def pid(self) -> int:
        return self.process.pid


@contextmanager
def writer(path: Path, *how: str) -> Iterator[Writer]:
    made = Writer(path, *how)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()
