"""A cluster in this process: actors are objects, and those that a test names die."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kapelle.cluster.actors import ActorLost

Dies = Callable[[int, str], bool]
"""Number of an actor, and what it is asked → whether it dies."""


class Said:
    """A question to a fake actor, answered at once."""

    def __init__(self, number: int, given: Callable[[], Any]) -> None:
        self.number, self.given = number, given

    def answer(self) -> Any:
        return self.given()


class Fake:
    """An actor in this process."""

    def __init__(self, number: int, kind: type, cluster: Cluster) -> None:
        self.number, self.made, self.cluster = number, kind(), cluster
        self.dead = False

    def ask(self, method: str, *given: Any) -> Said:
        self.dead = self.dead or self.cluster.dies(self.number, method)
        self.cluster.asked.append((self.number, method))
        if self.dead:
            self.cluster.on_end(self.made)
            return Said(self.number, self._lost)
        try:
            answer = getattr(self.made, method)(*given)
        except Exception:
            if not self._is_dead():  # another thread may have let it die meanwhile
                raise
            return Said(self.number, self._lost)
        return Said(self.number, lambda: answer)

    def _is_dead(self) -> bool:
        return self.dead

    def _lost(self) -> Any:
        raise ActorLost("it was killed")

    def end(self) -> None:
        self.cluster.ended.append(self.number)
        self.cluster.on_end(self.made)


class Cluster:
    """A cluster in this process; actors are numbered from 0 in the order in which they are started."""

    def __init__(self, dies: Dies = lambda *_: False, on_end: Callable[[Any], None] = lambda _: None) -> None:
        """`on_end` does what the end of an actor's process does."""
        self.dies, self.on_end = dies, on_end
        self.asked: list[tuple[int, str]] = []
        self.ended: list[int] = []
        self.started = 0
        self.left = False
        self.named: dict[str, Fake] = {}

    def join(self, *_: str) -> Cluster:
        return self

    def of_actor(self, _group: str) -> Cluster:
        return self

    def actor(
        self, kind: type, _bundle: int, _resources: object, calls: int = 1, name: str | None = None
    ) -> Fake:
        if name in self.named and not self.named[name].dead:
            return self.named[name]
        self.started += 1
        made = Fake(self.started - 1, kind, self)
        self.named |= {} if name is None else {name: made}
        return made

    def store(self, data: bytes) -> bytes:
        return data

    def fetch(self, data: bytes) -> bytes:
        return data

    def leave(self) -> None:
        self.left = True
