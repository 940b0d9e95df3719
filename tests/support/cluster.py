"""A cluster in this process: actors are objects, and those that a test names die."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tests.support.tiny import frozen_copy, same_bits

from kapelle import Trainer
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

    def call(self, method: str, *given: Any) -> Said:
        self.dead = self.dead or self.cluster.dies(self.number, method)
        self.cluster.asked.append((self.number, method))
        if self.dead:
            self.cluster.on_end(self.made)
            return Said(self.number, self.lost)
        try:
            answer = getattr(self.made, method)(*given)
        except Exception:
            if not self.is_dead():  # another thread may have let it die meanwhile
                raise
            return Said(self.number, self.lost)
        return Said(self.number, lambda: answer)

    def is_dead(self) -> bool:
        return self.dead

    def lost(self) -> Any:
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


class Learned(NamedTuple):
    """What is left of a run: all of it depends on whoever played and scored."""

    weights: dict[str, Any]
    rows: list[dict[str, float]]
    """Metrics of each step, without times."""
    tokens: list[tuple[int, ...]]
    """What was sampled."""
    evaluated: float | None

    def is_same(self, other: Learned) -> bool:
        """Return whether another run is the same, weights bitwise."""
        return same_bits(self.weights, other.weights) and self[1:] == other[1:]


def learned(settings: Mapping[str, Any], steps: int = 2, *, evaluates: bool = False) -> Learned:
    """Train for a few steps, and play unseen problems after them if it `evaluates`."""
    with Trainer(**settings) as trainer:
        done = list(trainer.steps(steps))
        weights = {name: frozen_copy(trainer.engine.weights(name)) for name in trainer.team.trained}
        evaluated = trainer.evaluate().tokens if evaluates else None
    rows = [{k: v for k, v in step.metrics.items() if not k.startswith("time/")} for step in done]
    episodes = [episode for step in done for group in step.groups for episode in group.episodes]
    tokens = [turn.completion_ids for episode in episodes for turn in episode.turns]
    return Learned(weights, rows, tokens, evaluated)
