"""Tasks of an outside program: kapelle counts them, the program knows what they are."""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import json
import os
import re
import secrets
import ssl
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from kapelle.environment import Alive, Holding, Outcome, PlayedFromOutside
from kapelle.environments.external.switchboard import (
    News,
    OutsideCall,
    Program,
    Switchboard,
    WaitingEpisode,
    board_of,
)
from kapelle.errors import ConfigError, EpisodeError
from kapelle.runtime.batch_barrier import current_participant
from kapelle.runtime.credentials import LEAST_TOKEN, TOKEN, is_loopback
from kapelle.runtime.deadlines import pause_all_deadlines, pause_deadline
from kapelle.runtime.plugins import find_object
from kapelle.settings.base import FREE, FROM_HERE_ON, Settings
from kapelle.types import Split, Task

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
        command: tuple[str, ...],
        programs: int,
    ) -> None:
        self._board = board
        self._seat = WaitingEpisode(f"e-{secrets.token_hex(8)}", task, seed, agents)
        self._command = command
        self._programs = programs
        self._program: Program | None = None
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
            self._seat.wake()
            return {}
        part = current_participant()
        if part is not None:
            part.give_up()  # nobody waits for a program that takes its time
        self._new, self._gone = [], []
        if not self._begun:
            await self._begin()
        while not (self._new or self._gone or self._outcome):
            # A program that waits for our answers is not late.
            go_on = pause_deadline() if self._open else None
            self._sort(await self._next())
            if go_on is not None:
                go_on()
            while (more := self._seat.now()) is not None:
                self._sort(more)
        return {}

    def _sort(self, what: News) -> None:
        if isinstance(what, EpisodeError):
            self._board.failed(self._seat, str(what))
            raise what
        if isinstance(what, Outcome):
            self._outcome = what
            self._seat.close()
        elif isinstance(what, OutsideCall):
            if not what.answer.cancelled():
                self._open[what.number] = what
                self._new.append(what.number)
            elif self._open.pop(what.number, None) is not None:
                if what.number in self._new:
                    self._new.remove(what.number)  # it was never shown
                else:
                    self._gone.append(what)

    async def _begin(self) -> None:
        self._begun = True
        begins = pause_all_deadlines()
        if not self._command:
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
        self._program = await Program.start(self._command, self._seat, self._board.url, self._board.token)

    async def _next(self) -> News:
        if self._program is None:
            return await self._seat.next()
        coming = asyncio.ensure_future(self._seat.next())
        ending = asyncio.ensure_future(self._program.ended())
        try:
            await asyncio.wait((coming, ending), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
            await asyncio.sleep(0)  # what it posted last may still be on its way into the queue
            last = self._seat.now()
            return EpisodeError(ending.result()) if last is None else last
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


class External(Settings, Alive, Holding, PlayedFromOutside):
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
    rewards: tuple[FiniteFloat, FiniteFloat] = (0.0, 1.0)
    """Least and greatest reward of an agent; one outside is refused when it is posted."""

    absence: Annotated[float, FREE] = Field(default=30.0, gt=0.0)
    """Seconds for which a program that asked for its episode may be disconnected before it counts as dead."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The range of `rewards`."""
        return self.rewards

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
        """Raise ConfigError where a package that speaks HTTP is missing, or the range of rewards is empty."""
        if any(importlib.util.find_spec(package) is None for package in ("starlette", "uvicorn")):
            raise ConfigError("`environment.name: external` needs an extra: pip install 'kapelle[serve]'.")
        if self.rewards[0] >= self.rewards[1]:
            raise ConfigError(f"environment.rewards is {list(self.rewards)}. Put the lower end first.")

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
        """Offer an episode to the program."""
        return ExternalWorld(board_of(self.key), task, seed, tuple(agents), self.command, self.programs)

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
