"""Where the calls of outside programs meet the episodes that wait for them.

A server's thread takes seats and calls; episodes run in the event loop of the sampler. Every method says whose it is.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from kapelle.environment import Outcome
from kapelle.errors import ConfigError, EpisodeError
from kapelle.types import Json, Task


class Over(Exception):
    """The episode, or all of them, is over: calls get no more answers."""


class Wake:
    """Says that something has changed, to an episode that waits."""


@dataclass(frozen=True, slots=True)
class OutsideCall:
    """A call of an agent by an outside program."""

    number: int
    """Among the calls of its episode."""
    agent: str
    asked: Mapping[str, Json]
    """`messages`, `after`, `max_tokens` and `stop`, as the workflow `external` reads them."""
    answer: Future[Mapping[str, Json]]
    """Cancelled when its caller goes away."""


News = OutsideCall | Outcome | Wake | EpisodeError
"""What an episode learns of its program: a call (once more when its caller goes away), its reward, or why it will not come."""


@dataclass(eq=False)
class WaitingEpisode:
    """One episode that waits for an outside program."""

    name: str
    """Of the session."""
    task: Task
    seed: int
    agents: tuple[str, ...]
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _calls: asyncio.Queue[News] = field(default_factory=asyncio.Queue)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: set[Future[Mapping[str, Json]]] = field(default_factory=set)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a program has it. For the episode."""
    closed: bool = False

    def take(self) -> None:
        """Let the episode begin: a program has been told of it; raises Over. For the server."""
        with self._lock:
            self._need_open()
        self._in_loop(self.taken.set)

    def call(self, agent: str, asked: Mapping[str, Json]) -> Future[Mapping[str, Json]]:
        """Hand a call to the episode and return what will be its answer; raises Over. For the server.

        Whoever goes away cancels it; the episode then gets the call once more.
        """
        answer: Future[Mapping[str, Json]] = Future()
        with self._lock:
            self._need_open()
            self._open.add(answer)
            call = OutsideCall(next(self._numbers), agent, asked, answer)
        self._put(call)

        def gone(answer: Future[Mapping[str, Json]]) -> None:
            if answer.cancelled():
                with suppress(Over):
                    self._put(call)

        answer.add_done_callback(gone)
        return answer

    def finish(self, outcome: Outcome) -> None:
        """End the episode with its rewards; raises Over. For the server."""
        with self._lock:
            self._need_open()
        self._put(outcome)

    def fail(self, why: str) -> None:
        """End the episode without rewards; raises Over. For the server."""
        with self._lock:
            self._need_open()
        self._put(EpisodeError(why))

    async def next(self) -> News:
        """Wait for the program's next call, or for its end. For the episode."""
        return await self._calls.get()

    def wake(self) -> None:
        """Let who waits look anew. For the episode."""
        self._calls.put_nowait(Wake())

    def now(self) -> News | None:
        """Return what has arrived so far, or None. For the episode."""
        return None if self._calls.empty() else self._calls.get_nowait()

    def answered(self, call: OutsideCall, said: Mapping[str, Json]) -> None:
        """Answer a call. For the episode."""
        with self._lock:
            self._open.discard(call.answer)
        if call.answer.set_running_or_notify_cancel():
            call.answer.set_result(said)

    def close(self) -> None:
        """Stop answering. For the episode."""
        with self._lock:
            self.closed = True
            left, self._open = self._open, set()
        for answer in left:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(Over())

    def _need_open(self) -> None:
        if self.closed:
            raise Over

    def _put(self, what: News) -> None:
        self._in_loop(partial(self._calls.put_nowait, what))

    def _in_loop(self, work: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:  # the loop has ended with its step
            raise Over from None


MOST_REASONS = 1024
"""Failures of programs that are known to those who call later."""


class Switchboard:
    """Seats that wait for a program, in order, and programs that wait for a seat."""

    def __init__(self, url: str, token: str | None, say: Callable[[str], None] = lambda _: None) -> None:
        """Tell programs to call `url`, with a token if there is one; `say` tells the run's user what to know of them."""
        self.url = url
        self.token = token
        self.say = say
        self._quiet_until = 0.0
        """When it may be said again that nobody plays, by the monotonic clock."""
        self._failures_quiet_until = 0.0
        self._unsaid = 0
        """Programs that failed and of which nothing was said, because others just had."""
        self._why: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._free: deque[WaitingEpisode] = deque()
        self._taken: dict[str, WaitingEpisode] = {}
        self._waiting: deque[Future[WaitingEpisode]] = deque()
        self._closed = False

    def offer(self, seat: WaitingEpisode) -> None:
        """Let the next program that asks take a seat. For the episode."""
        with self._lock:
            if self._closed:
                raise EpisodeError("The server for outside programs was closed.")
            while self._waiting:
                waiter = self._waiting.popleft()
                if waiter.set_running_or_notify_cancel():
                    self._taken[seat.name] = seat
                    waiter.set_result(seat)
                    return
            self._free.append(seat)

    def give(self, seat: WaitingEpisode) -> None:
        """Let a seat be called by its name from the start. For the episode."""
        with self._lock:
            self._taken[seat.name] = seat

    def withdraw(self, seat: WaitingEpisode) -> None:
        """Close a seat. For the episode."""
        with self._lock:
            self._taken.pop(seat.name, None)
            with suppress(ValueError):
                self._free.remove(seat)
        seat.close()

    def take(self) -> Future[WaitingEpisode]:
        """Return the future of the next seat; Over if there will be none. For the server."""
        taken: Future[WaitingEpisode] = Future()
        with self._lock:
            if self._closed:
                taken.set_exception(Over())
            elif self._free:
                seat = self._free.popleft()
                self._taken[seat.name] = seat
                taken.set_running_or_notify_cancel()
                taken.set_result(seat)
            else:
                self._waiting.append(taken)
        return taken

    def seat(self, name: str) -> WaitingEpisode | None:
        """Return a seat that was taken, by its session, or None. For the server."""
        with self._lock:
            return self._taken.get(name)

    def failed(self, seat: WaitingEpisode, why: str) -> None:
        """Say that a seat is free because its program failed; of many at once, how many there were. For the episode."""
        with self._lock:
            self._why[seat.name] = why
            if len(self._why) > MOST_REASONS:
                self._why.popitem(last=False)
            now = time.monotonic()
            if now < self._failures_quiet_until:
                self._unsaid += 1
                return
            others, self._unsaid = self._unsaid, 0
            self._failures_quiet_until = now + 10.0
        more = f" (So failed {others} others since the last such line.)" if others else ""
        self.say(f"the episode of {seat.task.id} failed and its place is free: {why}{more}")

    def why_over(self, name: str) -> str | None:
        """Return why an episode failed, by its session; None if it did not fail, or failed long ago. For the server."""
        with self._lock:
            return self._why.get(name)

    def say_if_nobody_plays(self) -> None:
        """Report that episodes wait for a program to take one; at most once in five minutes. For the episode."""
        with self._lock:
            waiting, now = len(self._free), time.monotonic()
            if not waiting or self._taken or now < self._quiet_until:
                return
            self._quiet_until = now + 300.0
        self.say(
            f"{waiting} episodes wait for a program, and none has one. Start yours, or look why it does not ask: "
            f"POST {self.url}/v1/task"
        )

    def close(self) -> None:
        """End everything that waits here."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            seats = [*self._free, *self._taken.values()]
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(Over())
        for seat in seats:
            seat.close()


_boards: dict[str, Switchboard] = {}


@contextmanager
def switched_on(key: str, board: Switchboard) -> Iterator[None]:
    """Let the worlds of an environment find a switchboard while the block runs; ConfigError where there is one."""
    if key in _boards:
        raise ConfigError(
            "Another trainer of this process serves the same external programs. Close it first."
        )
    _boards[key] = board
    try:
        yield
    finally:
        del _boards[key]
        board.close()


def board_of(key: str) -> Switchboard:
    """Return the switchboard that an environment's worlds use; EpisodeError if no server is running for them."""
    if key not in _boards:
        raise EpisodeError("Nothing is served for outside programs here. Train, or evaluate, with `kapelle`.")
    return _boards[key]


# -------- An outside program that is started for one episode

SHOWN = 500
"""Characters of what a program that failed has said."""
LAST_S = 1.0
"""Seconds for the end of what is said by a program whose processes were all ended."""
TIDY_S = 2.0
"""Seconds that a program has to end once its episode is over."""
KEPT = 64 << 10
"""Bytes that are kept of what a program says."""


def variables(seat: WaitingEpisode, url: str, token: str | None) -> Mapping[str, str]:
    """Return the environment variables by which a program finds its agents and its task."""
    return {
        **os.environ,
        "OPENAI_BASE_URL": f"{url}/sessions/{seat.name}/v1",
        "OPENAI_API_KEY": token or "none",
        "KAPELLE_SESSION": seat.name,
        "KAPELLE_TASK": seat.task.id,
        "KAPELLE_SPLIT": str(seat.task.data["split"]),
        "KAPELLE_INDEX": str(seat.task.data["index"]),
        "KAPELLE_SEED": str(seat.seed),
    }


class _Exit(asyncio.subprocess.SubprocessStreamProtocol):
    """Tells when a process has ended; `Process.wait` also waits for all that it started and that share its output."""

    def __init__(self) -> None:
        super().__init__(limit=1 << 16, loop=asyncio.get_running_loop())
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        self.ended.set()
        super().process_exited()


class Program:
    """A process of its own group, which ends with its episode."""

    def __init__(self, transport: asyncio.SubprocessTransport, exited: _Exit) -> None:
        self._transport, self._exited = transport, exited
        self._process = asyncio.subprocess.Process(transport, exited, asyncio.get_running_loop())
        self._said = bytearray()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(
        cls, command: Sequence[str], seat: WaitingEpisode, url: str, token: str | None
    ) -> Program:
        """Start a program; EpisodeError where that fails."""
        try:
            transport, exited = await asyncio.get_running_loop().subprocess_exec(
                _Exit,
                *command,
                env=variables(seat, url, token),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EpisodeError(
                f"`environment.command` cannot be started: {error.strerror} ({command[0]})."
            ) from None
        return cls(transport, exited)

    async def ended(self) -> str:
        """Wait until it ends and return how, in words."""
        await self._exited.ended.wait()
        code = self._process.returncode
        # What it started may play on where it ended well, as a wrapper does. One that failed has left it behind.
        await asyncio.wait((self._reading,), timeout=LAST_S if code else None)
        said = " ".join(self._said.decode("utf-8", "replace").split())[-SHOWN:]
        return f"The program ended with code {code} and posted no reward. It said: {said or '(nothing)'}"

    async def end(self) -> None:
        """End it and everything that it started; it may tidy up before, as a container's client ends its container."""
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(TIDY_S):
                await self._exited.ended.wait()
        self._signal(signal.SIGKILL)
        await self._exited.ended.wait()
        await asyncio.wait((self._reading,), timeout=LAST_S)
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        self._transport.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while piece := await self._process.stdout.read(1 << 16):
            self._said = (self._said + piece)[-KEPT:]
