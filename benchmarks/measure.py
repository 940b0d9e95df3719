"""How things are timed: CPU-seconds of one thread, two contenders in turn, the median of their ratios.

The machine is shared: wall time would measure the neighbours. What A and B do in one round happens within
seconds, so that their ratio suffers less from the machine's moods than either time. Ours runs in a process of its
own, because the engine tells its process's allocator to keep what was freed: the peer's runs as it does for its users.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any


def single_thread() -> None:
    """Make torch compute on one thread."""
    import torch

    torch.set_num_threads(1)


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of this process that `work` takes, garbage collection omitted."""
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        work()
        return time.process_time() - start
    finally:
        gc.enable()


def compare(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Time both in turn, after one round that does not count; see `summary`. Ours must not have run yet."""
    pairs: list[tuple[float, float]] = []
    with apart(ours) as ours_cpu_seconds:
        for number in range(rounds + 1):
            if number % 2:
                a = ours_cpu_seconds()
                b = cpu_seconds(theirs)
            else:
                b = cpu_seconds(theirs)
                a = ours_cpu_seconds()
            pairs.append((a, b))
    return summary(pairs[1:])


@contextmanager
def apart(work: Callable[[], object]) -> Iterator[Callable[[], float]]:
    """Give a function that returns the CPU time of `work` in a copy of this process; the copy ends with the block."""
    forked = multiprocessing.get_context("fork")
    here, there = forked.Pipe()
    process = forked.Process(target=_answer, args=(work, there, here))
    process.start()
    there.close()  # so that the end of the other process ends the waiting for it

    def seconds() -> float:
        here.send("again")
        answer: float = here.recv()
        return answer

    try:
        yield seconds
    finally:
        here.close()
        process.join()


def _answer(work: Callable[[], object], there: Connection, here: Connection) -> None:
    here.close()
    with suppress(EOFError):
        while True:
            there.recv()
            there.send(cpu_seconds(work))


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return how many times faster the first of each pair is: median, least and greatest ratio."""
    ratios = [theirs / ours for ours, theirs in pairs]
    return {
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ours_cpu_s": statistics.median(ours for ours, _ in pairs),
        "theirs_cpu_s": statistics.median(theirs for _, theirs in pairs),
        "rounds": len(pairs),
    }
