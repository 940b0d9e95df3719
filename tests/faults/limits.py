"""A process with too little: descriptors, file sizes, memory, threads; and a clock that goes back.

A run under a limit comes to its end all bitwise identical, or says in one line what it lacks; without the limit it
then continues to the end of the undisturbed run.
"""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

from tests.faults import shim
from tests.faults.calls import half_way
from tests.faults.disturbed import disturbed
from tests.faults.judging import Verdict
from tests.faults.world import Trial, World

KINDS = ("demo", "maverl_debate_qmix")
_CLOCKS = 24
_YEAR = 365.25 * 86400
Call = Callable[[], int]


def trials(world: World, seed: int) -> Iterator[Trial]:
    """Yield a resume under each limit."""
    del seed
    megabyte = 1 << 20
    limits = [("descriptors", resource.RLIMIT_NOFILE, n) for n in (*range(4, 24), 32, 48, 64)]
    limits += [("bytes of a file", resource.RLIMIT_FSIZE, n) for n in (4000, 6000, 9000, 20_000, 30_000)]
    limits += [
        ("bytes of memory more", resource.RLIMIT_AS, n * megabyte) for n in (0, 1, 2, 4, 8, 16, 32, 64)
    ]
    for kind in KINDS:
        begun = half_way(world, kind)
        for number, (name, which, value) in enumerate(limits):
            within = partial(_limited, which=which, value=value)
            place = f"limit-{kind}-{number}"
            yield Trial(f"{kind}: {value} {name}", partial(_under, world, kind, begun, within, place))


def clocks(world: World, seed: int) -> Iterator[Trial]:
    """Yield resumes in whose process the time of day is wrong, or jumps while it runs."""
    for kind in KINDS:
        begun = half_way(world, kind)
        for number in range(_CLOCKS // len(KINDS)):
            draw = random.Random(f"{seed} clock {kind} {number}")
            wrong = draw.uniform(-30, 1) * _YEAR
            jumps = number % 2 == 1
            within = partial(_another_time, wrong=wrong, jumps=jumps, draw=draw)
            how = f"{wrong / _YEAR:+.1f} years{', and it jumps' if jumps else ''}"
            place = f"clock-{kind}-{number}"
            yield Trial(
                f"{kind}: the clock is off by {how}", partial(_under, world, kind, begun, within, place)
            )


def _under(world: World, kind: str, begun: Path, within: Callable[[Call], Call], place: str) -> Verdict:
    return disturbed(world, kind, begun, within, place, "without the limit")


def _limited(call: Call, *, which: int, value: int) -> Call:
    def begin() -> int:
        bound = value
        if which == resource.RLIMIT_AS:
            pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
            bound += pages * resource.getpagesize()
        resource.setrlimit(which, (bound, bound))
        return call()

    return begin


def _another_time(call: Call, *, wrong: float, jumps: bool, draw: random.Random) -> Call:
    def begin() -> int:
        shim.shift_clock(wrong)
        if jumps:

            def jump(_number: int, _frame: FrameType | None) -> None:
                shim.shift_clock(wrong - draw.uniform(0, 3600))

            signal.signal(signal.SIGALRM, jump)
            signal.setitimer(signal.ITIMER_REAL, 0.03, 0.03)
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return begin
