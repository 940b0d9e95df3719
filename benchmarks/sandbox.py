"""What a contained run costs: start, throughput, and what many runs leave in the process that starts them.

    python benchmarks/sandbox.py                 # a minute
    python benchmarks/sandbox.py --runs 10000    # the full count

Prints one JSON object. Times are milliseconds, medians unless a name says otherwise; `added` is the time of a
contained run minus that of the same command as a plain child process, measured in turns with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from kapelle.environments.grading.code.grade import ProgramTests, grade_program
from kapelle.environments.sandbox import Limits, Pool, backend, require
from kapelle.environments.sandbox import run as run_contained
from kapelle.environments.sandbox.session import Backend

LIMITS = Limits()
TESTS = ProgramTests(("assert square(3) == 9", "assert square(-2) == 4", "assert square(0) == 0"))


def timed_ms(work: Callable[[], object]) -> float:
    """Return how long one call takes."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def spread(values: list[float]) -> dict[str, float]:
    """Return median and 90th percentile."""
    return {
        "median": round(statistics.median(values), 1),
        "p90": round(statistics.quantiles(values, n=10)[-1], 1),
    }


def start_cost(sandbox: Backend, pool: Pool, repeats: int) -> dict[str, object]:
    """Compare plain, fresh and warm starts of an interpreter, one after the other in turns."""
    command = [sandbox.python, "-I", "-c", "pass"]
    plain: list[float] = []
    fresh: list[float] = []
    warm: list[float] = []
    for _ in range(repeats):
        plain.append(timed_ms(lambda: subprocess.run(command, capture_output=True, check=True)))  # noqa: S603
        fresh.append(timed_ms(lambda: run_contained(sandbox, {}, command, limits=LIMITS)))
        assert pool.wait_until_warm()
        warm.append(timed_ms(lambda: run_contained(pool, {}, command, limits=LIMITS)))
        assert pool.wait_until_warm()
    return {
        "plain": spread(plain),
        "fresh": spread(fresh),
        "warm": spread(warm),
        "added fresh": spread([a - b for a, b in zip(fresh, plain, strict=True)]),
        "added warm": spread([a - b for a, b in zip(warm, plain, strict=True)]),
    }


async def throughput(pool: Pool, runs: int) -> dict[str, float]:
    """Run an interpreter many times with the pool's parallelism, and watch this process."""
    command = [pool.python, "-I", "-c", "print(1)"]

    async def batch(count: int) -> None:
        results = await asyncio.gather(*(pool.run({"f": b"x"}, command) for _ in range(count)))
        assert all(result.stdout == b"1\n" for result in results)

    await batch(50)
    assert pool.wait_until_warm()
    descriptors, memory = open_descriptors(), resident_kb()
    started = time.perf_counter()
    for done in range(0, runs, 100):
        await batch(min(100, runs - done))
    seconds = time.perf_counter() - started
    assert pool.wait_until_warm()
    return {
        "runs": runs,
        "runs per second": round(runs / seconds, 1),
        "descriptors grown": open_descriptors() - descriptors,
        "resident grown, KiB": resident_kb() - memory,
    }


async def grading(pool: Pool, count: int) -> dict[str, float]:
    """Grade a solution by three asserts, alone and with the pool's parallelism."""

    def one() -> None:
        assert grade_program("def square(x): return x * x", TESTS, pool, LIMITS).solved

    alone = [timed_ms(one) for _ in range(20)]
    started = time.perf_counter()
    await asyncio.gather(*(pool.call(one) for _ in range(count)))
    return {**spread(alone), "per second": round(count / (time.perf_counter() - started), 1)}


def open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_kb() -> int:
    """Return the resident memory of this process in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def run(runs: int = 500, parallel: int | None = None, repeats: int = 60) -> dict[str, object]:
    """Measure starts, throughput and growth, and gradings."""
    sandbox = backend()
    require(sandbox)
    with Pool(sandbox, LIMITS, parallel=1) as pool:
        starts = start_cost(sandbox, pool, repeats)
    with Pool(sandbox, LIMITS, parallel=parallel or os.cpu_count() or 1) as pool:
        many = asyncio.run(throughput(pool, runs))
        grades = asyncio.run(grading(pool, 40))
    machine = {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": [round(value, 1) for value in os.getloadavg()],
    }
    return {"machine": machine, "start, ms": starts, "many": many, "grading three asserts, ms": grades}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=500, help="runs of the throughput and growth measurement")
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=60, help="starts of each kind")
    options = parser.parse_args()
    print(json.dumps(run(options.runs, options.parallel, options.repeats), indent=2))


if __name__ == "__main__":
    main()
