"""Processes of a run that start one another: a child ends with its parent, and a parent tells a stopped child from a slow one.

A child polls who its parent is (`end_with_parent`), because nothing else notices `kill -9`. A child that is stopped (SIGSTOP)
polls nothing, so the kernel is asked to continue it when its parent ends. Until it has asked, that follows from how it is started:
in a process group of its own in its parent's session (`process_group=0`), which is orphaned when the parent is killed; the kernel
sends SIGHUP and SIGCONT to an orphaned group in which somebody is stopped.

A parent looks at two signs of each child (`Signs`): beats, which a thread of the child gives, and its time on the processor.
Code that holds Python's lock for long gives no beats but computes, so it is slow; a process that the kernel says is stopped
gives neither, and has `stalled_after()` seconds. What gives neither and is not stopped may wait for a disk or a driver, and has
ten times as long.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kapelle.errors import ConfigError
from kapelle.runtime.pulse import Pulse

LIMIT = "KAPELLE_STALLED_AFTER"
"""The variable that sets `stalled_after`."""
STALLED_AFTER = 60.0
"""Its value where nothing is set."""
WAITING = 10.0
"""How many times as long a process has that gives no sign and is not stopped: it may wait for a disk or a driver."""
GONE = 5.0
"""Seconds in which who watches a process that has ended well hears of it."""
LOOK = 0.5
"""Seconds between two looks at the parent, and between two beats."""
SPEAKS = 3.0
"""Seconds that the first of several ranks has to say for all why they stop."""
LAST = "its end"
"""What a rank does (`doing`) once it has nothing left to save."""
EXIT_ALONE = 3
"""With what a process ends whose parent is gone, or one of several ranks because another one was lost."""
PLACE = "KAPELLE_PLACE"
"""What `kapelle train --launch torchrun` tells each rank: its own process, and the descriptors of pulse and listening socket."""

_PR_SET_PDEATHSIG = 1


def stalled_after() -> float:
    """Return for how many seconds a process of a run may be stopped before what waits for it gives it up."""
    said = os.environ.get(LIMIT, "")
    try:
        seconds = float(said) if said else STALLED_AFTER
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ConfigError(
            f"{LIMIT} is {said!r}. Give it the seconds after which a process that is stopped is given up, as 60."
        )
    return seconds


def end_with_parent(
    parent: int, last: Callable[[], None] = lambda: None, stopped: Callable[[], None] = lambda: None
) -> None:
    """End this process within a second once process `parent` is not its parent any more, after `last`.

    `stopped` is called once the parent has been stopped for `stalled_after()` seconds, during which this process was not.
    """
    if sys.platform == "linux":
        # A stopped process looks at nothing. SIGCONT means nothing to one that runs, so it does no harm that the kernel
        # sends it when the *thread* ends that has started this process.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)
    if hasattr(signal, "SIGTTOU"):  # what it prints is its parent's output, also under `stty tostop`
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def watch() -> None:
        still, looked, limit = 0.0, time.monotonic(), stalled_after()
        while os.getppid() == parent:
            time.sleep(LOOK)
            passed, looked = time.monotonic() - looked, time.monotonic()
            before, still = still, still + min(passed, 2 * LOOK) if is_stopped(parent) else 0.0
            if before < limit <= still:
                stopped()
        try:
            last()
        finally:
            os._exit(EXIT_ALONE)

    threading.Thread(target=watch, name="kapelle-parent", daemon=True).start()


class Signs:
    """Signs of life of a process on this machine; `look` again and again."""

    def __init__(self, pid: int, beats: Callable[[], int] = lambda: 0) -> None:
        """Take the process, and what counts the beats that it gives."""
        self.pid, self._beats = pid, beats
        self._seen = (-1, -1)
        self._silent = self._stopped = self._gone = 0.0
        self._sees = bool(_state(os.getpid())[0])
        self._limit = stalled_after()

    def look(self, passed: float) -> str | None:
        """Count the seconds since the last look; return how long the process has stood still, once that is too long.

        The caller bounds `passed`, so that time in which it was stopped itself counts for one look.
        """
        state, used = _state(self.pid)
        # One that has ended and waits for its parent to ask is none of this process's children, or it would have asked.
        self._gone = self._gone + passed if self._sees and state in ("", "Z", "X") else 0.0
        if self._gone > GONE:
            return "it has ended without a word"
        seen = (self._beats(), used)
        self._silent = 0.0 if seen != self._seen else self._silent + passed
        self._stopped = self._stopped + passed if state in ("T", "t") else 0.0
        self._seen = seen
        if self._stopped >= self._limit:
            by = "by a debugger" if state == "t" else "by SIGSTOP or Ctrl-Z"
            return f"it has been stopped ({by}) for {self._limit:g} s"
        if self._silent >= WAITING * self._limit:
            held = " and waits for a disk or a driver" if state == "D" else ""
            return f"it has given no sign of life for {WAITING * self._limit:g} s{held}"
        return None


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped; False where the system cannot say."""
    return _state(pid)[0] in ("T", "t")


def _state(pid: int) -> tuple[str, int]:
    """Return the kernel's letter for the state of a process, and its ticks on the processor; nothing where it cannot say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return "", 0
    return fields[0], int(fields[11]) + int(fields[12])


def how_it_ended(code: int) -> str:
    """Return in words how a process ended, from its exit code; negative where a signal ended it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = f"{-code} ({signal.Signals(-code).name})"
    except ValueError:
        name = str(-code)
    return f"was killed by signal {name}"


def memory_hint(code: int) -> str:
    """Return what may have killed a process that nobody killed, as a sentence to append; empty for other signals."""
    if code != -signal.SIGKILL:
        return ""
    return " If nobody sent the signal, memory ran out: `dmesg` says so, and `kapelle plan` what a run needs."


def wake_and_kill(group: int) -> None:
    """End a group of processes at once, stopped ones too."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@dataclass(slots=True)
class _Place:
    """What this process is to the one that started it as a rank."""

    launcher: int | None = None
    """The process of `kapelle train --launch torchrun`, which says of every rank how it ended."""
    pulse: Pulse | None = None
    listening: int | None = None
    """Descriptor of the socket at which rank 0 keeps the store."""

    @property
    def told_of(self) -> bool:
        """Whether a launcher says how this rank and the others ended; one that is stopped does not."""
        return self.launcher is not None and not is_stopped(self.launcher)


here = _Place()


def live(pulse: Pulse, parent: int) -> None:
    """Give signs of life from now on, and end with the parent."""
    end_with_parent(parent)
    threading.Thread(target=_beat, args=(pulse,), name="kapelle-pulse", daemon=True).start()


def take_place() -> None:
    """Take the place that a launcher has given this process: end with it, and give it signs of life.

    `kapelle train --launch torchrun` says all of it in a variable. Under `torchrun` itself the parent is its agent.
    """
    said = os.environ.pop(PLACE, "")  # what this process starts has another parent
    if not said:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            parent = os.getppid()
            end_with_parent(parent, lambda: _end_alone(parent), lambda: _stop_alone(parent))
        return
    launcher, pulse, listening = said.split(",")
    here.launcher, here.pulse = int(launcher), Pulse(int(pulse))
    here.listening = int(listening) if listening else None
    for descriptor in (here.pulse.descriptor, here.listening):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    end_with_parent(here.launcher, lambda: _end_alone(int(launcher)), lambda: _stop_alone(int(launcher)))
    threading.Thread(target=_beat, args=(here.pulse,), name="kapelle-pulse", daemon=True).start()


def doing(what: str) -> None:
    """Note what this process does from now on, for the one that watches it."""
    if here.pulse is not None:
        here.pulse.say(what)


def _beat(pulse: Pulse) -> None:
    while True:
        pulse.beat()
        time.sleep(LOOK)


def _end_alone(launcher: int) -> NoReturn:
    """End a rank whose launcher is gone; the first that it has started says so."""
    if _is_first():
        at = f" (at: {here.pulse.doing})" if here.pulse is not None and here.pulse.doing else ""
        _say(
            f"The launcher (process {launcher}) is gone, and the run ends with it{at}. Resume the run: nothing is lost but the "
            "steps since its last checkpoint."
        )
    os._exit(EXIT_ALONE)


def _stop_alone(launcher: int) -> None:
    """Stop the ranks of a launcher that is stopped, as SIGTERM does: nobody could ask them to stop any more, or see one die."""
    if _is_first():
        _say(
            f"The launcher (process {launcher}) has been stopped for {stalled_after():g} s: the run saves and ends. "
            "(Ctrl-Z stops a run whole, for as long as you like.)"
        )
    else:
        time.sleep(SPEAKS)  # where they have met, this one stops with the first
    os.kill(os.getpid(), signal.SIGTERM)


def _is_first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"kapelle: {text}\n".encode())
