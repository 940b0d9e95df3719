import json
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kapelle.errors import RunDirectoryError
from kapelle.runs.lock import RunLock

HOLD = """
import sys
from pathlib import Path
from kapelle.runs.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def hold_elsewhere(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_second_process_gets_an_error_that_names_the_owner(tmp_path: Path) -> None:
    process = hold_elsewhere(tmp_path / "lock")
    try:
        with pytest.raises(
            RunDirectoryError, match=rf"in use by process {process.pid} on .* another --run-dir"
        ):
            RunLock(tmp_path / "lock")
    finally:
        end(process)


def test_a_killed_process_does_not_block(tmp_path: Path) -> None:
    end(hold_elsewhere(tmp_path / "lock"))
    lock = RunLock(tmp_path / "lock")
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    lock.release()


def say_and_wait(pipe: Connection) -> None:
    pipe.send("started")
    pipe.recv()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "lock")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=say_and_wait, args=(theirs,))
    child.start()
    try:
        assert ours.recv() == "started"
        with pytest.raises(RunDirectoryError):
            RunLock(tmp_path / "lock")
        lock.release()
        RunLock(tmp_path / "lock").release()
        assert child.is_alive()
    finally:
        ours.send("end")
        child.join()


def test_a_lock_in_a_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="is a file, not a folder"):
        RunLock(tmp_path / "file" / "lock")
