"""Manage environment workers on a cluster: an actor starts the process that holds episode states, and relays the messages of this process.

The process and its messages are the same as for environment workers on one machine (`rollout/workers`).
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

from kapelle.cluster.actors import Actor, ActorConnection, ActorLost
from kapelle.errors import EngineError
from kapelle.rollout.workers.pool import LOOK, HeldHere, Holder
from kapelle.settings.schema import Resources

CHUNK = 1 << 20
"""Maximum number of bytes that are relayed in one message."""
CALLS = 4
"""Number of calls that the actor can process concurrently."""

News = tuple[bytes, int, int, str | None]
"""Output of a process, the number of its heartbeats, the session that is computing, and how the process ended (or None)."""


class StateHost:
    """The actor, which holds one process. The process ends together with the actor."""

    def __init__(self) -> None:
        self.held: HeldHere | None = None

    def begin(self, path: Sequence[str], folder: str) -> None:
        """Start the process with this import path and, if the folder exists on the machine, in this working folder."""
        sys.path += [entry for entry in path if entry not in sys.path]
        with suppress(OSError):
            os.chdir(folder)
        self.held = HeldHere()

    def send(self, data: bytes) -> None:
        """Send bytes to the process. An empty value closes the connection to the process."""
        assert self.held is not None, "a host begins first"
        with suppress(OSError):  # `receive` notices the end of the process
            if data:
                self.held.connection.sendall(data)
            else:
                self.held.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> News:
        """Return the next output of the process, or empty output if there is none after a short wait."""
        held = self.held
        assert held is not None, "a host begins first"
        before = time.monotonic()
        ready, _, _ = select.select([held.connection], (), (), LOOK)
        still = held.still(min(time.monotonic() - before, 2 * LOOK))
        if still is not None:
            held.end()
            return b"", *held.signs(), still
        data = b""
        if ready:
            with suppress(OSError):
                data = held.connection.recv(CHUNK)
        if ready and not data:
            held.wait(LOOK)
            how = held.end()
            return b"", *held.signs(), how
        return data, *held.signs(), None


class HeldByActor(Holder):
    """A process on a machine of the cluster. The actor checks whether the process is running."""

    where = "an actor's process"

    def __init__(
        self,
        connection: ActorConnection,
        bundles: Sequence[int | None],
        resources: Resources,
        folder: str,
        place: int,
    ) -> None:
        """Start an actor on the bundle with this index, and start the process in the actor."""
        self.connection, self._theirs = socket.socketpair()
        self._signs = 0, 0
        self._how: str | None = None
        self._over = threading.Event()
        self._actor: Actor = connection.actor(StateHost, bundles[place], resources, calls=CALLS)
        self._begun = self._actor.call("begin", sys.path, folder)
        for work in (self._send, self._receive):
            threading.Thread(target=work, name="kapelle-world-host", daemon=True).start()

    def _send(self) -> None:
        """Send bytes to the process in order until the connection is closed."""
        with suppress(ActorLost, EngineError, OSError):
            self._begun.answer()
            data = b"?"
            while data:
                data = self._theirs.recv(CHUNK)
                self._actor.call("send", data).answer()

    def _receive(self) -> None:
        """Receive the output of the process until the process ends."""
        try:
            self._begun.answer()
            while self._how is None:
                data, beats, session, self._how = self._actor.call("receive").answer()
                self._signs = beats, session
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

    def signs(self) -> tuple[int, int]:
        """See `Holder`."""
        return self._signs

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
