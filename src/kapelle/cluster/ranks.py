"""An actor that holds one rank of the trainer: a process of its own, as `torchrun` would start it.

Training needs the main thread of a process, for signals, and Ray keeps that of its actors for itself. The process ends
with its actor.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from kapelle.cluster.actors import own_address
from kapelle.runtime.machine import versions_of

SHARED = ("kapelle", "torch", "transformers", "ray")
"""What all machines of a run must have the same versions of."""
TRAIN = (
    "import sys; sys.path[:] = {path!r}; from kapelle.runtime.process_tree import end_with_stdin; end_with_stdin(); "
    "from kapelle.cli import main; raise SystemExit(main())"
)
"""What the process of a rank runs."""
PATIENCE = 0.3
"""Seconds after which `news` answers, also when there are none."""


class RankHost:
    """Starts the process of a rank, passes signals on to it, and tells what it prints and how it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._printed: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []

    def about(self) -> str:
        """Return where it is, a port that is free there, and the versions that it has, as JSON."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return json.dumps({"host": own_address(), "port": port, "versions": versions_of(SHARED)})

    def start(
        self, words: Sequence[str], environ: Mapping[str, str], folder: str, path: Sequence[str]
    ) -> None:
        """Start `kapelle` with these words, in a folder, and with what it is to import from."""
        known = [*sys.path, *(entry for entry in path if entry not in sys.path)]
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-c", TRAIN.format(path=known), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environ},
            cwd=folder,
        )
        for name, stream in (("out", self._process.stdout), ("err", self._process.stderr)):
            assert stream is not None
            reader = threading.Thread(target=self._read, args=(name, stream), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                self._printed.put((name, data))

    def news(self) -> tuple[list[tuple[str, bytes]], int | None]:
        """Return what the process has printed since the last call, and its exit code once all is told."""
        assert self._process is not None
        found: list[tuple[str, bytes]] = []
        with suppress(queue.Empty):
            found.append(self._printed.get(timeout=PATIENCE))
            while True:
                found.append(self._printed.get_nowait())
        ended = self._process.poll()
        if found or ended is None or any(reader.is_alive() for reader in self._readers):
            return found, None
        if self._process.stdin is not None:
            self._process.stdin.close()
        return found, ended

    def signal(self, number: int) -> None:
        """Pass a signal on to the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
