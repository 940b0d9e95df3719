"""Work in several processes at once; a process that fails or dies leaves the others alone.

A process is started afresh (spawn), computes on one thread, and takes one piece of work after another, so that it imports torch
once for all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from kapelle.runtime.interrupts import unbroken
from kapelle.runtime.process_tree import LifeSigns, end_with_parent, how_it_ended, memory_hint

Work = Callable[..., None]
"""A function of a module, found by name in the new process; its arguments are plain values."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Read by torch when it is imported: processes share the cores, and more threads would only take turns."""


LOOKS = 1.0
"""Seconds between two looks at the processes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a piece of work failed."""

    reason: str
    """One line."""
    details: str
    """The traceback, or the line again."""


@dataclass(slots=True)
class _ComparisonWorker:
    process: SpawnProcess
    pipe: Connection
    signs: LifeSigns
    """Whether it is stopped; a process that waits, for example for an endpoint, is alive."""
    doing: int | None = None
    """Number of its piece of work."""
    still: str | None = None
    """How it stood still, if it was ended for that."""


def in_processes(
    work: Work,
    pieces: Sequence[tuple[Any, ...]],
    processes: int,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Failure | None]]:
    """Yield (number of the piece, None or why it failed) as pieces are done, `processes` at a time.

    `meanwhile` is called about once a second between them. When the iteration is left early, also by Ctrl-C or SIGTERM, every
    process is asked to stop (SIGTERM) and waited for, so that a training run saves first. A process that is stopped (SIGSTOP)
    for long is killed, and all of them end with this one.
    """
    left = deque(range(len(pieces)))
    workers: list[_ComparisonWorker] = []
    try:
        with _one_thread():
            context = multiprocessing.get_context("spawn")
            while left or workers:
                while left and len(workers) < processes:
                    workers.append(_start(context, work))
                for worker in [w for w in workers if w.doing is None]:
                    if left:
                        number = left.popleft()
                        worker.doing = number
                        with suppress(OSError):  # it has died, which `_finished` reports
                            worker.pipe.send(pieces[number])
                    else:
                        workers.remove(worker)
                        worker.pipe.close()  # its signal to end
                        worker.process.join()
                if workers:
                    yield from _finished(workers, meanwhile)
    finally:
        _stop(workers)


def _start(context: SpawnContext, work: Work) -> _ComparisonWorker:
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, work, os.getpid()), daemon=False)
    # A terminal sends a Ctrl-C to all processes. The new one inherits the block, and leaves it to this one to stop them.
    masks = hasattr(signal, "pthread_sigmask")  # not on Windows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if masks else None
    try:
        process.start()
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    child_end.close()
    assert process.pid is not None
    return _ComparisonWorker(process, parent_end, LifeSigns(process.pid, count().__next__))


def _finished(
    workers: list[_ComparisonWorker], meanwhile: Callable[[], None]
) -> Iterator[tuple[int, Failure | None]]:
    """Wait until pieces of work are done and yield them; workers that have died are removed from the list."""
    busy = {worker.pipe: worker for worker in workers}
    while not (ready := wait(list(busy), timeout=LOOKS)):
        meanwhile()
        for worker in workers:
            still = worker.signs.look(LOOKS)
            if still is not None:
                worker.process.kill()
                worker.still = f"its process {worker.process.pid} stood still: {still}"
    for pipe in ready:
        assert isinstance(pipe, Connection)
        worker = busy[pipe]
        number = worker.doing
        assert number is not None, "only work is answered"
        try:
            answer = pipe.recv()
        except (EOFError, OSError):
            workers.remove(worker)
            worker.process.join()
            code = worker.process.exitcode or 0
            reason = worker.still or f"its process {how_it_ended(code)}.{memory_hint(code)}"
            yield number, Failure(reason, reason)
            continue
        worker.doing = None
        yield number, None if answer is None else Failure(*answer)


def _stop(workers: Sequence[_ComparisonWorker]) -> None:
    for worker in workers:
        worker.process.terminate()
        if worker.process.pid is not None and hasattr(signal, "SIGCONT") and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGCONT)  # so that a stopped one can save, too
    with unbroken():  # their steps end first
        for worker in workers:
            while worker.process.is_alive():
                worker.process.join(LOOKS)
                if worker.signs.look(LOOKS) is not None:
                    worker.process.kill()
            worker.pipe.close()


def _serve(pipe: Connection, work: Work, parent: int) -> None:
    """Do pieces of work until the pipe is closed or process `parent` has ended: the main function of a process."""
    # If a fork server has started this process, it ends with that one.
    creator, above = multiprocessing.parent_process(), os.getppid()
    end_with_parent(above if above != parent and creator is not None and creator.is_alive() else parent)
    with suppress(
        EOFError, BrokenPipeError, KeyboardInterrupt
    ):  # the pipe is closed, or a signal asks to stop
        while True:
            piece, failure = pipe.recv(), None
            try:
                work(*piece)
            except Exception as error:  # noqa: BLE001 - the boundary at which any error becomes a report
                failure = " ".join(f"{type(error).__name__}: {error}".split()), traceback.format_exc()
            pipe.send(failure)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let processes that start inside the block compute on one thread."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
