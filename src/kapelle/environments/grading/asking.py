"""Query a judge model, with a cache of its replies and limits on its requests.

The judge model is behind an endpoint or is a frozen model in the process:

    judge: {endpoint: "http://localhost:8000/v1", model: Qwen/Qwen3-32B, cache: verdicts.jsonl, budget: 20000}

Each conversation is sent once. The reply is cached in memory and, if `cache` is set, also in a file, so that a resumed run gets
the same verdicts. The cache file contains one reply per line, and new replies are appended. Several processes may share the
file.
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
"""Maximum number of replies in the memory cache. The oldest replies are removed first."""


class JudgeLimits(Settings):
    """Limits on the requests to a judge, and the settings of the cache."""

    cache: Annotated[str | None, FREE] = None
    """Path of a JSONL file that stores every reply, so that a resumed run gets the same verdicts. With null, replies are stored
    only in memory."""
    budget: Annotated[int | None, FREE] = Field(default=None, ge=1)
    """Maximum number of replies that a process may request from the judge; cached replies are not counted. The run stops when
    the limit is reached. With null, there is no limit."""
    concurrency: Annotated[int, FREE] = Field(default=16, ge=1)
    """Maximum number of concurrent requests to the judge."""


class EndpointJudge(JudgeEndpoint, JudgeLimits):
    """Settings of a judge model behind an OpenAI-compatible URL."""


class ModelJudge(JudgeLimits):
    """Settings of a frozen judge model in the process that collects episodes; the model samples greedily."""

    path: str
    """Name or path of a model, or the folder of a PEFT adapter. The judge is loaded once, separately from the models of the
    team."""
    max_tokens: int = Field(default=4096, ge=1)
    """Maximum number of tokens of one reply, including reasons and thinking."""


AnyJudge = EndpointJudge | ModelJudge


class Asking:
    """A judge whose replies are cached, counted and limited; it is called like any other judge."""

    def __init__(self, judge: AnyJudge, ask: Ask) -> None:
        """Call `ask` for replies that are not cached; raise DataError if the `cache` file cannot be read or written."""
        # Replies depend on the model and the length limit, but not on the endpoint's address.
        name = judge.path if isinstance(judge, ModelJudge) else judge.model
        self._who, self._limits, self._ask = [name, judge.max_tokens], judge, ask
        self._kept: dict[str, str] = {}
        self._file = None if judge.cache is None else Path(judge.cache).expanduser()
        if self._file is not None:
            self._read(self._file)
        self._pending: dict[str, asyncio.Future[str]] = {}
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._turns = weakref.WeakKeyDictionary()
        self.calls = 0
        """The number of requests to the judge."""
        self.cached = 0
        """The number of replies that were taken from the cache."""
        self.ungraded = 0
        """The number of replies without a readable verdict; callers increase this counter."""

    async def __call__(self, messages: Sequence[Message]) -> str:
        """Return the reply of the judge to a conversation.

        Raises TrainingHalted if the budget is used up, and EpisodeError if the judge does not reply.
        """
        request = json.dumps([self._who, conversation(messages)])
        key = hashlib.sha256(request.encode()).hexdigest()
        loop = asyncio.get_running_loop()
        while key not in self._kept:
            pending = self._pending.get(key)
            if pending is None or pending.get_loop() is not loop:
                break
            # Another caller has sent this request. If that caller is cancelled, send it again.
            resume = pause_deadline()
            await asyncio.wait([pending])
            resume()
            if not pending.cancelled() and (failed := pending.exception()) is not None:
                raise failed
        if (reply := self._kept.get(key)) is not None:
            self.cached += 1
            return reply
        future = self._pending[key] = loop.create_future()
        try:
            resume = pause_deadline()
            async with self._turns.setdefault(loop, asyncio.Semaphore(self._limits.concurrency)):
                resume()
                if self._limits.budget is not None and self.calls >= self._limits.budget:
                    raise TrainingHalted(
                        f"The judge has sent {self.calls:,} replies and has reached the limit `judge.budget`. Raise the limit and "
                        "resume the run; if `judge.cache` is set, earlier verdicts are reused."
                    )
                self.calls += 1
                reply = await self._ask(messages)
            self._keep(key, reply)
        except asyncio.CancelledError:
            future.cancel()
            raise
        except BaseException as error:
            future.set_exception(error)
            future.exception()  # marks it as retrieved, because there may be no other caller
            raise
        finally:
            del self._pending[key]
        future.set_result(reply)
        return reply

    def _keep(self, key: str, reply: str) -> None:
        self._remember(key, reply)
        if self._file is not None:
            # A single append, so that lines from several processes do not mix.
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
                    opened.write(b"\n")  # ends a line that was cut off
        except OSError as error:
            raise DataError(f"`judge.cache` '{file}' cannot be read or written: {error}.") from error
        if damaged:
            warnings.warn(
                f"Skipped {damaged} damaged lines in `judge.cache` '{file}'; their verdicts will be requested again.",
                stacklevel=2,
            )
