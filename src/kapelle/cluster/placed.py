"""Where the actors of a run are placed, as the driver tells each rank."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

VARIABLE = "KAPELLE_RAY"
"""Of the environment of a rank that Ray has placed."""


@dataclass(frozen=True, slots=True)
class Placed:
    """What one rank may start actors on."""

    address: str
    namespace: str
    group: str
    """Name of the placement group."""
    rollout: tuple[int, ...]
    """Bundles of the rollout workers that play for this rank."""

    def variable(self) -> dict[str, str]:
        """Return it as a variable of the rank's environment."""
        return {VARIABLE: json.dumps(asdict(self))}


def placed_here(environ: Mapping[str, str] = os.environ) -> Placed | None:
    """Return where this rank may start actors; None for a process that Ray has not placed."""
    if VARIABLE not in environ:
        return None
    said = json.loads(environ[VARIABLE])
    return Placed(said["address"], said["namespace"], said["group"], tuple(said["rollout"]))


def dealt(count: int, first: int, ranks: int) -> list[tuple[int, ...]]:
    """Return the bundles of `count` workers, numbered from `first`, in turn for each of `ranks`."""
    return [tuple(range(first + rank, first + count, ranks)) for rank in range(ranks)]
