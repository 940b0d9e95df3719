"""Writes a log for each rank of a distributed run to `<run>/ranks/0003.log`, as text with a time on every line.

    2026-11-26 11:02:07.512 rank 3 of 8 on node1, process 4711: kapelle 0.1.0, python 3.12.3, torch 2.13.0, …
    2026-11-26 11:02:07.514 NCCL_SOCKET_IFNAME=eth0
    2026-11-26 11:03:30.108 step 12, rollout
    2026-11-26 11:03:41.733 step 12 took 14.21 s (generate 11.02, update 2.91); waited 3.40 s for other ranks: tokens 3.11, sums 0.29

The rank that waits the least is the rank for which the other ranks wait. An error and its traceback are in the log of
the rank that raised the error. A crash inside a library writes the stacks of all threads. The command `kill -USR1
PROCESS` writes the stacks of a running rank, which shows where the rank hangs. A resumed run appends to its existing
logs. If a log cannot be written, the run continues.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kapelle.runtime.characters import cleaned
from kapelle.runtime.credentials import without_secrets
from kapelle.runtime.machine import versions_of
from kapelle.runtime.process_tree import RANK_LOG
from kapelle.runtime.ranks import Ranks

FOLDER = "ranks"
"""The name of the folder of the logs in the run directory."""
PACKAGES = ("kapelle", "torch", "transformers")
_TELLING = (
    "NCCL_",
    "GLOO_",
    "TORCH_NCCL_",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "KAPELLE_STALLED_AFTER",
    "KAPELLE_STOP_WITHIN",
)
"""The prefixes of the environment variables that affect how ranks communicate."""


def telling_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that affect how ranks communicate, without secrets."""
    return {
        name: without_secrets(value) for name, value in sorted(environ.items()) if name.startswith(_TELLING)
    }


def log_path(run: Path, rank: int) -> Path:
    """Return the path of the log of a rank in a run directory."""
    return run / FOLDER / f"{rank:04}.log"


@contextmanager
def rank_log(run: Path, ranks: Ranks) -> Iterator[None]:
    """Return a context manager that writes the log of this rank inside the block.

    A single process has no log. The run directory must exist.
    """
    if ranks.size == 1:
        yield
        return
    file = log_path(run, ranks.rank)
    with ExitStack() as closing:
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            closing.enter_context(_written(file))
            found = ", ".join(f"{name} {version}" for name, version in versions_of(PACKAGES).items())
            RANK_LOG.info(
                f"rank {ranks.rank} of {ranks.size} on {socket.gethostname()}, process {os.getpid()}: {found}"
            )
            for name, value in telling_variables().items():
                RANK_LOG.info(f"{name}={value}")
        yield


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Write the messages and warnings of this rank, the logs of libraries, and the stacks of a crash to a file."""
    handler = _RankFile(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", "%Y-%m-%d %H:%M:%S"))
    root, showwarning = logging.getLogger(), warnings.showwarning

    def show(message: Any, category: type[Warning], *place: Any, **rest: Any) -> None:
        RANK_LOG.warning(f"{category.__name__}: {message}")
        showwarning(message, category, *place, **rest)

    with ExitStack() as closing:
        closing.callback(handler.close)
        for logger in (RANK_LOG, root):
            logger.addHandler(handler)
            closing.callback(logger.removeHandler, handler)
        warnings.showwarning = show
        closing.callback(setattr, warnings, "showwarning", showwarning)
        assert handler.stream is not None, "opened by its constructor"
        if not faulthandler.is_enabled():
            faulthandler.enable(handler.stream)
            closing.callback(faulthandler.disable)
        if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
            faulthandler.register(signal.SIGUSR1, handler.stream, all_threads=True)
            closing.callback(partial(faulthandler.unregister, signal.SIGUSR1))
        yield


class _RankFile(logging.FileHandler):
    """A handler for a log file without control characters. Failures to write (such as a full disk) are ignored."""

    def format(self, record: logging.LogRecord) -> str:
        return cleaned(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record. A warning of a library is also printed if no other handler of this process would print it."""
        super().emit(record)
        last = logging.lastResort
        alone = logging.getLogger().handlers == [self] and record.name != RANK_LOG.name
        if alone and last is not None and record.levelno >= last.level:
            last.handle(record)

    def close(self) -> None:
        """Close the file. Lines that cannot be written because the disk is full are lost."""
        with suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Ignore a failure to write a record."""
