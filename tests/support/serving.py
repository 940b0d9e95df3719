"""What tests of served teams share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kapelle.algorithm import Data
from kapelle.engines.rollout.protocol import Completion, OnTokens, Recites, Request, ServesCallers
from kapelle.engines.rollout.scripted import ByteRenderer
from kapelle.environments.external import External
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.event_loop import run_async
from kapelle.services.policy.outside import serve_outside
from kapelle.training.observer import Silent
from kapelle.types import Episode, FinishReason, Task
from kapelle.workflows.external import ExternalWorkflow


def address_in(line: str) -> str:
    """Return the address in what a server says when it begins to serve."""
    return next(word for word in line.split() if word.startswith("http")).rstrip(";,.")


class Watching(Silent):
    """Learns where outside programs call."""

    url = ""

    def __init__(self) -> None:
        self.said: list[str] = []
        """What was said of programs."""

    def phase(self, name: str, detail: str) -> None:
        if name == "serving":
            self.url = address_in(detail)
        if name == "program":
            self.said.append(detail)


class SpokenBytes(ByteRenderer):
    """Bytes as tokens, which are read while they come."""

    def spoken(self, ids: Sequence[int]) -> str:
        return self.decode(ids)


class Reciting(ServesCallers, Recites):
    """An engine that says what it is told to, three tokens at a time, and keeps what it was asked."""

    def __init__(
        self,
        script: Callable[[Request], str],
        begin: Callable[[Request], Awaitable[object]] | None = None,
        is_cut: Callable[[Request], bool] = lambda _: False,
    ) -> None:
        """Answer by a script; an answer waits for `begin` first, and has no end where it `is_cut`."""
        self._script, self._begin, self._is_cut = script, begin, is_cut
        self.asked: list[Request] = []
        self.broken_off: list[Request] = []

    policies: Sequence[str] = ()

    def renderer(self, policy: str) -> SpokenBytes:
        return SpokenBytes()

    async def generate(self, request: Request) -> Completion:
        return await self.stream(request, None)

    async def stream(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        self.asked.append(request)
        try:
            if self._begin is not None:
                await self._begin(request)
            ids = self.renderer(request.policy).completion(self._script(request))
            for start in range(0, max(0, len(ids) - 4), 3):
                if on_tokens is None:
                    break
                on_tokens(ids[start : start + 3], (0.0,) * len(ids[start : start + 3]))
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.broken_off.append(request)
            raise
        text = bytes(ids).decode("utf-8", "replace")
        ended: FinishReason = "length" if self._is_cut(request) else "stop"
        return Completion(tuple(ids), (0.0,) * len(ids), ended, text, 0, "recited")

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None: ...

    def release_caches(self) -> None: ...

    def close(self) -> None: ...


class Stage:
    """Episodes that outside programs play with an engine in place of a trained team."""

    def __init__(self, timeout: float) -> None:
        self.url = ""
        self.timeout = timeout
        """Seconds after which the episodes themselves give a program up."""
        self.said: list[str] = []
        """What was said of programs."""
        self.episodes: list[Episode] = []
        self.thread: threading.Thread | None = None

    def wait(self) -> list[Episode]:
        """Return the episodes when all are over."""
        assert self.thread is not None
        self.thread.join(max(60.0, self.timeout + 10.0))
        assert not self.thread.is_alive(), "an episode goes on"
        return self.episodes


@contextmanager
def staged(
    setup: RolloutSetup,
    engine: Reciting,
    count: int = 1,
    timeout: float = 60.0,
    group: int = 1,
    **more: object,
) -> Iterator[Stage]:
    """Play `count` tasks with outside programs, `group` episodes of each, in a thread of their own."""
    environment = External.model_validate({"port": 0, **more})
    patience = replace(setup.patience, environment=timeout)
    outside = replace(
        setup,
        environment=environment,
        workflow=ExternalWorkflow(),
        engine=engine,
        patience=patience,
        data=Data(),
    )
    stage = Stage(timeout)

    def say(name: str, line: str) -> None:
        if name == "serving":
            stage.url = address_in(line)
        else:
            stage.said.append(line)

    tasks: list[Task] = [environment.task("train", index) for index in range(count)]

    def perform() -> None:
        groups = run_async(lambda: rollout(outside, tasks, group, 0))
        stage.episodes = [episode for group in groups for episode in group.episodes]

    with serve_outside(environment, outside, say):
        stage.thread = threading.Thread(target=perform, daemon=True)
        stage.thread.start()
        yield stage
        stage.wait()
