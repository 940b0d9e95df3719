"""Work done in several processes at once, where one that fails or dies does not affect the others.

A process is started afresh (spawn), computes on one thread, and takes one piece of work after another, so that
torch is imported once for many.
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

from kapelle.runtime.process_tree import LifeSigns, end_with_parent, how_it_ended, memory_hint

Work = Callable[..., None]
"""A function of a module, found by name in the new process; its arguments are plain values."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Read by torch when it is imported: processes share the cores, and more threads would only take turns."""


LOOKS = 1.0
"""Seconds between two looks at what else there is to do."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a piece of work was not done."""

    reason: str
    """One line."""
    details: str
    """The traceback, or the line again."""


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    signs: LifeSigns
    """Whether it is stopped; one that only waits, for an endpoint say, lives."""
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

    `meanwhile` is called about once a second while none is done. When the iteration is left early, also by Ctrl-C or SIGTERM, every process is asked to stop (SIGTERM) and
    waited for: a training run then saves first. A process that is stopped for long is ended, and they all end with this one.
    """
    left = deque(range(len(pieces)))
    workers: list[_Worker] = []
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
                        with suppress(OSError):  # it has died already, which `_finished` reports
                            worker.pipe.send(pieces[number])
                    else:
                        workers.remove(worker)
                        worker.pipe.close()  # it reads the end and leaves
                        worker.process.join()
                if workers:
                    yield from _finished(workers, meanwhile)
    finally:
        _stop(workers)


def _start(context: SpawnContext, work: Work) -> _Worker:
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, work, os.getpid()), daemon=False)
    with _without_ctrl_c():
        process.start()
    child_end.close()
    assert process.pid is not None
    return _Worker(process, parent_end, LifeSigns(process.pid, count().__next__))


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Let processes that start inside the block leave a Ctrl-C to this one, which ends them: a terminal sends it to all."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _finished(workers: list[_Worker], meanwhile: Callable[[], None]) -> Iterator[tuple[int, Failure | None]]:
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


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
        if worker.process.pid is not None and hasattr(signal, "SIGCONT") and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGCONT)  # one that is stopped saves, too
    for worker in workers:
        while worker.process.is_alive():
            worker.process.join(LOOKS)
            if worker.signs.look(LOOKS) is not None:
                worker.process.kill()
        worker.pipe.close()


def _serve(pipe: Connection, work: Work, parent: int) -> None:
    """Take pieces of work until there are no more, or process `parent` has ended: the main function of a process."""
    # A fork server may stand between: it is then what this process ends with.
    creator, above = multiprocessing.parent_process(), os.getppid()
    end_with_parent(above if above != parent and creator is not None and creator.is_alive() else parent)
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):  # nobody is left to work for
        while True:
            pipe.send(_tried(work, pipe.recv()))


def _tried(work: Work, piece: tuple[Any, ...]) -> tuple[str, str] | None:
    """Return None, or why a piece of work failed; the one boundary at which any error becomes a report."""
    try:
        work(*piece)
    except Exception as error:  # noqa: BLE001 - see above
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return reason, traceback.format_exc()
    return None


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
