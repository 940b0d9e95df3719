"""What the machine was doing during a step: a row of `system.jsonl`.

    time             when the row was written, ISO 8601 in UTC
    seconds          since the row before it
    cpu              cores that this process and its ended children kept busy, on average over those seconds
    cores            cores of the machine
    load             processes of the machine that ran or waited, averaged over a minute
    memory           bytes of this process in memory
    machine_memory   bytes of the machine in use; machine_memory_total all of them
    gpus             used and total bytes of each CUDA device, and most bytes that this process ever held there

What a machine does not say is left out.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch

from kapelle.types import Json


class Machine:
    """Samples the machine, each time since the time before."""

    def __init__(self) -> None:
        self._at, self._busy = time.monotonic(), _busy()

    def sample(self) -> dict[str, Json]:
        """Return a row; takes less than a millisecond on a CPU."""
        now, busy = time.monotonic(), _busy()
        seconds = max(now - self._at, 1e-6)
        row: dict[str, Json] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(seconds, 3),
            "cpu": round((busy - self._busy) / seconds, 3),
            "cores": os.cpu_count() or 1,
        }
        self._at, self._busy = now, busy
        with suppress(OSError):
            row["load"] = round(os.getloadavg()[0], 2)
        return row | _memory() | _gpus()


def _busy() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _memory() -> dict[str, Json]:
    row: dict[str, Json] = {}
    with suppress(OSError, ValueError, IndexError, KeyError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        row["memory"] = pages * resource.getpagesize()
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        known = {
            name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)
        }
        row["machine_memory_total"] = known["MemTotal"]
        row["machine_memory"] = known["MemTotal"] - known["MemAvailable"]
    if not row:
        unit = 1 if sys.platform == "darwin" else 1024
        row["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return row


def _gpus() -> dict[str, Json]:
    if not torch.cuda.is_initialized():
        return {}
    rows = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        rows.append({"used": total - free, "total": total, "held": torch.cuda.max_memory_allocated(number)})
    return {"gpus": rows}
