"""The last net of the weak mode: kernel memory that the machine loses while a run is in the kernel.

Limits and sums bound every kind of memory that is known to be held. What they miss (a table behind a new option of a system
call, a leak) is still missing from the machine. So its own counters are read a few times a second, and what the kernel
holds beyond everything that they attribute is compared with the time that each run spends in the kernel: a run that is
not in the kernel takes nothing from it. Memory of processes, files and page tables never enters the comparison, so
neighbours may use as much of it as they like.
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

NET_EVERY_S = 0.2
"""How often the machine's counters are read while runs are under way."""
_FASTEST = 8 * 1024**3
"""Bytes that a run can make the kernel take in a second of system time; zeroed pages take longer."""
_TICK_S = 0.01
"""How late the kernel's accounts of system time may be."""
_SETTLE_S = 2.0
"""How long nobody else is suspected after a run: what it held is given back meanwhile."""
_RETURN_WITHIN_S = 1.0
"""How long the kernel may take to free what a dead run held; it does so behind a grace period."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEMINFO = Path("/proc/meminfo")
_ZONEINFO = Path("/proc/zoneinfo")
_ATTRIBUTED = (
    *(b"MemFree", b"Buffers", b"Cached", b"SwapCached", b"AnonPages", b"KReclaimable", b"Hugetlb"),
    # Each process tells its page tables, which the sum over a run counts, and the number of its threads is limited.
    *(b"PageTables", b"SecPageTables", b"KernelStack"),
    # What the host of a virtual machine has taken back.
    b"Balloon",
)


class Suspect(Protocol):
    """A run that may hold what the machine has lost."""

    @property
    def unexplained_bytes(self) -> int:
        """How much may be missing before it is ended."""
        ...

    def kernel_s(self) -> tuple[float, float] | None:
        """Return its seconds of CPU and of those the ones in the kernel; None where it need not be watched like this."""
        ...

    def suspect(self) -> None:
        """End it at its next look."""
        ...


def unattributed_bytes(meminfo: Path = _MEMINFO, zoneinfo: Path = _ZONEINFO) -> int | None:
    """Return what the kernel holds for itself, its page tables and stacks aside; None where it does not tell."""
    try:
        held = {
            name: int(value.split()[0]) * 1024
            for name, _, value in (line.partition(b":") for line in meminfo.read_bytes().splitlines())
        }
        # Free pages that a core keeps for its next use are not in MemFree: hundreds of megabytes, after a large process.
        spare = sum(map(int, re.findall(rb"^ +count: +([0-9]+)", zoneinfo.read_bytes(), re.MULTILINE)))
        pages = spare * _PAGE_BYTES
        return held[b"MemTotal"] - sum(held.get(name, 0) for name in _ATTRIBUTED) - pages
    except (OSError, KeyError, ValueError, IndexError):
        return None


def came_back(held: int, wanted: int) -> bool:
    """Return whether the kernel frees so many of the bytes that it `held` soon."""
    until = time.monotonic() + _RETURN_WITHIN_S
    while True:
        left = unattributed_bytes()
        if left is not None and held - left >= wanted:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.02)


class Net:
    """Charges what the machine loses to the runs that were in the kernel meanwhile."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._accounts: weakref.WeakKeyDictionary[Suspect, _Account] = weakref.WeakKeyDictionary()
        self._next = self._quiet_until = 0.0

    def rest(self) -> None:
        """Forget the last look: nothing is under way, and what happens until the next is nobody's."""
        self._before, self._next = None, 0.0

    def look(self, runs: Iterable[Suspect], now: float, held: int | None = None) -> None:
        """Read the counters, when it is time, and suspect one run: of those that may have taken too much, the one longest in the kernel."""
        if now < self._next:
            return
        self._next = now + NET_EVERY_S
        held = unattributed_bytes() if held is None else held
        if held is None:
            return
        grown = 0 if self._before is None else held - self._before
        self._before = held
        worst: tuple[float, Suspect] | None = None
        for run in runs:
            used = run.kernel_s()
            if used is None:
                continue
            account = self._accounts.setdefault(run, _Account(held - max(grown, 0)))
            charged, meanwhile_s = account.charge(grown, held, *used)
            if charged > run.unexplained_bytes and (worst is None or meanwhile_s > worst[0]):
                worst = meanwhile_s, run
        if worst is not None and now >= self._quiet_until:
            self._quiet_until = now + _SETTLE_S
            worst[1].suspect()


class _Account:
    """What one run may have taken."""

    def __init__(self, least: int) -> None:
        self._least, self._charged, self._waiting = least, 0, 0
        self._cpu_s, self._kernel_s, self._meanwhile_s = 0.0, 0.0, 0.0

    def charge(self, grown: int, held: int, cpu_s: float, kernel_s: float) -> tuple[int, float]:
        """Add what the kernel has grown by, as far as the run had time for it.

        Return the sum, and the seconds that the run was in the kernel while that grew.
        """
        ran, in_kernel = cpu_s > self._cpu_s, max(kernel_s - self._kernel_s, 0.0)
        self._cpu_s, self._kernel_s = cpu_s, kernel_s
        self._least = min(self._least, held)
        if ran and grown > 0:
            self._waiting += grown
        if in_kernel and self._waiting:
            # The kernel's accounts come in ticks: what has grown waits for the next one.
            self._charged += min(self._waiting, int((in_kernel + _TICK_S) * _FASTEST))
            self._meanwhile_s += in_kernel
            self._waiting = 0
        # Never more than is missing now; what goes up and down adds nothing.
        self._charged = max(min(self._charged, held - self._least), 0)
        return self._charged, self._meanwhile_s
