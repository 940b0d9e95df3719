"""Episodes that an outside program plays: it calls the agents over HTTP and posts their reward.

kapelle counts the tasks; the program knows what they are. Its calls meet the episodes that wait for them at a switchboard: a
server's thread takes seats and calls there, and episodes run in the event loop of the sampler. Every method says whose it is.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import itertools
import json
import os
import re
import secrets
import signal
import ssl
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from kapelle.environment import Alive, Holding, Outcome, PlayedFromOutside, Scripted
from kapelle.environments.base import StatedRewards
from kapelle.environments.grading.text.tool_call import Form
from kapelle.environments.taught import WithTeacher
from kapelle.errors import AbsentPackage, ConfigError, EpisodeError
from kapelle.runtime.batch_barrier import current_participant
from kapelle.runtime.credentials import LEAST_TOKEN, TOKEN, is_loopback
from kapelle.runtime.deadlines import pause_all_deadlines, pause_deadline
from kapelle.runtime.plugins import find_object
from kapelle.settings.base import FREE, FROM_HERE_ON
from kapelle.types import Json, Split, Task

# -------- The switchboard: where the calls of outside programs meet the episodes that wait for them


class Over(Exception):
    """The episode, or all of them, is over: calls get no more answers."""


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


class ProgramEnded(EpisodeError):
    """The program of an episode ended without a reward."""


News = OutsideCall | Outcome | EpisodeError | None
"""What an episode learns of its program: a call (once more when its caller goes away), its reward, or why it will not come.
None lets it look anew at what it waits for."""


@dataclass(eq=False)
class WaitingEpisode:
    """One episode that waits for an outside program."""

    name: str
    """Of the session."""
    task: Task
    seed: int
    agents: tuple[str, ...]
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    news: asyncio.Queue[News] = field(default_factory=asyncio.Queue)
    """For the episode."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: set[Future[Mapping[str, Json]]] = field(default_factory=set)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a program has it. For the episode."""
    spoke: set[str] = field(default_factory=set)
    """Agents that have answered a call."""
    cut: dict[str, bool] = field(default_factory=dict)
    """Whether each agent's latest answer was cut by its `max_tokens`."""
    closed: bool = False

    def take(self) -> None:
        """Let the episode begin: a program has been told of it; raises Over. For the server."""
        self._in_loop(self.taken.set)

    def call(self, agent: str, asked: Mapping[str, Json]) -> Future[Mapping[str, Json]]:
        """Hand a call to the episode and return what will be its answer; raises Over. For the server.

        Whoever goes away cancels it; the episode then gets the call once more.
        """
        answer: Future[Mapping[str, Json]] = Future()
        with self._lock:
            if self.closed:
                raise Over
            self._open.add(answer)
            call = OutsideCall(next(self._numbers), agent, asked, answer)
        self._in_loop(partial(self.news.put_nowait, call))

        def gone(answer: Future[Mapping[str, Json]]) -> None:
            if answer.cancelled():
                with suppress(Over):
                    self._in_loop(partial(self.news.put_nowait, call))

        answer.add_done_callback(gone)
        return answer

    def finish(self, outcome: Outcome) -> None:
        """End the episode with its rewards; raises Over. For the server."""
        self._in_loop(partial(self.news.put_nowait, outcome))

    def fail(self, error: EpisodeError) -> None:
        """End the episode without rewards; raises Over. For the server."""
        self._in_loop(partial(self.news.put_nowait, error))

    def answered(self, call: OutsideCall, said: Mapping[str, Json]) -> None:
        """Answer a call. For the episode."""
        with self._lock:
            self._open.discard(call.answer)
            if "turn" in said:
                self.spoke.add(call.agent)
                self.cut[call.agent] = said["finish_reason"] == "length"
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

    def _in_loop(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self.closed:
                raise Over
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
        self.door: str | None = None
        """The Unix socket by which programs in sandboxes call, if there is one."""
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
    """Return an environment's switchboard; EpisodeError where nobody serves it."""
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


class _Exit(asyncio.subprocess.SubprocessStreamProtocol):
    """Tells when a process has ended; `Process.wait` also waits for all that it started and that share its output."""

    def __init__(self) -> None:
        super().__init__(limit=1 << 16, loop=asyncio.get_running_loop())
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        self.ended.set()
        super().process_exited()


class StartedProgram(Protocol):
    """A program that was started for one episode."""

    @property
    def timed(self) -> bool:
        """Whether it has a time limit of its own, so that `environment.timeout` does not count what it takes."""
        ...

    async def ended(self) -> Outcome | EpisodeError:
        """Wait until it ends; return how the episode ended with it, unless it has posted that."""
        ...

    async def end(self) -> None:
        """End it and everything that it started."""
        ...


StartsIt = Callable[[WaitingEpisode, Callable[[], bool]], Awaitable[StartedProgram]]
"""Starts a program for an episode; it may ask whether the program waits for an answer."""


class Program:
    """A process of its own group, which ends with its episode."""

    timed = False

    def __init__(self, transport: asyncio.SubprocessTransport, exited: _Exit) -> None:
        self._transport, self._exited = transport, exited
        self._process = asyncio.subprocess.Process(transport, exited, asyncio.get_running_loop())
        self._said = bytearray()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(
        cls, command: Sequence[str], seat: WaitingEpisode, url: str, token: str | None
    ) -> Program:
        """Start a program, which finds its agents and its task in its environment; EpisodeError where that fails."""
        variables = {
            **os.environ,
            "OPENAI_BASE_URL": f"{url}/sessions/{seat.name}/v1",
            "OPENAI_API_KEY": token or "none",
            "KAPELLE_SESSION": seat.name,
            "KAPELLE_TASK": seat.task.id,
            "KAPELLE_SPLIT": str(seat.task.data["split"]),
            "KAPELLE_INDEX": str(seat.task.data["index"]),
            "KAPELLE_SEED": str(seat.seed),
        }
        try:
            transport, exited = await asyncio.get_running_loop().subprocess_exec(
                _Exit,
                *command,
                env=variables,
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

    async def ended(self) -> ProgramEnded:
        """Wait until it ends and return how, in words."""
        await self._exited.ended.wait()
        code = self._process.returncode
        # What it started may play on where it ended well, as a wrapper does. One that failed has left it behind.
        await asyncio.wait((self._reading,), timeout=LAST_S if code else None)
        said = " ".join(self._said.decode("utf-8", "replace").split())[-SHOWN:]
        return ProgramEnded(
            f"The program ended with code {code} and posted no reward. It said: {said or '(nothing)'}"
        )

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


# -------- The world of an outside program: whose move it is depends on whom the program calls next

NOTICE_S = 60.0
"""Seconds for which episodes wait for a program before it is said."""

SERVER = "kapelle.services.policy.outside:serve_outside"
"""What serves the agents of a run to programs."""

_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
"""How many programs may still be started, by event loop."""


class ExternalWorld:
    """One episode that a program plays.

    A step without actions waits for the program: it returns when there are further calls, when callers have gone away, or
    when the program has posted its reward. A step with actions answers calls, while the other one waits. What an agent
    observes and says is JSON that the workflow `external` reads and writes.
    """

    def __init__(
        self,
        board: Switchboard,
        task: Task,
        seed: int,
        agents: tuple[str, ...],
        start: StartsIt | None,
        programs: int,
        least: float = 0.0,
    ) -> None:
        """Play with a program of this world's own where `start` starts one, of which at most so many `programs` run at once.

        `least` is the reward of an episode whose program ended after an answer that was cut.
        """
        self._board = board
        self._seat = WaitingEpisode(f"e-{secrets.token_hex(8)}", task, seed, agents)
        self._start = start
        self._programs = programs
        self._least = least
        self._program: StartedProgram | None = None
        self._begun = False
        self._open: dict[int, OutsideCall] = {}
        """Calls that are not answered yet, by number."""
        self._new: list[int] = []
        """Those that came during the last step."""
        self._gone: list[OutsideCall] = []
        """Those whose callers went away during the last step."""
        self._outcome: Outcome | None = None
        self._running: asyncio.Semaphore | None = None

    def observe(self, agent: str) -> str:
        """Return an agent's new calls with their numbers, and the numbers of calls whose callers have gone away."""
        calls = [
            [number, self._open[number].asked] for number in self._new if self._open[number].agent == agent
        ]
        return json.dumps(
            {"calls": calls, "gone": [call.number for call in self._gone if call.agent == agent]}
        )

    def movers(self) -> tuple[str, ...]:
        """Return the agents that have news; empty when the program has posted its reward."""
        if self._outcome is not None:
            return ()
        news = [*(self._open[number] for number in self._new), *self._gone]
        return tuple(dict.fromkeys(call.agent for call in news))

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Answer calls, or without actions wait for the program; EpisodeError if it ends before posting a reward."""
        if actions:
            for answer in actions.values():
                number, said = json.loads(answer)
                if (call := self._open.pop(number, None)) is not None:
                    self._seat.answered(call, said)
            self._seat.news.put_nowait(None)
            return {}
        part = current_participant()
        if part is not None:
            part.give_up()  # nobody waits for a program that takes its time
        self._new, self._gone = [], []
        if not self._begun:
            await self._begin()
        while not (self._new or self._gone or self._outcome):
            # A program that waits for our answers is not late.
            timed = self._program is not None and self._program.timed
            go_on = pause_deadline() if self._open or timed else None
            news = [await self._next()]
            if go_on is not None:
                go_on()
            while not self._seat.news.empty():
                news.append(self._seat.news.get_nowait())
            for what in news:
                if isinstance(what, EpisodeError):
                    self._board.failed(self._seat, str(what))
                    # Frameworks raise on a response without its end. Without this reward, length would never be punished.
                    if not (isinstance(what, ProgramEnded) and any(self._seat.cut.values())):
                        raise what
                    lost = dict.fromkeys(self._seat.spoke, self._least)
                    what = Outcome(lost, None, {"program": str(what)})  # noqa: PLW2901
                if isinstance(what, Outcome):
                    self._outcome = what
                    self._seat.close()
                elif isinstance(what, OutsideCall) and not what.answer.cancelled():
                    self._open[what.number] = what
                    self._new.append(what.number)
                elif isinstance(what, OutsideCall) and self._open.pop(what.number, None) is not None:
                    if what.number in self._new:
                        self._new.remove(what.number)  # it was never shown
                    else:
                        self._gone.append(what)
        return {}

    async def _begin(self) -> None:
        self._begun = True
        begins = pause_all_deadlines()
        if self._start is None:
            self._board.offer(self._seat)
            while not self._seat.taken.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(NOTICE_S):
                        await self._seat.taken.wait()
                    break
                self._board.say_if_nobody_plays()
            begins()
            return
        loop = asyncio.get_running_loop()
        gate = _turns.setdefault(loop, asyncio.Semaphore(self._programs))
        await gate.acquire()
        begins()
        self._running = gate
        self._board.give(self._seat)
        self._program = await self._start(self._seat, lambda: bool(self._open))

    async def _next(self) -> News:
        if self._program is None:
            return await self._seat.news.get()
        coming = asyncio.ensure_future(self._seat.news.get())
        ending = asyncio.ensure_future(self._program.ended())
        try:
            await asyncio.wait((coming, ending), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
            await asyncio.sleep(0)  # what it posted last may still be on its way into the queue
            nothing = self._seat.news.empty()
            return ending.result() if nothing else self._seat.news.get_nowait()
        finally:
            for task in (coming, ending):
                task.cancel()
                with suppress(asyncio.CancelledError, EpisodeError):
                    await task

    def outcome(self) -> Outcome:
        """Return what the program has posted."""
        return self._outcome or Outcome(truncated=True)

    async def close(self) -> None:
        """Stop answering, and end the program."""
        self._board.withdraw(self._seat)
        try:
            if self._program is not None:
                await self._program.end()
        finally:
            if self._running is not None:
                self._running.release()


class External(StatedRewards, WithTeacher, Alive, Holding, PlayedFromOutside, Scripted):
    """An outside program plays: it calls the agents as OpenAI's chat completions and posts their reward.

    With a `command` it is started once for each episode, and finds the server in `OPENAI_BASE_URL`. Without one you start
    it yourself: it asks for episodes by `POST /v1/task`. The page docs/serving.md has both.
    """

    name: Literal["external"] = "external"
    command: Annotated[tuple[str, ...], FROM_HERE_ON] = ()
    """The program with its arguments; empty when you start it yourself."""
    programs: Annotated[int, FROM_HERE_ON] = Field(default=8, ge=1)
    """Most programs of `command` that run at once."""
    port: Annotated[int, FREE] = Field(default=8000, ge=0, le=65_535)
    """Port that programs call; 0 takes a free one."""
    host: Annotated[str, FREE] = Field(default="127.0.0.1", min_length=1)
    """Address at which the server listens. Any but this machine's own needs TLS and a token in KAPELLE_TOKEN."""
    address: Annotated[str | None, FREE] = None
    """The name or number by which programs reach it, as in the certificate; null for `host`."""
    tls_cert: Annotated[str | None, FREE] = None
    """PEM file of its TLS certificate, chain included; null speaks plain HTTP."""
    tls_key: Annotated[str | None, FREE] = None
    """PEM file of the certificate's private key."""
    tasks: int | None = Field(default=None, ge=1)
    """How many tasks the program has to train on; null for an endless supply."""
    tool_form: Form | None = None
    """How agents call the tools that a program offers; null for the form of their chat template, or else `hermes`."""

    absence: Annotated[float, FREE] = Field(default=30.0, gt=0.0)
    """Seconds for which a program that asked for its episode may be disconnected before it counts as dead."""

    @property
    def sources(self) -> Mapping[Split, str]:
        """The program itself."""
        who = self.command[0] if self.command else "an outside program"
        return {"train": f"tasks of {who}", "test": f"tasks of {who} for the split `test`"}

    @property
    def alive(self) -> Sequence[str]:
        """The program: its episodes cannot be replayed."""
        return ("the outside program",)

    def descriptors(self, agents: int) -> int:
        """Return the pipes and connections of one program."""
        return 4 + agents

    def check(self, agents: Sequence[str]) -> None:
        """Raise ConfigError where a package that speaks HTTP is missing."""
        if any(importlib.util.find_spec(package) is None for package in ("starlette", "uvicorn")):
            raise AbsentPackage("`environment.name: external` needs an extra: pip install 'kapelle[serve]'.")
        if self.teacher is not None:
            if not self.command:
                raise ConfigError(
                    "`environment.teacher` demonstrates in programs that kapelle starts. Name yours in `environment.command`."
                )
            self.check_teacher()

    @property
    def demonstrates(self) -> bool:
        """Whether there is a `teacher`."""
        return self.teacher is not None

    def serve(self, play: Any, say: Callable[[str, str], None]) -> AbstractContextManager[None]:
        """Run the server that programs call while the block runs."""
        # By name, because services stand above environments.
        server: AbstractContextManager[None] = find_object(SERVER, "server")(self, play, say)
        return server

    def check_server(self, processes: int = 1) -> None:
        """Raise ConfigError if the server that programs call could not be started safely, or would be unreachable.

        Each of several `processes` serves its own episodes, at an address that only a started program is told.
        """
        if processes > 1 and not self.command:
            raise ConfigError(
                f"`environment.name: external` without a `command` waits for programs that call one server, but each of {processes} "
                "processes serves its own episodes. Name the program in `environment.command`, or train in one process."
            )
        if processes > 1 and self.port:
            raise ConfigError(
                f"`environment.port` is {self.port}, but each of {processes} processes serves its own episodes on a port of "
                "its own. Set `environment.port: 0`."
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "TLS needs a certificate and its key: set both `environment.tls_cert` and `environment.tls_key`."
            )
        if self.tls_cert is not None and self.tls_key is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key)
            except OSError as error:  # ssl.SSLError is one
                raise ConfigError(
                    f"`environment.tls_cert` and `environment.tls_key` cannot be used ({self.tls_cert}, {self.tls_key}): "
                    f"{error.strerror or error}."
                ) from None
        named = self.address is not None and not _is_number(self.address)
        if named and not re.fullmatch(r"[A-Za-z0-9_.-]+", self.address or ""):
            raise ConfigError(
                f"`environment.address` is '{self.address}'. Give the name or number alone, without a scheme or a port."
            )
        if is_loopback(self.host):
            return
        lacking = [] if self.tls_cert else ["TLS (`environment.tls_cert` and `environment.tls_key`)"]
        if len(os.environ.get(TOKEN, "")) < LEAST_TOKEN:
            lacking.append(f"a token of {LEAST_TOKEN} characters or more (the environment variable {TOKEN})")
        if lacking:
            raise ConfigError(
                f"`environment.host: {self.host}` can be reached from other machines, and that needs {' and '.join(lacking)}. "
                "Add what is missing, or leave it out to serve programs of this machine only."
            )
        if self.address is None and _is_number(self.host) and ipaddress.ip_address(self.host).is_unspecified:
            raise ConfigError(
                f"`environment.host: {self.host}` listens at all addresses of this machine, and programs need one to call. Set "
                "`environment.address` to the name or number in the certificate."
            )

    def size(self, split: Split) -> int | None:
        """Return how many tasks there are to train on; the supply of test tasks is endless."""
        return self.tasks if split == "train" else None

    def task(self, split: Split, index: int) -> Task:
        """Return a number by which the program knows its task."""
        return Task(f"{split}-{index}", "", {"split": split, "index": index})

    def start(self, task: Task, agents: Sequence[str], seed: int) -> ExternalWorld:
        """Offer an episode to the program; EpisodeError where nobody serves it."""
        board = board_of(self.key)

        async def begin(seat: WaitingEpisode, waits: Callable[[], bool]) -> Program:
            return await Program.start(self.command, seat, board.url, board.token)

        starts = begin if self.command else None
        return ExternalWorld(board, task, seed, tuple(agents), starts, self.programs, self.rewards[0])

    @property
    def key(self) -> str:
        """What its worlds and its server find each other by."""
        return self.model_dump_json()


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
