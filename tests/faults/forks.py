"""Processes that start at once: forks of one that has imported everything, each with a death of its own.

Importing torch and transformers takes seconds, and a trial often less than one. A fork has a process id, files and
an end of its own; nothing that it does reaches the next trial.
"""

from __future__ import annotations

import gc
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

DEADLINE = 60.0
"""Seconds after which a process that should have ended hangs; a whole run takes about one."""
_TICK = 0.002
_OPTIONAL = ("__main__", "plot", "tool_python_driver", "math_worker", "code_candidate")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    code: int | None
    """Its exit code, negative for the signal that ended it; None when it hung and was killed for it."""
    said: str
    """Everything that it wrote to both streams."""
    seconds: float
    """Of the processor, that it took."""


def import_all() -> None:
    """Import every module that a run may import, on one thread; forks then share them."""
    import torch

    import kapelle

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    for found in pkgutil.walk_packages(kapelle.__path__, "kapelle."):
        if not found.name.endswith(_OPTIONAL):
            with suppress(ImportError):
                import_module(found.name)
    for name in (
        "pyspiel",
        "safetensors.torch",
        "transformers.models.qwen3.modeling_qwen3",
        "tests.support.plugins",
    ):
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()  # what is shared is not touched by the collector of every fork


def fork(
    call: Callable[[], int | None],
    log: Path,
    *,
    kill_after: float | None = None,
    deadline: float = DEADLINE,
) -> Ended:
    """Run `call` in a fork and wait for its end; its streams go to the file `log`.

    `kill_after` sends SIGKILL once the process has taken that many seconds of the processor: a share of a run, and not
    of a busy machine's time. What the process leaves behind, such as the workers of a grader, is killed with it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    log.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        _become(call, log)
    return _watch(child, log, kill_after, deadline)


def command(*words: str | os.PathLike[str]) -> Callable[[], int]:
    """Return the command `kapelle …` as something to run in a fork."""

    def call() -> int:
        from kapelle.cli import main

        return main([str(word) for word in words])

    return call


def _become(call: Callable[[], int | None], log: Path) -> None:
    code = 1
    try:
        os.setsid()
        streams = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(streams, stream)
        os.close(streams)
        code = call() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _watch(child: int, log: Path, kill_after: float | None, deadline: float) -> Ended:
    clock = (~child << 3) | 2  # the processor's clock of another process, as clock_getcpuclockid(3) names it
    started, spent, hung = time.monotonic(), 0.0, False
    while True:
        with suppress(OSError):
            spent = time.clock_gettime(clock)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        hung = time.monotonic() - started > deadline
        if hung or (kill_after is not None and spent >= kill_after):
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(_TICK)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    said = log.read_text("utf-8", "replace") if log.exists() else ""
    return Ended(None if hung else os.waitstatus_to_exitcode(status), said, spent)
