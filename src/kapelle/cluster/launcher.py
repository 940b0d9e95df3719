"""The command's own process: it starts the driver, passes signals on to it, and ends what may be left of a run.

A process that speaks to Ray is ended by it when the cluster is lost. So this one does not, and it has the last word.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from kapelle.errors import ConfigError, EngineError
from kapelle.runtime.process_tree import end_session
from kapelle.settings.schema import RayConfig

DRIVE = "import sys; sys.path[:] = {path!r}; from kapelle.cluster.driver import main; main()"
"""What the driver runs."""
LOST = 1
"""The exit code with which Ray ends a process that has lost its cluster."""


def check_installed() -> None:
    """Raise ConfigError where Ray is missing."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise ConfigError("`--launch ray` needs Ray. Install it: pip install 'kapelle[ray]'")


def launch(config: RayConfig, processes: int, worlds: int, words: Sequence[str]) -> int:
    """Run `kapelle` with these words in as many ranks, placed by Ray; return its exit code.

    `worlds` is the number of environment workers of each process that plays. Raises EngineError where the cluster is lost.
    """
    # Sockets lie in this folder, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="kapelle-ray-", dir="/tmp"))
    order = {
        "ray": config.model_dump(mode="json"),
        "processes": processes,
        "worlds": worlds,
        "words": list(words),
        "folder": str(folder),
        "cwd": str(Path.cwd()),
        "path": sys.path,
    }
    driver = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-c", DRIVE.format(path=sys.path), json.dumps(order)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C in the terminal is this process's to pass on
    )

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            driver.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = driver.wait()
    finally:
        end_session(driver.pid)
        if driver.stdin is not None:
            driver.stdin.close()
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)
    if code < 0:
        raise EngineError(
            f"The process that speaks to Ray was killed by signal {-code}, and the run with it. Resume the run."
        )
    if code == LOST:
        raise EngineError("The run has lost the cluster: Ray's control service is gone. Resume the run.")
    return code
