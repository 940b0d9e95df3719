"""Executes jobs in several processes at the same time. A process that fails or crashes does not affect the other processes.

Each process is spawned, computes on one thread, and executes one job after another, so that torch is imported only once
per process.
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
"""A module-level function with plain arguments, which the new process finds by name."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Environment variables that limit torch to one thread, because the processes share the cores and more threads would be slower."""


LOOKS = 1.0
"""The number of seconds between two checks of the processes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a job failed."""

    reason: str
    """The reason in one line."""
    details: str
    """The traceback, or the reason if there is no traceback."""


@dataclass(slots=True)
class _ComparisonWorker:
    process: SpawnProcess
    pipe: Connection
    signs: LifeSigns
    """An object that detects whether the process is stopped; a process that waits counts as alive."""
    doing: int | None = None
    """The index of the job that the process currently executes."""
    stalled: str | None = None
    """The reason why the process was killed as stalled."""


def in_processes(
    work: Work,
    pieces: Sequence[tuple[Any, ...]],
    processes: int,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Failure | None]]:
    """Execute `work` for all `pieces` in at most `processes` processes, and yield the results as the jobs finish.

    Each result is the index of the job, with None or the reason for its failure.
    The function `meanwhile` is called about once per second. If the iteration ends early, for example because of Ctrl-C
    or SIGTERM, all processes receive SIGTERM and this process waits for them, so that a training run can save its
    state. A process that is stopped (SIGSTOP) for too long is killed. All processes terminate with this process.
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
                        with suppress(OSError):  # `_finished` reports a dead process
                            worker.pipe.send(pieces[number])
                    else:
                        workers.remove(worker)
                        worker.pipe.close()  # this ends the process
                        worker.process.join()
                if workers:
                    yield from _finished(workers, meanwhile)
    finally:
        _stop(workers)


def _start(context: SpawnContext, work: Work) -> _ComparisonWorker:
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, work, os.getpid()), daemon=False)
    # A terminal sends Ctrl-C to all processes. The new process inherits the blocked signal; this process stops it with SIGTERM.
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
    """Wait for jobs to finish and yield their results; remove workers that have crashed from the list."""
    busy = {worker.pipe: worker for worker in workers}
    while not (ready := wait(list(busy), timeout=LOOKS)):
        meanwhile()
        for worker in workers:
            stalled = worker.signs.look(LOOKS)
            if stalled is not None:
                worker.process.kill()
                worker.stalled = f"its process {worker.process.pid} stalled: {stalled}"
    for pipe in ready:
        assert isinstance(pipe, Connection)
        worker = busy[pipe]
        number = worker.doing
        assert number is not None, "only workers with work send results"
        try:
            answer = pipe.recv()
        except (EOFError, OSError):
            workers.remove(worker)
            worker.process.join()
            code = worker.process.exitcode or 0
            reason = worker.stalled or f"its process {how_it_ended(code)}.{memory_hint(code)}"
            yield number, Failure(reason, reason)
            continue
        worker.doing = None
        yield number, None if answer is None else Failure(*answer)


def _stop(workers: Sequence[_ComparisonWorker]) -> None:
    for worker in workers:
        worker.process.terminate()
        if worker.process.pid is not None and hasattr(signal, "SIGCONT") and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGCONT)  # a stopped process must continue before it can save
    with unbroken():  # the processes finish their step first
        for worker in workers:
            while worker.process.is_alive():
                worker.process.join(LOOKS)
                if worker.signs.look(LOOKS) is not None:
                    worker.process.kill()
            worker.pipe.close()


def _serve(pipe: Connection, work: Work, parent: int) -> None:
    """Execute jobs until the pipe is closed or the process `parent` has terminated. This is the main function of a worker process."""
    # A process that a fork server started ends with that server.
    creator, above = multiprocessing.parent_process(), os.getppid()
    end_with_parent(above if above != parent and creator is not None and creator.is_alive() else parent)
    # The pipe was closed, or a signal ends the process.
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            piece, failure = pipe.recv(), None
            try:
                work(*piece)
            except Exception as error:  # noqa: BLE001 - any error is reported
                failure = " ".join(f"{type(error).__name__}: {error}".split()), traceback.format_exc()
            pipe.send(failure)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit processes that are started inside the block to one thread."""
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
