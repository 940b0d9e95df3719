"""Worlds that live in another process, here or on another machine, as they are seen from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kapelle import errors
from kapelle.environments.bounded_worlds import BoundedWorld
from kapelle.errors import KapelleError
from kapelle.runtime.deadlines import GaveUp, Patience


def error_from(form: list[str]) -> BaseException:
    """Return an error that has the name and the message (the two items of `form`) of the one that was passed on.

    Those that mean something here (an engine that failed, a call that was given up) are of the same class again.
    """
    name, message = form
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, KapelleError):
        same: KapelleError = known(message)
        return same
    if name == KeyboardInterrupt.__name__:
        return KeyboardInterrupt(message)
    if name == GaveUp.__name__:
        return GaveUp(message)
    of_that_name: type[ElsewhereError] = type(name, (ElsewhereError,), {"__module__": __name__})
    return of_that_name(message)


class ElsewhereError(Exception):
    """An error of an environment's own in another process; its class has the other one's name."""


class WorkerLost(Exception):
    """The process or the server that held a world is gone, and the world with it."""

    def __init__(self, how: str, *, blamed: bool) -> None:
        """Keep how it ended, and whether this world was at work when it did."""
        super().__init__(how)
        self.blamed = blamed


class View:
    """All that may be asked of a world without waiting: who may move and what each agent sees; it comes with each answer."""

    def __init__(self) -> None:
        self._movers: Mapping[str, Any] = {}
        self._shown: dict[str, Mapping[str, Any]] = {}

    def take(self, view: Mapping[str, Any]) -> None:
        """Take what has changed: `movers`, and `shown` by agent, each a `value` or the `error` that asking would raise."""
        self._movers = view["movers"]
        self._shown.update(view["shown"])

    def observe(self, agent: str) -> str:
        """Return what an agent sees, or raise what the environment raised."""
        return str(_value(self._shown[agent]))

    def movers(self) -> tuple[str, ...]:
        """Return who may move, or raise what the environment raised."""
        movers: tuple[str, ...] = _value(self._movers)
        return movers


def _value(asked: Mapping[str, Any]) -> Any:
    if "error" in asked:
        raise error_from(asked["error"])
    return asked["value"]


class ElsewhereWorld(BoundedWorld):
    """A world in another process. What may be asked of it without waiting came with its last answer."""

    def __init__(self, name: str, patience: Patience) -> None:
        """See `BoundedWorld`."""
        super().__init__(name, patience)
        self._view = View()
        self._scorable = False

    @property
    def scorable(self) -> bool:
        """See `BoundedWorld`."""
        return self._scorable

    @property
    def lost(self) -> WorkerLost | None:
        """How the world was lost with its process; None while that lives."""
        return None

    def observe(self, agent: str) -> str:
        """See `environment.World`."""
        return self._view.observe(agent)

    def movers(self) -> tuple[str, ...]:
        """See `environment.World`."""
        return self._view.movers()


_listeners: list[Callable[[str], None]] = []


@contextmanager
def told_of_changes(listen: Callable[[str], None]) -> Iterator[None]:
    """Be told, while the block runs, when a server plays another environment than before."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)


def changed(said: str) -> None:
    """Tell whoever listens that a server plays another environment than before."""
    for listen in tuple(_listeners):
        listen(said)


def lost_with(world: BoundedWorld | None) -> WorkerLost | None:
    """Return how a world was lost with its process; None for one that was not."""
    return world.lost if isinstance(world, ElsewhereWorld) else None
