"""What an environment server holds: environments by name, and the worlds that are played."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from kapelle.environment import (
    Alive,
    Answerable,
    Environment,
    Mixed,
    Reads,
    Recorded,
    Scripted,
    Skipping,
    WorkerLost,
    asks_questions,
    is_opposed,
    offers,
)
from kapelle.errors import did_you_mean
from kapelle.rollout.workers.pool import EnvironmentWorkers
from kapelle.rollout.workers.session import OpenSessions, WorkerSession, error_form
from kapelle.runtime.deadlines import Patience, call
from kapelle.runtime.event_loop import LoopThread
from kapelle.runtime.wire.worlds import Description
from kapelle.services.refusals import Refusal, wrong
from kapelle.settings.base import Settings
from kapelle.types import Split

T = TypeVar("T")

# -------- The shelf: environments by name, each with its version, replaced while others play the old one

SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True, slots=True)
class ShelvedEnvironment:
    """An environment on the shelf."""

    environment: Environment
    description: Description
    workers: EnvironmentWorkers | None
    """The processes in which its worlds live; None for this one."""


class Shelf:
    """Environments by name; any thread may ask."""

    def __init__(
        self, environments: Mapping[str, Environment], processes: int = 0, call_seconds: float = 600.0
    ) -> None:
        """Take the environments; each has so many `processes` for its worlds, in which a call may take `call_seconds`.

        Raises what reading their data raises, and ConfigError for an environment that another process cannot make.
        """
        self._processes, self._patience = processes, Patience(environment=call_seconds)
        self._changing = Lock()
        self.held: Mapping[str, ShelvedEnvironment] = {}
        """What is found, by name; another mapping after a change."""
        self.replaced: list[ShelvedEnvironment] = []
        """Those that are no longer found; sessions may still play them."""
        for name, environment in environments.items():
            self.put(name, environment)

    def find(self, name: str) -> ShelvedEnvironment:
        """Return an environment; an empty name means the only one. Raises Refusal for an unknown name."""
        held = self.held
        if not name and len(held) == 1:
            return next(iter(held.values()))
        if name not in held:
            message = f"This server has no environment '{name}'.{did_you_mean(name, list(held))}"
            raise Refusal(404, message, "environment", "not_found")
        return held[name]

    def put(self, name: str, environment: Environment) -> ShelvedEnvironment:
        """Add an environment or replace the one of that name; open sessions keep theirs.

        Raises Refusal if it offers less than the one that it replaces, because runs rely on that.
        """
        with self._changing:
            old = self.held.get(name)
            new = describe(name, environment, 1 if old is None else old.description.version + 1)
            if old is not None:
                had = old.description
                # What runs rely on: questions or moves, a script, a record, and tasks of their own to test on.
                kept = (
                    (had.answerable, new.answerable),
                    (not had.answerable, not new.answerable),
                    (had.scripted, new.scripted),
                    (bool(had.answers_per_task), bool(new.answers_per_task)),
                    (had.sizes["test"] is not None, new.sizes["test"] is not None),
                )
                if any(before and not after for before, after in kept):
                    raise wrong(
                        f"'{name}' offers what the environment that would replace it does not, and runs that play it rely on that. "
                        "Register it by another name."
                    )
            workers = None
            if self._processes:
                workers = EnvironmentWorkers(environment, self._processes, self._patience)
            held = ShelvedEnvironment(environment, new, workers)
            self.held = {**self.held, name: held}
            if old is not None:
                self.replaced.append(old)
            return held

    def close(self) -> None:
        """End the processes of all environments."""
        for held in (*self.held.values(), *self.replaced):
            if held.workers is not None:
                held.workers.close()


def describe(name: str, environment: Environment, version: int) -> Description:
    """Return an environment's description; raises what reading its data raises."""
    least, greatest = environment.reward_range
    members = environment.members if offers(environment, Mixed) else {}
    # Its content: class, settings without the time limit, and the files that it declares.
    settings = (
        environment.model_dump(mode="json", exclude={"timeout"}) if isinstance(environment, Settings) else {}
    )
    read = dict(environment.contents()) if isinstance(environment, Reads) else {}
    kind = type(environment)
    form = [kind.__module__, kind.__qualname__, settings, sorted(read.values())]
    content = hashlib.sha256(json.dumps(form, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return Description(
        name,
        version,
        content,
        environment.name,
        least,
        greatest,
        sources={split: environment.sources[split] for split in SPLITS},
        sizes={split: environment.size(split) for split in SPLITS},
        skipped=dict(environment.skipped()) if offers(environment, Skipping) else {},
        answerable=offers(environment, Answerable) and asks_questions(environment),
        scripted=offers(environment, Scripted),
        answers_per_task=environment.answers_per_task() if offers(environment, Recorded) else 0,
        constant_sum=is_opposed(environment),
        alive=list(environment.alive) if offers(environment, Alive) else [],
        members={part: describe(part, member, version) for part, member in members.items()},
    )


# -------- The worlds that are played


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How many worlds there may be, and how long their calls may take."""

    sessions: int = 4096
    """Open at once."""
    call_seconds: float = 600.0
    """The most that one call of a world may take."""


@dataclass
class Raised(Exception):
    """What an environment raised: its class and message."""

    form: list[str]


def leaving() -> Refusal:
    """Return the refusal of a request that arrives while the server is ending."""
    message = "The server is about to end. Call another one, or this one again later."
    return Refusal(503, message, None, "leaving")


class EnvironmentHost:
    """Environments, and the connections over which their worlds are played; worlds live on a thread of their own."""

    def __init__(self, shelf: Shelf, worlds: LoopThread, limits: SessionLimits, *, guarded: bool) -> None:
        """`guarded` says whether the server requires a token."""
        self.shelf, self.limits, self.guarded = shelf, limits, guarded
        self.worlds = worlds
        self.connections: set[OpenSessions] = set()
        """The sessions of each caller."""
        self._closing: set[Future[None]] = set()
        self.leaving = False
        """Whether new sessions are refused."""
        self.ended = False
        """Whether all requests are refused."""
        self.under_way = 0
        """Requests that are being answered."""

    @property
    def sessions(self) -> list[WorkerSession]:
        """The sessions that are open."""
        return [session for each in list(self.connections) for session in list(each.open.values())]

    async def beside(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do something in an environment, on the thread of the worlds; raises Raised for what it raises."""
        try:
            return await self.worlds.ask(work)
        except (Refusal, asyncio.CancelledError):
            raise
        except WorkerLost as lost:
            raise Refusal(410 if lost.blamed else 503, f"The world is lost: {lost}") from None
        except BaseException as error:  # noqa: BLE001 - the one boundary where what a world raises becomes an answer
            raise Raised(error_form(error)) from None

    async def now(self, name: str, method: str, work: Callable[[], T]) -> T:
        """Call a method of an environment that is not async, within the time limit; see `beside`."""
        what = f"`{method}` of environment '{name}'"

        async def done() -> T:
            return call(what, "environment", self.limits.call_seconds, work)

        return await self.beside(done)

    def let_go(self, session: WorkerSession) -> None:
        """Close a world without waiting; what it raises is dropped."""
        closing = self.worlds.begin(session.close)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for worlds to close; any thread may call it once the server has ended."""
        wait(list(self._closing), seconds)
