"""Looks at the runs that nobody is waiting for: a program may go on between two calls."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from typing import Protocol

from kapelle.sandbox.machine import Net, Suspect

LOOK_EVERY_S = 0.05
"""How far a run can get between two looks while nobody waits for it."""


class Watched(Suspect, Protocol):
    """A run that can be looked at from another thread."""

    def look(self) -> None:
        """End the run if it is above its limits; nothing while a call is under way, which looks by itself."""
        ...


def watch(run: Watched) -> None:
    """Look at a run from now on, until it is `forgotten` or gone."""
    _watcher(os.getpid()).add(run)


def forget(run: Watched) -> None:
    """Look at a run no more."""
    _watcher(os.getpid()).remove(run)


class _Watcher:
    """One thread for all runs of a process; it sleeps while there are none."""

    def __init__(self) -> None:
        self._runs: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._change = threading.Condition()
        threading.Thread(target=self._look, name="kapelle-sandbox-watcher", daemon=True).start()

    def add(self, run: Watched) -> None:
        with self._change:
            self._runs.add(run)
            self._change.notify_all()

    def remove(self, run: Watched) -> None:
        with self._change:
            self._runs.discard(run)

    def _look(self) -> None:
        net = Net()
        while True:
            with self._change:
                if not self._runs:
                    net.rest()
                self._change.wait_for(lambda: len(self._runs) > 0)
                runs = list(self._runs)
            for run in runs:
                # It ended meanwhile, or this process has no descriptors left: the next look, or call, tells.
                with contextlib.suppress(OSError):
                    run.look()
            net.look(runs, time.monotonic())
            del runs
            time.sleep(LOOK_EVERY_S)


@functools.cache
def _watcher(process: int) -> _Watcher:
    # Threads do not survive a fork.
    return _Watcher()
