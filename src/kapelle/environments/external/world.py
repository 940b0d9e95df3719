"""The world of an outside program: whose move it is depends on whom the program calls next."""

from __future__ import annotations

import asyncio
import json
import secrets
import weakref
from collections.abc import Mapping
from contextlib import suppress

from kapelle.environment import Outcome
from kapelle.environments.external.program import Program
from kapelle.environments.external.switchboard import News, OutsideCall, Seat, Switchboard
from kapelle.errors import EpisodeError
from kapelle.runtime.attendance import current
from kapelle.runtime.deadlines import not_begun, stand_in_line
from kapelle.types import Task

NOTICE_S = 60.0
"""Seconds for which episodes wait for a program before it is said."""

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
        self._seat = Seat(f"e-{secrets.token_hex(8)}", task, seed, agents)
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
        """Return an agent's new calls with their numbers, and the numbers of those that nobody waits for any more."""
        calls = [
            [number, self._open[number].asked] for number in self._new if self._open[number].agent == agent
        ]
        return json.dumps(
            {"calls": calls, "gone": [call.number for call in self._gone if call.agent == agent]}
        )

    def movers(self) -> tuple[str, ...]:
        """Return the agents that have news; none when the program has posted its reward."""
        if self._outcome is not None:
            return ()
        news = [*(self._open[number] for number in self._new), *self._gone]
        return tuple(dict.fromkeys(call.agent for call in news))

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Answer calls, or without actions wait for the program; EpisodeError when it ends without a reward."""
        if actions:
            for answer in actions.values():
                number, said = json.loads(answer)
                if (call := self._open.pop(number, None)) is not None:
                    self._seat.answered(call, said)
            self._seat.wake()
            return {}
        part = current()
        if part is not None:
            part.give_up()  # nobody waits for a program that takes its time
        self._new, self._gone = [], []
        if not self._begun:
            await self._begin()
        while not (self._new or self._gone or self._outcome):
            # A program that waits for our answers is not late.
            go_on = stand_in_line() if self._open else None
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
        """Answer no more, and end the program."""
        self._board.withdraw(self._seat)
        try:
            if self._program is not None:
                await self._program.end()
        finally:
            if self._running is not None:
                self._running.release()
