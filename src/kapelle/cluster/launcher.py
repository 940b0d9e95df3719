"""Launch a run on a Ray cluster: the command starts a driver, which starts the process of each rank.

    launch      Start the driver, pass signals on to it, and end what remains of a run. It runs in the process of the command.
    drive       Place actors, start the ranks and print their output. It runs in the driver, the only process that uses Ray.
    RankHost    The actor that holds the process of one rank.

When the connection to the cluster is lost, Ray ends every process that uses it. Therefore, only the driver uses Ray, and the command
continues to run when the driver is ended.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from kapelle.cluster.actors import (
    Actor,
    ActorCall,
    ActorConnection,
    ActorLost,
    first_answered,
    own_address,
)
from kapelle.cluster.placement import RayPlacement, lay_out
from kapelle.errors import ConfigError, EngineError, KapelleError
from kapelle.runtime.characters import cleaned
from kapelle.runtime.credentials import without_secrets
from kapelle.runtime.interrupts import unbroken
from kapelle.runtime.machine import versions_of
from kapelle.runtime.process_tree import end_session, end_with_stdin
from kapelle.settings.schema import RayConfig

DRIVE = "import sys; sys.path[:] = {path!r}; from kapelle.cluster.launcher import drive; drive()"
"""Python code that the driver process runs."""
LOST = 1
"""Exit code that Ray uses for a process that has lost the connection to its cluster."""


def check_installed() -> None:
    """Raise ConfigError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("`--launch ray` needs Ray. Install it: pip install 'kapelle[ray]'")


def launch(config: RayConfig, processes: int, worlds: int, words: Sequence[str]) -> int:
    """Run `kapelle` with these arguments in several ranks, which Ray places on the cluster, and return the exit code.

    The argument `worlds` is the number of environment workers of each process that rolls out episodes. Raises EngineError if the
    connection to the cluster is lost.
    """
    # The paths of sockets in this folder must be short.
    folder = Path(tempfile.mkdtemp(prefix="kapelle-ray-", dir="/tmp"))
    order = {
        "ray": config.model_dump(mode="json"),
        "processes": processes,
        "worlds": worlds,
        "words": list(words),
        "folder": str(folder),
        "cwd": str(Path.cwd()),
        "path": sys.path,
    }
    driver = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-c", DRIVE.format(path=sys.path), json.dumps(order)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # this process passes a Ctrl-C on
    )

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            driver.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with unbroken():  # the ranks handle the signals
            code = driver.wait()
    finally:
        end_session(driver.pid)
        if driver.stdin is not None:
            driver.stdin.close()
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)
    if code < 0:
        raise EngineError(f"The driver, which uses Ray, was killed by signal {-code}. Resume the run.")
    if code == LOST:
        raise EngineError("The cluster is lost, because Ray's control service has ended. Resume the run.")
    return code


# -------- The driver

EXIT_WRONG = 2
LOOK = 0.2
"""Time in seconds between two checks for signals."""
LAST_WORDS = 60.0
"""Maximum time in seconds for the other ranks to exit after one rank has failed."""

_signals: list[int] = []
"""Signals that were received but not yet passed on to the ranks."""


@dataclass(slots=True, eq=False)
class _Rank:
    number: int
    host: Actor
    about: ActorCall
    news: ActorCall | None = None
    code: int | None = None
    """Exit code of the rank, which is negative if a signal ended the process."""
    death: str = ""
    """Description of how the process was killed."""


def drive() -> None:
    """Run the order in the first command-line argument (see `launch`), and exit with the exit code of the run."""
    order = json.loads(sys.argv[1])
    session = os.getsid(0)
    end_with_stdin(lambda: end_session(session))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _note)
    try:
        code = _run(order)
    except KapelleError as error:
        _complain(str(error))
        code = EXIT_WRONG
    except _Stopped as stopped:
        code = 128 + stopped.args[0]
    except Exception:  # noqa: BLE001 - a defect, or an error of Ray
        print(cleaned(traceback.format_exc()), file=sys.stderr)  # noqa: T201
        code = EXIT_WRONG
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class _Stopped(Exception):
    """A signal was received before the ranks had started."""


def _note(number: int, _frame: FrameType | None) -> None:
    _signals.append(number)


def _complain(reason: str) -> None:
    print(cleaned(f"kapelle: {' '.join(without_secrets(reason).split())}"), file=sys.stderr, flush=True)  # noqa: T201 - output of the command


def _run(order: dict[str, Any]) -> int:
    config = RayConfig.model_validate(order["ray"])
    count = int(order["processes"])
    if config.address is None:
        connection, grows = ActorConnection.start(Path(order["folder"])), False
    else:
        connection, grows = ActorConnection.join(config.address), True
    for number in (signal.SIGINT, signal.SIGTERM):  # Ray has set its own handlers
        signal.signal(number, _note)
    try:
        bundles, places = lay_out(config, count, int(order["worlds"]))
        name = f"kapelle-{secrets.token_hex(8)}"
        connection.place(name, bundles, spread=config.spread, seconds=config.timeout, grows=grows)
        hosts = [connection.actor(RankHost, bundle, config.trainer) for bundle in range(count)]
        ranks = [_Rank(number, host, host.call("about")) for number, host in enumerate(hosts)]
        where: list[dict[str, Any]] = []
        for rank in ranks:
            until = time.monotonic() + config.timeout
            while first_answered([rank.about], LOOK) is None:
                if _signals:
                    raise _Stopped(_signals[0])
                if time.monotonic() > until:
                    raise EngineError(
                        f"The actor of rank {rank.number} has not started within {config.timeout:g} s. Check its machine, or raise "
                        "`ray.timeout`."
                    )
            try:
                where.append(json.loads(rank.about.answer()))
            except ActorLost as lost:
                raise ConfigError(
                    f"The actor of rank {rank.number} cannot start: {lost}. Install 'kapelle[ray]' on every machine."
                ) from None
        check_versions(where)
        first = {
            "MASTER_ADDR": where[0]["host"],
            "MASTER_PORT": str(where[0]["port"]),
            "WORLD_SIZE": str(count),
        }
        for rank, place in zip(ranks, places, strict=True):
            placed = RayPlacement(connection.address, connection.namespace, name, place)
            # LOCAL_RANK is 0 everywhere: Ray shows each rank only its own GPUs.
            environ = {"RANK": str(rank.number), "LOCAL_RANK": "0", **first, **placed.variable()}
            rank.host.call("start", order["words"], environ, order["cwd"], order["path"]).answer()
        return follow(ranks)
    except ActorLost as lost:
        raise EngineError(f"An actor was lost at the start of the run: {lost}") from None
    finally:
        connection.leave()


def check_versions(where: list[dict[str, Any]]) -> None:
    """Raise ConfigError if the version of a shared package differs between a rank and this machine."""
    here = versions_of(SHARED)
    for rank, each in enumerate(where):
        for package, found in each["versions"].items():
            if found != here[package]:
                raise ConfigError(
                    f"The machine of rank {rank} ({each['host']}) has {package} {found}, but this machine has {here[package]}. Install the same version."
                )


def follow(ranks: list[_Rank]) -> int:
    """Print the output of the ranks until all ranks have exited, and return the exit code of the rank that failed first."""
    for rank in ranks:
        rank.news = rank.host.call("news")
    failed: _Rank | None = None
    until = float("inf")
    while running := [rank for rank in ranks if rank.code is None]:
        while _signals:
            number = _signals.pop(0)
            for rank in running:
                rank.host.call("signal", number)
        first = first_answered([rank.news for rank in running if rank.news is not None], LOOK)
        rank = next((rank for rank in running if first is not None and rank.news is first), running[0])
        if first is not None:
            printed: list[tuple[str, bytes]] = []
            try:
                printed, rank.code = first.answer()
                if rank.code is not None and rank.code < 0:
                    rank.death = f"Rank {rank.number} was killed by signal {-rank.code}."
            except ActorLost as lost:
                rank.code, rank.death = -int(signal.SIGKILL), f"The actor of rank {rank.number} died: {lost}."
            for name, data in printed:
                stream = sys.stdout.buffer if name == "out" else sys.stderr.buffer
                stream.write(data)
                stream.flush()
            if rank.code is None:
                rank.news = rank.host.call("news")
            elif rank.code and failed is None:
                failed, until = rank, time.monotonic() + LAST_WORDS
        if time.monotonic() > until:
            for rank in running:
                rank.host.end()
            break
    if failed is None:
        return 0
    # A killed rank is the original cause: the others fail because it is gone.
    killed = next((rank for rank in ranks if rank.death), None)
    if killed is not None:
        _complain(f"{killed.death} Resume the run from its last checkpoint.")
    code = failed.code or 0
    return EXIT_WRONG if code < 0 else code


# -------- The actor that holds the process of one rank, as `torchrun` would start it

SHARED = ("kapelle", "torch", "transformers", "ray")
"""Packages that must have the same version on all machines."""
TRAIN = (
    "import sys; sys.path[:] = {path!r}; from kapelle.runtime.process_tree import end_with_stdin; end_with_stdin(); "
    "from kapelle.cli import main; raise SystemExit(main())"
)
"""Python code that the process of a rank runs."""
PATIENCE = 0.3
"""Maximum time in seconds after which `news` returns, even if there is no output."""


class RankHost:
    """The actor that starts the process of a rank, passes signals on to it, and returns its output and exit code."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._printed: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []

    def about(self) -> str:
        """Return the host name, a free port and package versions of this machine as JSON."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return json.dumps({"host": own_address(), "port": port, "versions": versions_of(SHARED)})

    def start(
        self, words: Sequence[str], environ: Mapping[str, str], folder: str, path: Sequence[str]
    ) -> None:
        """Start `kapelle` with these arguments, working folder and additional import path entries."""
        known = [*sys.path, *(entry for entry in path if entry not in sys.path)]
        given = {**os.environ, **environ}
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-c", TRAIN.format(path=known), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=given,
            cwd=folder,
        )
        for name, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            assert stream is not None
            reader = threading.Thread(target=self._read, args=(name, stream), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                self._printed.put((name, data))

    def news(self) -> tuple[list[tuple[str, bytes]], int | None]:
        """Return the output since the last call, and the exit code if all output was returned."""
        assert self.process is not None
        found: list[tuple[str, bytes]] = []
        with suppress(queue.Empty):
            found.append(self._printed.get(timeout=PATIENCE))
            while True:
                found.append(self._printed.get_nowait())
        ended = self.process.poll()
        if found or ended is None or any(reader.is_alive() for reader in self._readers):
            return found, None
        if self.process.stdin is not None:
            self.process.stdin.close()
        return found, ended

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)
