"""The kinds of faults, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.faults import kills
from tests.faults.world import Trial, World


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault."""

    title: str
    about: str
    trials: Callable[[World, int], Iterator[Trial]]
    missing: Callable[[], str | None] = _nothing
    """Why this machine cannot try it; None when it can."""


KINDS: Mapping[str, Fault] = {
    "kills": Fault("SIGKILL at any instant, then a resume", "all kinds of run", kills.trials),
}
