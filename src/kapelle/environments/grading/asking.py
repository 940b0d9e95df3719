"""Whom a judge asks: a model behind an endpoint, or a frozen one in this process. Replies are kept, counted and limited.

    judge: {endpoint: "http://localhost:8000/v1", model: Qwen/Qwen3-32B, cache: verdicts.jsonl, budget: 20000}

The same conversation is asked once: its reply is kept in memory, and with `cache` in a file, so that a resumed run repeats its
verdicts. The file is only ever appended to, a reply a line, and several processes may share it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from kapelle.environments.grading.judge import Ask, JudgeEndpoint
from kapelle.errors import DataError, TrainingHalted
from kapelle.runtime.deadlines import pause_deadline
from kapelle.settings.base import FREE, Settings
from kapelle.types import Message, conversation

MOST_KEPT = 65_536
"""Replies that are kept in memory; beyond it the oldest are forgotten."""


class JudgeLimits(Settings):
    """How often a judge is asked."""

    cache: Annotated[str | None, FREE] = None
    """A JSONL file that keeps every reply, so that a resumed run repeats its verdicts; null keeps them in memory alone."""
    budget: Annotated[int | None, FREE] = Field(default=None, ge=1)
    """Most replies that a process asks for, from its start; kept ones are free. Then the run stops with that reason; null sets none."""
    concurrency: Annotated[int, FREE] = Field(default=16, ge=1)
    """Replies that are waited for at once."""


class EndpointJudge(JudgeEndpoint, JudgeLimits):
    """A judging model behind an OpenAI-compatible URL."""


class ModelJudge(JudgeLimits):
    """A frozen model in the process that plays, which answers greedily."""

    path: str
    """A model, or the folder of an adapter (PEFT); it is loaded once, apart from the team's models."""
    max_tokens: int = Field(default=4096, ge=1)
    """Most tokens of one verdict with its reasons and thoughts."""


AnyJudge = EndpointJudge | ModelJudge


class Asking:
    """A judge whose replies are kept, counted and limited; it is called like any other."""

    def __init__(self, judge: AnyJudge, ask: Ask) -> None:
        """Ask `ask` for what is not kept; DataError for a `cache` that cannot be read or written."""
        # An endpoint may move; the model behind it, and how long its replies may be, decide what they are.
        name = judge.path if isinstance(judge, ModelJudge) else judge.model
        self._who, self._limits, self._ask = [name, judge.max_tokens], judge, ask
        self._kept: dict[str, str] = {}
        self._file = None if judge.cache is None else Path(judge.cache).expanduser()
        if self._file is not None:
            self._read(self._file)
        self._waited: dict[str, asyncio.Future[str]] = {}
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._turns = weakref.WeakKeyDictionary()
        self.calls = 0
        """Replies that were asked for."""
        self.cached = 0
        """Replies that were kept already."""
        self.ungraded = 0
        """Verdicts that were not in the form asked for, as whoever reads them says."""

    async def __call__(self, messages: Sequence[Message]) -> str:
        """Return the reply to a conversation; TrainingHalted where the budget is spent, EpisodeError where there is no reply."""
        told = json.dumps([self._who, conversation(messages)])
        key = hashlib.sha256(told.encode()).hexdigest()
        loop = asyncio.get_running_loop()
        while key not in self._kept:
            asked = self._waited.get(key)
            if asked is None or asked.get_loop() is not loop:
                break
            # Somebody else waits for this reply. Where they are cancelled, it is asked for again.
            go_on = pause_deadline()
            await asyncio.wait([asked])
            go_on()
            if not asked.cancelled() and (failed := asked.exception()) is not None:
                raise failed
        if (reply := self._kept.get(key)) is not None:
            self.cached += 1
            return reply
        waited = self._waited[key] = loop.create_future()
        try:
            go_on = pause_deadline()
            async with self._turns.setdefault(loop, asyncio.Semaphore(self._limits.concurrency)):
                go_on()
                if self._limits.budget is not None and self.calls >= self._limits.budget:
                    raise TrainingHalted(
                        f"The judge has been asked {self.calls:,} times, as often as `judge.budget` allows. Raise it and "
                        "resume the run; with `judge.cache` no verdict is asked for twice."
                    )
                self.calls += 1
                reply = await self._ask(messages)
            self._keep(key, reply)
        except asyncio.CancelledError:
            waited.cancel()
            raise
        except BaseException as error:
            waited.set_exception(error)
            waited.exception()  # it is raised here: nobody else need look
            raise
        finally:
            del self._waited[key]
        waited.set_result(reply)
        return reply

    def _keep(self, key: str, reply: str) -> None:
        self._remember(key, reply)
        if self._file is not None:
            # One write to the end of the file, so that lines of several processes stay whole.
            line = json.dumps({"key": key, "reply": reply}) + "\n"
            place = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(place, line.encode())
            finally:
                os.close(place)

    def _remember(self, key: str, reply: str) -> None:
        self._kept[key] = reply
        while len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def _read(self, file: Path) -> None:
        damaged = 0
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a+b") as opened:
                opened.seek(0)
                last = b"\n"
                for last in opened:
                    try:
                        row = json.loads(last)
                        key, reply = row["key"], row["reply"]
                    except (ValueError, KeyError, TypeError, RecursionError):
                        damaged += 1
                        continue
                    if isinstance(key, str) and isinstance(reply, str):
                        self._remember(key, reply)
                    else:
                        damaged += 1
                if not last.endswith(b"\n"):
                    opened.write(b"\n")  # a line that was cut off ends here, and the next one is whole
        except OSError as error:
            raise DataError(f"`judge.cache` '{file}' cannot be read and written: {error}.") from error
        if damaged:
            warnings.warn(
                f"{damaged} damaged lines of `judge.cache` '{file}' are passed over; their verdicts are asked for again.",
                stacklevel=2,
            )
