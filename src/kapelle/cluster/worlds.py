"""Environment workers on a cluster: an actor holds the process in which worlds live, and passes on what is said to it.

The process is the one that `rollout/workers` starts on one machine, and so is everything that is said; only the way is longer.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from kapelle.cluster.actors import Actor, ActorLost, Connection
from kapelle.errors import EngineError
from kapelle.rollout.workers.pool import LOOK, HeldHere, Hold
from kapelle.settings.schema import Resources

CHUNK = 1 << 20
"""Bytes that are passed on at a time."""
CALLS = 4
"""Calls that are answered at a time."""

News = tuple[bytes, int, int, str | None]
"""What a process said, its signs of life, the session that computes, and how it ended."""


class WorldHost:
    """The actor: holds one process with worlds, which ends with it."""

    def __init__(self) -> None:
        self._held: HeldHere | None = None

    def begin(self, path: Sequence[str], folder: str) -> None:
        """Start the process, which imports from a path and runs in a folder, where this machine has them."""
        sys.path += [entry for entry in path if entry not in sys.path]
        with suppress(OSError):
            os.chdir(folder)
        self._held = HeldHere()

    def send(self, data: bytes) -> None:
        """Pass on what is said to the process; nothing hangs up."""
        assert self._held is not None, "a host begins first"
        with suppress(OSError):  # its end is noticed where it is read
            if data:
                self._held.connection.sendall(data)
            else:
                self._held.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> News:
        """Return what the process says next, or that it says nothing for a moment."""
        held = self._held
        assert held is not None, "a host begins first"
        before = time.monotonic()
        ready, _, _ = select.select([held.connection], (), (), LOOK)
        still = held.still(min(time.monotonic() - before, 2 * LOOK))
        if still is not None:
            held.end()
            return b"", held.beats, held.session, still
        data = b""
        if ready:
            with suppress(OSError):
                data = held.connection.recv(CHUNK)
        if ready and not data:
            held.wait(LOOK)
            how = held.end()
            return b"", held.beats, held.session, how
        return data, held.beats, held.session, None


def held_by_actors(connection: Connection, bundles: Sequence[int], resources: Resources, folder: str) -> Hold:
    """Return what starts the environment worker at a place, in the bundle of that place."""
    return lambda place: HeldByActor(connection, bundles[place], resources, folder)


class HeldByActor:
    """A process with worlds on a machine of the cluster, as the one that plays them sees it; see `process.Holder`."""

    def __init__(self, connection: Connection, bundle: int, resources: Resources, folder: str) -> None:
        """Start an actor in a bundle, and in it the process."""
        self.connection, self._theirs = socket.socketpair()
        self.beats = self.session = 0
        self._how: str | None = None
        self._over = threading.Event()
        self._actor: Actor = connection.actor(WorldHost, bundle, resources, calls=CALLS)
        self._begun = self._actor.ask("begin", sys.path, folder)
        for work in (self._pass_on, self._bring_back):
            threading.Thread(target=work, name="kapelle-world-host", daemon=True).start()

    def _pass_on(self) -> None:
        """Send to the process what is said to it, in order, until the connection is closed."""
        with suppress(ActorLost, EngineError, OSError):
            self._begun.answer()
            data = b"?"
            while data:
                data = self._theirs.recv(CHUNK)
                self._actor.ask("send", data).answer()

    def _bring_back(self) -> None:
        """Fetch what the process says until it has ended."""
        try:
            self._begun.answer()
            while self._how is None:
                data, self.beats, self.session, self._how = self._actor.ask("receive").answer()
                if data:
                    self._theirs.sendall(data)
        except ActorLost as lost:
            self._how = f"the actor of an environment worker died: {lost}"
        except (EngineError, OSError) as error:
            self._how = self._how or f"the actor of an environment worker failed: {error}"
        finally:
            self._over.set()
            with suppress(OSError):
                self._theirs.shutdown(socket.SHUT_RDWR)

    @property
    def where(self) -> str:
        """See `Holder`."""
        return "an actor's process"

    def still(self, passed: float) -> str | None:
        """See `Holder`; the actor looks at the process."""
        return None

    def wait(self, seconds: float) -> None:
        """See `Holder`."""
        self._over.wait(seconds)

    def end(self) -> str:
        """See `Holder`."""
        how = self._how
        self._actor.end()
        return how or "an environment worker was ended"

    def close(self) -> None:
        """See `Holder`."""
        self._theirs.close()
