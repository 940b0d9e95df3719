"""The world of an outside program: whose move it is depends on whom the program calls next."""

from __future__ import annotations

import asyncio
import json
import secrets
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from kapelle.environment import Outcome
from kapelle.environments.external.program import Program
from kapelle.environments.external.switchboard import OutsideCall, Seat, Switchboard
from kapelle.errors import EpisodeError
from kapelle.runtime.attendance import current
from kapelle.runtime.deadlines import not_begun
from kapelle.types import Task

NOTICE_S = 60.0
"""Seconds for which episodes wait for a program before it is said."""

_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
"""How many programs may still be started, by event loop."""


class ExternalWorld:
    """One episode that a program plays.

    A step hands over what agents have said to those who called them, and returns when there are further calls, or when the
    program has posted its reward. What an agent observes is the call: JSON that the workflow `external` reads.
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
        self._seat = Seat(f"e-{secrets.token_hex(8)}", task, seed, agents)
        self._command = command
        self._programs = programs
        self._program: Program | None = None
        self._begun = False
        self._calls: dict[str, OutsideCall] = {}
        self._later: deque[OutsideCall] = deque()
        """Calls of agents that are answering another one."""
        self._outcome: Outcome | None = None
        self._running: asyncio.Semaphore | None = None

    def observe(self, agent: str) -> str:
        """Return what an agent is asked, as JSON."""
        return json.dumps(self._calls[agent].asked)

    def movers(self) -> tuple[str, ...]:
        """Return the agents that are called; none when the program has posted its reward."""
        return tuple(self._calls)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Hand over answers (JSON) and wait for the program; EpisodeError when it ends without a reward."""
        for agent, answer in actions.items():
            self._seat.answered(self._calls.pop(agent), json.loads(answer))
        part = current()
        if part is not None:
            part.give_up()  # nobody waits for a program that takes its time
        if not self._begun:
            await self._begin()
        while not self._calls and self._outcome is None:
            while self._later:
                self._sort(self._later.popleft())
            if not self._calls:
                self._sort(await self._next())
            while (more := self._seat.now()) is not None:
                self._sort(more)
        return {}

    def _sort(self, what: OutsideCall | Outcome) -> None:
        if isinstance(what, Outcome):
            self._outcome = what
            self._seat.close()
        elif what.agent in self._calls:
            self._later.append(what)
        else:
            self._calls[what.agent] = what

    async def _begin(self) -> None:
        self._begun = True
        begins = not_begun()
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

    async def _next(self) -> OutsideCall | Outcome:
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
            if last is None:
                raise EpisodeError(ending.result())
            return last
        finally:
            for task in (coming, ending):
                task.cancel()
                with suppress(asyncio.CancelledError, EpisodeError):
                    await task

    def outcome(self) -> Outcome:
        """Return what the program has posted."""
        return self._outcome or Outcome(truncated=True)

    async def close(self) -> None:
        """Answer no more, and end the program."""
        self._board.withdraw(self._seat)
        try:
            if self._program is not None:
                await self._program.end()
        finally:
            if self._running is not None:
                self._running.release()
