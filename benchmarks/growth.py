"""Whether a long run grows: memory, descriptors, threads and live objects over thousands of tiny steps.

    python -m benchmarks.growth                           # every kind of run, each in a process of its own
    python -m benchmarks.growth --kinds grpo,qmix --steps 2000
    python -m benchmarks.growth --traced --kinds grpo     # where what Python holds was made

Each run writes its run directory and saves as any run does. Readings are taken between steps and collect nothing, as
nothing but Python itself collects in a run; `growth_mb` is per 1,000 steps between the first reading that counts and
the last, and its bar is 1 MB. Objects are counted in a second process, after a collection.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.growing import KINDS

if TYPE_CHECKING:
    from kapelle.training.trainer import Trainer

FIRST = 1000
"""Steps before the first reading that counts."""
READINGS = 4
"""Readings after it."""
SHOWN = 12
"""Most types and places of a difference that are told."""


_MALLINFO2 = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of glibc, in bytes."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO2)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a process holds at one moment."""

    step: int
    resident: int
    """Bytes of memory in use, as the kernel counts them."""
    allocated: int
    """Bytes that glibc has handed out and not got back; 0 with another allocator."""
    descriptors: int
    threads: int


def read(step: int) -> Reading:
    """Read what this process holds."""
    return Reading(
        step,
        int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        _allocated(),
        len(list(Path("/proc/self/fd").iterdir())),
        len(list(Path("/proc/self/task").iterdir())),
    )


def _allocated() -> int:
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if tell is None:
        return 0
    tell.restype = _Heap
    heap = tell()
    return int(heap.uordblks + heap.hblkhd)


def types() -> Counter[str]:
    """Count the tracked objects by type."""
    return Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())


def grow(kind: str, steps: int, folder: Path, *, traced: bool) -> dict[str, Any]:
    """Train one kind of run and return what it holds more at the end than after the first steps."""
    import torch

    torch.set_num_threads(1)
    with KINDS[kind](folder, steps) as trainer:
        return (_counted if traced else _watched)(trainer, steps)


def _watched(trainer: Trainer, steps: int) -> dict[str, Any]:
    first = min(FIRST, steps // 2)
    every = max(1, (steps - first) // READINGS)
    readings = []
    for step in trainer.steps(steps):
        number = step.number
        del step
        if number >= first and not (number - first) % every:
            readings.append(read(number))
    a, b = readings[0], readings[-1]
    per = 1e-6 * 1000 / max(1, b.step - a.step)
    return {
        "steps": [r.step for r in readings],
        "resident_mb": [round(r.resident / 1e6, 2) for r in readings],
        "allocated_mb": [round(r.allocated / 1e6, 2) for r in readings],
        "growth_mb": round((b.resident - a.resident) * per, 3),
        "allocated_growth_mb": round((b.allocated - a.allocated) * per, 3),
        "descriptors": b.descriptors - a.descriptors,
        "threads": b.threads - a.threads,
    }


def _counted(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Count objects, and trace where Python's memory was made, between a third of the steps and the last."""
    first = steps // 3
    before: tuple[Counter[str], tracemalloc.Snapshot] | None = None
    for step in trainer.steps(steps):
        number = step.number
        del step
        if number == first // 2:
            tracemalloc.start()
        if number == first:
            gc.collect()
            before = types(), tracemalloc.take_snapshot()
    assert before is not None
    found = gc.collect()
    after = tracemalloc.take_snapshot()
    changed = types()
    changed.subtract(before[0])
    places = after.compare_to(before[1], "lineno")
    per = 1e-6 * 1000 / (steps - first)
    return {
        "objects": changed.total(),
        "only_collected": found,
        "python_growth_mb": round(sum(place.size_diff for place in places) * per, 3),
        "types": dict(changed.most_common(SHOWN)),
        "places": [
            f"{d.size_diff / 1e3:+.1f} kB, {d.count_diff:+d}: {d.traceback[-1]}" for d in places[:SHOWN]
        ],
    }


def run(kinds: Mapping[str, Callable[..., Any]] = KINDS, steps: int = 3000) -> dict[str, Any]:
    """Return what each kind of run came to, each in a process of its own."""
    return {kind: _apart(kind, steps, traced=False) for kind in kinds}


def _apart(kind: str, steps: int, *, traced: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.growth", "--one", kind, "--steps", str(steps)]
    command += ["--traced"] if traced else []
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def main(arguments: list[str]) -> int:
    """Run what the command line asks for and print one JSON line for each kind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which kinds of run, with commas")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--traced", action="store_true", help="also where Python's memory was made (slow)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(grow(asked.one, asked.steps, Path(folder), traced=asked.traced)))
        return 0
    for kind in asked.kinds.split(","):
        print(json.dumps({kind: _apart(kind, asked.steps, traced=asked.traced)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
