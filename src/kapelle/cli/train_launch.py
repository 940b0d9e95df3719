"""Implements `kapelle train … --launch torchrun`, which starts the processes of a run on this machine, as torch's own launcher would.

Each process gets the environment variables that `torchrun` sets. In addition to what `torchrun` does, this launcher
reports which process was killed or stopped and what it did last. The launcher also forwards Ctrl-C, SIGTERM, SIGHUP and
Ctrl-Z, and terminates all processes at the second Ctrl-C. Processes that terminate are not restarted. For several
machines, use `torchrun` itself (see docs/clusters.md).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from kapelle.cli.output import complain
from kapelle.cli.stopping import EXIT_WRONG
from kapelle.errors import ConfigError
from kapelle.runtime.interrupts import unbroken
from kapelle.runtime.process_tree import (
    EXIT_ALONE,
    LAST,
    PLACE,
    LifeSigns,
    SharedStatus,
    how_it_ended,
    is_stopped,
    kill_group,
    memory_hint,
)
from kapelle.runtime.ranks import VARIABLES

if TYPE_CHECKING:
    from kapelle.settings.schema import RunConfig
    from kapelle.setup.preparation import PreparedRun

LOOK = 0.1
"""The number of seconds between two checks of the processes."""
GRACE = 8.0
"""Maximum time in seconds for the other ranks to terminate after a rank has failed. After this time, the other ranks are killed."""
LEAVING = 60.0
"""Maximum time in seconds for the other ranks to terminate after a rank has exited without failing."""
AT_ONCE = 3.0
"""Maximum time in seconds for all ranks to terminate after the second Ctrl-C."""
STOPS = frozenset(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
"""The exit codes of a process that saved its state after a stop signal."""


def launch_torchrun(words: Sequence[str], processes: int | None) -> int:
    """Run `kapelle` with these arguments in several processes, by default one for each GPU, and return the exit code."""
    check_single_launcher()
    processes = processes or _devices()
    environ = {**os.environ}
    environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    with _started(words, processes, environ) as ranks:
        return _Launcher(ranks).follow()


def check_single_launcher() -> None:
    """Raise ConfigError in a process that was started by a launcher."""
    if os.environ.keys() >= set(VARIABLES):
        raise ConfigError(
            "`--launch` starts processes, but a launcher has already started this one (RANK is set). Use only one launcher."
        )


def words_of(arguments: argparse.Namespace) -> list[str]:
    """Return the command line of each process."""
    words = ["train", *arguments.words]
    words += [] if arguments.run_dir is None else ["--run-dir", arguments.run_dir]
    return words + [f"--{name}" for name in ("real", "resume", "json") if getattr(arguments, name)]


def _devices() -> int:
    import torch

    found = torch.cuda.device_count()
    if not found:
        raise ConfigError(
            "There is no GPU here to count. Add `--processes N`, the number of processes to start."
        )
    return found


@dataclass(slots=True, eq=False)
class Rank:
    """One process of the run."""

    number: int
    process: subprocess.Popen[bytes]
    pulse: SharedStatus
    signs: LifeSigns
    gave_up: bool = False
    """Whether this launcher has killed the process of the rank."""

    @property
    def running(self) -> bool:
        """Whether the process of the rank is still running."""
        return self.process.poll() is None

    def __str__(self) -> str:
        return f"Rank {self.number} (process {self.process.pid})"

    @property
    def at(self) -> str:
        """The last activity that the rank reported."""
        return self.pulse.doing or "its start"

    @property
    def stopped_by_request(self) -> bool:
        """Whether a second stop signal has terminated the rank after it had saved everything."""
        code = self.process.returncode
        return self.pulse.doing == LAST and code is not None and 128 - code in STOPS

    def send(self, number: int) -> None:
        """Send a signal to the rank. If the rank is stopped, it is continued so that it can handle the signal."""
        if self.running:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)
                self.send_group(signal.SIGCONT)

    def stop(self, number: int) -> None:
        """Request the rank to stop by sending a signal.

        A rank that has not begun its work is killed instead, because it would print a Python traceback.
        """
        if self.pulse.beats:
            self.send(number)
        else:
            self.kill()

    def send_group(self, number: int) -> None:
        """Send a signal to the rank and to the processes that the rank has started in its process group."""
        if self.running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill the rank and the processes that the rank has started in its process group."""
        if self.running:
            self.gave_up = True
            kill_group(self.process.pid)


@contextmanager
def _started(words: Sequence[str], processes: int, environ: dict[str, str]) -> Iterator[list[Rank]]:
    """Return a context manager that starts all ranks, and terminates the ranks that are still running when the block ends."""
    ranks: list[Rank] = []
    # Rank 0 serves the store on a socket that is bound here, so that no other program takes the port in between.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        try:
            for number in range(processes):
                pulse = SharedStatus()
                kept = [listening.fileno()] if number == 0 else []
                place = ",".join(
                    str(each) for each in (os.getpid(), pulse.descriptor, kept[0] if kept else "")
                )
                variables = {
                    "RANK": number,
                    "LOCAL_RANK": number,
                    "WORLD_SIZE": processes,
                    "LOCAL_WORLD_SIZE": processes,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": listening.getsockname()[1],
                    PLACE: place,
                }
                process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [sys.executable, "-m", "kapelle", *words],
                    env={**environ, **{name: str(value) for name, value in variables.items()}},
                    pass_fds=[pulse.descriptor, *kept],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # this process passes on the signals that a terminal sends
                )
                ranks.append(
                    Rank(number, process, pulse, LifeSigns(process.pid, lambda pulse=pulse: pulse.beats))  # type: ignore[misc]
                )
        except BaseException:
            for rank in ranks:
                rank.kill()
            raise
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.process.wait()
            rank.pulse.close()


class _Launcher:
    """Monitors the processes until all of them have terminated."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._cause: tuple[Rank, str] | None = None
        """The rank that was lost first, and the way in which it was lost."""
        self._until = float("inf")
        """The time at which the ranks that are still running are killed."""
        self._stops: list[int] = []
        """The stop signals received so far."""

    def follow(self) -> int:
        """Wait until all ranks have terminated, and return the exit code of the run."""
        looked, left = time.monotonic(), list(self._ranks)
        with self._signals():
            while left:
                time.sleep(LOOK)
                now = time.monotonic()
                passed, looked = min(now - looked, 10 * LOOK), now
                left = [rank for rank in left if self._runs(rank, passed)]
                if now > self._until:
                    for rank in left:
                        if is_stopped(rank.process.pid):  # the other ranks noticed the loss first, and ended
                            self._lost(rank, "has stalled: it is stopped (by SIGSTOP or Ctrl-Z)")
                        rank.kill()
        return self._code()

    def _runs(self, rank: Rank, passed: float) -> bool:
        """Check a rank and return whether it is still running."""
        code = rank.process.poll()
        if code is None:
            still = rank.signs.look(passed)
            if still is not None:
                self._lost(rank, f"has stalled: {still}")
                rank.kill()
        elif code < 0 and not rank.gave_up and -code not in self._stops and not rank.stopped_by_request:
            self._lost(rank, how_it_ended(code), memory_hint(code))
        else:
            if code in STOPS and not self._stops and rank.pulse.doing != LAST:
                # Only this rank got a stop signal, before its last collective call; the others would wait for it.
                self._stops.append(code - 128)
                for other in self._ranks:
                    other.stop(code - 128)
            self._end_soon(GRACE if code and code not in STOPS else LEAVING)
        return code is None

    def _lost(self, rank: Rank, how: str, why: str = "") -> None:
        if self._cause is None and len(self._stops) < 2:
            self._cause = rank, how
            complain(
                f"{rank} {how}, at: {rank.at}.{why} Resume the run: only the steps since its last checkpoint are lost."
            )
        self._end_soon(GRACE)

    def _end_soon(self, seconds: float) -> None:
        self._until = min(self._until, time.monotonic() + seconds)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(number: int, _frame: FrameType | None) -> None:
            self._stops.append(number)
            for rank in self._ranks:
                rank.stop(number)
            # Two SIGTERMs may come from two programs with the same request; a second Ctrl-C comes from a person who waits.
            if number == signal.SIGINT and len(self._stops) > 1:
                self._end_soon(AT_ONCE if len(self._stops) == 2 else 0.0)

        def pause(number: int, _frame: FrameType | None) -> None:
            for rank in self._ranks:
                rank.send_group(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            for rank in self._ranks:  # this process was continued by SIGCONT
                rank.send_group(signal.SIGCONT)

        handlers = {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGHUP: stop, signal.SIGTSTP: pause}
        before = {
            number: signal.signal(number, handler)
            for number, handler in handlers.items()
            if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            with unbroken():  # the ranks end by themselves
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _code(self) -> int:
        """Return the exit code of the run, which is that of the signal that stopped the run or of the first rank that failed."""
        codes = [rank.process.returncode for rank in self._ranks]
        if self._cause is not None:
            return EXIT_WRONG
        if self._stops and any(code in STOPS or code < 0 for code in codes):
            if self._ranks[0].gave_up and not self._ranks[0].pulse.beats:  # killed before it could print that
                complain("stopped.")
            return 128 + self._stops[0]
        failed = [code for code in codes if code > 0 and code != EXIT_ALONE]
        if failed:
            return int(failed[0])
        late = ", ".join(f"{rank}, at: {rank.at}" for rank in self._ranks if rank.gave_up)
        if late:
            complain(
                f"Some processes did not end after the others had, and were killed: {late}. Resume the run."
            )
            return EXIT_WRONG
        if EXIT_ALONE in codes:
            complain(
                "A rank ended because it lost the connection to another rank that is still running. Resume the run."
            )
            return EXIT_WRONG
        return next((128 - code for code in codes if code < 0), 0)


# -------- `--launch ray`: ranks and rollout workers as actors on a cluster (docs/ray.md).


def launch_ray(arguments: argparse.Namespace) -> int:
    """Check the recipe on this machine, run the command without `--launch` on a cluster, and return the exit code."""
    # Imported here, so that the launcher of torchrun's ranks stays small.
    from kapelle.cli.source import find_stages, read_source
    from kapelle.cluster.launcher import check_installed, launch
    from kapelle.cluster.placement import check_pools, check_workers
    from kapelle.setup.preparation import prepare

    check_single_launcher()
    check_installed()
    how = {"resume": arguments.resume, "real": arguments.real}
    staged = find_stages(arguments.words, arguments.run_dir, **how)
    configs: Iterable[RunConfig] = (
        [read_source(arguments.words, arguments.run_dir, **how).config]
        if staged is None
        else (config for _, config in staged.checked())
    )
    processes = arguments.processes or 1
    prepared: list[PreparedRun] = []
    for (
        config
    ) in configs:  # one at a time: `checked` provides each stage with files that earlier stages will train
        check_workers(config, processes)
        prepared.append(prepare(config))
    check_pools(prepared)
    first = prepared[0].config
    return launch(
        first.ray, processes, first.episode.environment_workers, [*words_of(arguments), "--no-rich"]
    )
