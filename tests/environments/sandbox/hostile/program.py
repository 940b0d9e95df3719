"""What a hostile program is, and what all of them start with."""

from __future__ import annotations

from dataclasses import dataclass, field

from kapelle.environments.sandbox.contract import Limits

SMALL = Limits(
    wall_s=2.0,
    cpu_s=1.0,
    memory_bytes=160 * 1024**2,
    processes=16,
    output_bytes=64 * 1024,
    file_bytes=8 * 1024**2,
    files=200,
)
"""Set before a hostile program starts; small, because the machine belongs to others too."""

ANY = frozenset({"end", "wall", "cpu", "memory", "output", "files"})

PREAMBLE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(*what):
    print("ESCAPED", *what, flush=True)
def refused(work, *args):
    try:
        got = work(*args)
    except BaseException:
        return
    escaped(getattr(work, "__name__", work), args, got)
def forked(most, seconds):
    made = 0
    while made < most:
        try:
            if os.fork() == 0:
                time.sleep(seconds)
                os._exit(0)
            made += 1
        except OSError:
            break
    print("made", made, flush=True)
def refused_call(name, *args):
    if libc.syscall(*args) >= 0:
        escaped(name)
"""


@dataclass(frozen=True)
class Hostile:
    """A program, and the ways in which its run may end (`end`: by itself, having printed DONE)."""

    text: str
    ends: frozenset[str] = frozenset({"end"})
    limits: Limits = SMALL
    again: bool = False
    """Run twice, one after the other: what the first leaves must not reach the second."""
    twice: bool = False
    """Run twice at once: they must not see each other."""
    counts: dict[str, int] = field(default_factory=dict)
    """Most that the program may report in a line `name number`."""

    @property
    def source(self) -> bytes:
        """The whole program. Braces in `{secret}`, `{port}` and `{socket}` are filled in by the test."""
        return (PREAMBLE + self.text + ("\nprint('DONE', flush=True)\n")).encode()


def ends(*names: str) -> frozenset[str]:
    """Return the allowed ends."""
    return frozenset(names)
