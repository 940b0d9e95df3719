"""Manage worker processes for environments (`episode.environment_workers`), and access the episode states in these processes."""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any

from kapelle.environment import Environment, RemoteState, WorkerLost
from kapelle.errors import EngineError
from kapelle.rollout.workers.session import Frames, pack
from kapelle.runtime.deadlines import UNBREAKABLE, Patience, within
from kapelle.runtime.foreign_code import environment_error
from kapelle.runtime.process_tree import LifeSigns, SharedStatus, start_server
from kapelle.runtime.wire.worlds import VERSION, task_form
from kapelle.setup.environment_forms import environment_form
from kapelle.types import Task

# -------- A worker: requests, answers, and its end
#
# One thread (`WorkerReader`) reads from all workers, so that answers do not wait for the event loop and no wait outlives the worker.
# `server.py` contains the other side.

SERVER = "kapelle.rollout.workers.server"
"""Name of the module that the worker process runs."""
LOOK = 0.5
"""Time in seconds between two checks of the workers."""
CLOSING = 7.0
"""Maximum time in seconds for a worker to close its episode states and exit; see `server.LEAVING`."""
CHUNK = 1 << 18
"""Maximum number of bytes that are read at once."""

Waiting = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", int]
"""The future of a response, its event loop, and the session of the request."""


class Holder:
    """The process of a worker, on this machine or on another machine."""

    connection: socket.socket
    """The socket that is connected to the process."""
    where: str
    """A description of the process, which is used in messages."""

    def signs(self) -> tuple[int, int]:
        """Return the number of heartbeats of the process, and the session that was computing at the last heartbeat (0 for none)."""
        raise NotImplementedError

    def still(self, passed: float) -> str | None:
        """Add the seconds since the last check.

        If the process has been inactive for too long, return for how long.
        """
        return None

    def wait(self, seconds: float) -> None:
        """Wait for the end of the process, for at most this many seconds."""
        raise NotImplementedError

    def end(self) -> str:
        """Kill the process and its child processes, and return how the process ended."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources after the process has ended."""
        raise NotImplementedError


class HeldHere(Holder):
    """The process of a worker on this machine."""

    def __init__(self, _place: int = 0) -> None:
        """Start the process of the worker."""
        self._pulse = SharedStatus()
        self.process, self.connection = start_server(SERVER, self._pulse)
        self.pid = self.process.pid
        """The process id of the worker."""
        self.where = f"process {self.pid}"
        self._signs = LifeSigns(self.process.pid, lambda: self._pulse.beats)

    def signs(self) -> tuple[int, int]:
        """See `Holder`."""
        return self._pulse.beats, self._pulse.session

    def still(self, passed: float) -> str | None:
        """See `Holder`."""
        found = self._signs.look(passed)
        return None if found is None else f"an environment worker stopped responding: {found}"

    def wait(self, seconds: float) -> None:
        """See `Holder`."""
        with suppress(subprocess.TimeoutExpired, ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)  # a stopped process could not end
            self.process.wait(seconds)

    def end(self) -> str:
        """See `Holder`."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        code = self.process.returncode
        # Episodes record this message, so it contains no process number: a repeated run must have the same records.
        if code >= 0:
            return f"an environment worker ended with exit code {code}"
        with suppress(ValueError):
            return f"an environment worker was ended by {signal.Signals(-code).name}"
        return f"an environment worker was ended by signal {-code}"

    def close(self) -> None:
        """See `Holder`."""
        self._pulse.close()


Hold = Callable[[int], Holder]
"""Function that starts the process of the worker with this index (from 0)."""


class Worker:
    """A process that holds episode states."""

    def __init__(self, begin: bytes, holder: Holder) -> None:
        """Use the process of `holder`. The bytes `begin` are the first frame that is sent to it, which is request 0."""
        self.holder = holder
        self.connection = holder.connection
        self.connection.setblocking(False)
        self.frames = Frames()
        self.waiting: dict[int, Waiting] = {}
        self.outgoing = bytearray(begin)
        self.sessions = self.answered = 0
        """Number of open episode states, and number of completed requests."""
        self.lost: str | None = None
        """How the process ended, or None while it is running."""
        self.failure: EngineError | None = None
        """Reason why the process could not start, or None."""
        self.blamed: frozenset[int] = frozenset()
        """Sessions that were computing when the process ended."""
        self.guard = threading.RLock()
        """Lock that is held while `outgoing` and `waiting` are changed."""
        self._requests = 0
        self.beats, self.silent = 0, 0.0
        """The number of the last heartbeat, and the time in seconds since then during which a request was open."""

    def check(self, session: int) -> None:
        """Raise EngineError if the worker could not start, or WorkerLost if the worker has ended."""
        if self.failure is not None:
            raise self.failure
        if self.lost is not None:
            raise WorkerLost(self.lost, blamed=session in self.blamed)

    def put(self, request: Mapping[str, Any], waiting: Waiting) -> int:
        """Send a request and return its number. Raises the same errors as `check`."""
        with self.guard:
            self.check(waiting[2])
            self._requests += 1
            number = self._requests
            frame = pack({"id": number, **request})
            self.waiting[number] = waiting
            self.outgoing += frame
            self.flush()
        return number

    def flush(self) -> bool:
        """Send as many bytes as the socket accepts, and return whether more bytes must be sent."""
        with self.guard:
            with suppress(OSError):  # it is full, or closed, which the reader notices
                while self.outgoing:
                    del self.outgoing[: self.connection.send(self.outgoing[:CHUNK])]
            return bool(self.outgoing)

    def end(self, how: str | None = None) -> list[Waiting]:
        """End the process if it is running, and return the requests that will receive no response."""
        with self.guard:
            if self.lost is not None:
                return []
            ended = self.holder.end()
            self.lost = how or ended
            left, self.waiting = list(self.waiting.values()), {}
            _, session = self.holder.signs()
            self.blamed = frozenset([session] if session else [session for *_, session in left])
            self.connection.close()
            self.holder.close()
        return left


class WorkerReader:
    """The thread that reads responses, notices the end of workers, and ends workers without heartbeats."""

    def __init__(self, silence: float) -> None:
        """Set the maximum time in seconds without a heartbeat, after which a worker with an open request is ended."""
        self._silence = silence
        self.deaths = 0
        """Number of consecutive workers that ended before their first response."""
        self.workers: dict[Worker, None] = {}
        self._selector = selectors.DefaultSelector()
        self._ears, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._selector.register(self._ears, selectors.EVENT_READ)
        self._new: list[Worker] = []
        self._over = False
        self._thread = threading.Thread(target=self._run, name="kapelle-environment-workers", daemon=True)
        self._thread.start()

    def add(self, worker: Worker) -> None:
        """Start to watch a new worker."""
        self._new.append(worker)
        self.ring()

    def ring(self) -> None:
        """Wake up the thread."""
        with suppress(OSError):
            self._bell.send(b"!")

    def close(self) -> None:
        """End all workers, first by closing their sockets and then by force."""
        self._over = True
        self.ring()
        self._thread.join()
        workers = [*self.workers, *self._new]
        for worker in workers:
            with suppress(OSError):
                worker.connection.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + CLOSING
        for worker in workers:
            worker.holder.wait(max(0.0, until - time.monotonic()))
            _tell(worker.end("the environment workers were closed"), worker)
        self._selector.close()
        self._ears.close()
        self._bell.close()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._over:
            ready = self._selector.select(LOOK)
            while self._new:
                worker = self._new.pop()
                self.workers[worker] = None
                self._selector.register(worker.connection, selectors.EVENT_READ, worker)
            for worker in self.workers:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.flush() else 0)
                if self._selector.get_key(worker.connection).events != wanted:
                    self._selector.modify(worker.connection, wanted, worker)
            answers: defaultdict[asyncio.AbstractEventLoop, list[tuple[Waiting, Any]]] = defaultdict(list)
            for key, events in ready:
                if key.data is None:
                    self._ears.recv(CHUNK)
                elif key.data in self.workers:
                    self._read(key.data, events, answers)
            for loop, given in answers.items():
                with suppress(RuntimeError):  # that loop has ended
                    loop.call_soon_threadsafe(partial(_deliver, given))
            now = time.monotonic()
            passed = now - looked
            # A longer time between two checks means that this process was paused, and counts as one interval.
            for worker in list(self.workers):
                counted = min(passed, 2 * LOOK)
                still = worker.holder.still(counted if worker.waiting else 0.0)
                beats, _ = worker.holder.signs()
                if beats != worker.beats or not worker.waiting:
                    worker.beats, worker.silent = beats, 0.0
                else:
                    worker.silent += counted
                if worker.silent > self._silence:
                    still = f"an environment worker gave no sign of life for {self._silence:g} s"
                if still is not None:
                    self._bury(worker, still)
            looked = now

    def _read(self, worker: Worker, events: int, answers: Mapping[Any, list[tuple[Waiting, Any]]]) -> None:
        if not events & selectors.EVENT_READ:
            return
        try:
            data = worker.connection.recv(CHUNK)
            for answer in worker.frames.feed(data):
                if answer["id"] == 0 and "error" in answer:
                    worker.failure = EngineError(
                        f"An environment worker could not start: {': '.join(answer['error'])} Set "
                        "`episode.environment_workers: 0` to test the environment in this process."
                    )
                    data = b""  # no more answers
                worker.answered += answer["id"] > 0
                waiting = worker.waiting.pop(answer["id"], None)
                if waiting is not None:
                    answers[waiting[0]].append((waiting, answer))
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data = b""
        if not data:
            self._bury(worker)

    def _bury(self, worker: Worker, how: str | None = None) -> None:
        self._selector.unregister(worker.connection)
        del self.workers[worker]
        if how is None:
            worker.holder.wait(LOOK)  # it has closed its socket and will end
        left = worker.end(how)
        memory = (
            " If you did not send the signal, the machine ran out of memory."
            if "SIGKILL" in str(worker.lost)
            else ""
        )
        logging.getLogger(__name__).warning(
            "kapelle: %s (%s).%s Its episodes are repeated in another one.",
            worker.lost,
            worker.holder.where,
            memory,
        )
        self.deaths = 0 if worker.answered else self.deaths + 1
        _tell(left, worker)


def _deliver(given: list[tuple[Waiting, Any]]) -> None:
    """Set the results or exceptions of futures."""
    for (_, future, _), answer in given:
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif "error" in answer:
            future.set_exception(environment_error(*answer["error"]))
        else:
            future.set_result(answer["value"])


def _tell(left: list[Waiting], worker: Worker) -> None:
    """Set the exception of requests that will receive no response."""
    for waiting in left:
        try:
            worker.check(waiting[2])
        except (EngineError, WorkerLost) as error:
            with suppress(RuntimeError):
                waiting[0].call_soon_threadsafe(_deliver, [(waiting, error)])


DEATHS = 20
"""Number of consecutive workers that may die before their first response. If more workers die, the run stops."""


class EnvironmentWorkers(AbstractContextManager["EnvironmentWorkers"]):
    """A pool of worker processes, in which episode states can be opened from any event loop.

    Each episode state is opened in the process with the fewest states. Processes are started when they are first needed, and are
    restarted if they die. All processes end when the pool is closed or garbage-collected, or when this process ends.
    """

    def __init__(
        self, environment: Environment, size: int, patience: Patience, hold: Hold = HeldHere
    ) -> None:
        """Set the environment, the number of processes, the time limits of calls, and the function that starts a process.

        Raises ConfigError if the environment cannot be created in another process.
        """
        assert size >= 1, "a pool has at least one process"
        self.size = size
        self._patience, self._hold = patience, hold
        serve = {
            "id": 0,
            "call": "serve",
            "version": VERSION,
            "environment": environment_form(environment),
            "patience": asdict(patience),
        }
        self._begin = pack(serve)
        self.workers: list[Worker | None] = [None] * size
        self._reader: WorkerReader | None = None
        self._numbers = count(1)
        self._starting = threading.Lock()
        self._end: weakref.finalize[..., Any] | None = None

    @property
    def running(self) -> list[Worker]:
        """The worker processes that are running."""
        return [worker for worker in self.workers if worker is not None and worker.lost is None]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Opening another state later starts new processes."""
        with self._starting:
            if self._end is not None:
                self._end()
            self.workers, self._reader, self._end = [None] * self.size, None, None

    async def open_state(
        self, environment: Environment, task: Task, agents: Sequence[str], seed: int, patience: Patience
    ) -> RemoteState:
        """Open the state of one episode in a worker; see `bounded_states.open_state`.

        Raises WorkerLost if the worker ends, and EngineError if workers cannot be started or die repeatedly.
        """
        with self._starting:
            reader = self._reader
            if reader is None:
                reader = self._reader = WorkerReader(self._patience.environment + UNBREAKABLE)
                self._end = weakref.finalize(self, _end_own, reader, os.getpid())
            if reader.deaths >= DEATHS:
                lost = [worker.lost for worker in self.workers if worker is not None and worker.lost]
                raise EngineError(
                    f"{reader.deaths} environment workers in a row died before their first answer; the last error was: "
                    f"{lost[0] if lost else 'it died'}. See their output above, check the machine's memory, or set "
                    "`episode.environment_workers: 0`."
                )
            # The process with the fewest episode states, restarted if it has died.
            busy = [0 if w is None or w.lost is not None else w.sessions for w in self.workers]
            place = busy.index(min(busy))
            worker = self.workers[place]
            if worker is None or worker.lost is not None:
                worker = self.workers[place] = Worker(self._begin, self._hold(place))
                reader.add(worker)
            worker.sessions += 1
        state = WorkerState(self, worker, next(self._numbers), environment.name, patience)
        await state.reset({"task": task_form(task), "agents": list(agents), "seed": seed})
        return state

    async def ask(self, worker: Worker, session: int, request: Mapping[str, Any]) -> Any:
        """Send a request to a worker, and return its response or raise its error.

        Raises WorkerLost if the worker has ended, and EngineError if the worker could not start.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        number = worker.put({**request, "session": session}, (loop, future, session))
        if worker.outgoing and self._reader is not None:
            self._reader.ring()
        try:
            return await future
        finally:
            worker.waiting.pop(number, None)


def _end_own(reader: WorkerReader, owner: int) -> None:
    # A fork of this process inherits the pool, but does not own the workers.
    if os.getpid() == owner:
        reader.close()


class WorkerState(RemoteState):
    """An episode state in a worker.

    The worker limits the time of each call; this process applies only the time limit of the episode.
    """

    def __init__(
        self, pool: EnvironmentWorkers, worker: Worker, session: int, name: str, patience: Patience
    ) -> None:
        """Set the worker of the state and the number of its session."""
        super().__init__(name, patience)
        self._pool, self._worker, self._session = pool, worker, session

    @property
    def lost(self) -> WorkerLost | None:
        """How the episode state was lost with its worker, or None while the worker is running."""
        try:
            self._worker.check(self._session)
        except WorkerLost as lost:
            return lost
        except EngineError:
            return None
        return None

    async def call(self, method: str, request: Mapping[str, Any]) -> Any:
        """See `RemoteState`."""
        answer = self._pool.ask(self._worker, self._session, request)
        what = f"`{method}` of environment '{self._name}'"
        return await within(what, "episode", self._patience.episode, answer)

    def release(self) -> None:
        """See `RemoteState`."""
        self._worker.sessions -= 1
