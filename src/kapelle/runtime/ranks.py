"""Ranks, as `torchrun` calls them: processes that run one program on the same data and share its work.

Heavy work is shared. Every rank makes the same decisions from the same data. Ranks exchange data in `all_gather` (and sums in `add`):
each rank does its share of the work, then all ranks have every share. An error or a stop request of one rank is raised in all
ranks at that point, so that the others do not wait. `rank_group.py` implements this for several processes; a single process uses `ALONE`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kapelle.errors import ConfigError
from kapelle.runtime.on_demand import Tensor

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables of a process's place, which launchers such as `torchrun` set."""


class Peers:
    """The ranks for one thread of this process, which exchanges data with the same thread of the other ranks.

    An object of this class belongs to a single process.
    """

    rank: int = 0
    """Number of this process from 0; rank 0 writes files and prints."""
    size: int = 1
    """Number of processes."""

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this rank's share of the work and return all shares, by rank.

        `at` names the exchange; ranks at different exchanges are a defect and raise EngineError. An error of one rank is raised in
        every rank, with the same type if it is one of `errors.py`, and so is StopRequested.
        """
        return [work()]


class Meeting(Peers):
    """An agreement of processes in the middle of the rollouts of a step; this one is for a single process.

    It is separate from the exchanges of the ranks, so that the ranks can update meanwhile.
    """

    def begin(self, number: int | None = None) -> int:
        """Begin the step of this number, by default the next one; return the number."""
        return 0

    def fail(self, error: BaseException) -> None:
        """Report why this process fails: each waiting process raises PeerFailed. Call it in the handler of the error."""

    @property
    def form(self) -> Mapping[str, Any] | None:
        """Plain values from which another process can take this place (`rank_group.meeting_from`); None for a single process."""
        return None


class Ranks(Peers):
    """The ranks for the main thread of this process."""

    def store_barrier(self) -> Peers:
        """Return the exchange for one additional thread of each rank, while the main threads do other work."""
        return self

    def meeting(self) -> Meeting:
        """Return the agreement of the ranks, or of the processes that roll out for them, in a step."""
        return Meeting()

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks, in place; shapes must be equal, and results are bitwise identical."""

    def take_waits(self) -> dict[str, float]:
        """Return the seconds of waiting for other ranks since the last call, by the name of the exchange."""
        return {}


ALONE = Ranks()
"""The ranks of a single process."""


def broadcast(ranks: Peers, at: str, work: Callable[[], Any]) -> Any:
    """Let only rank 0 do `work`, and return its result, plain JSON, in every rank."""
    if ranks.size == 1:
        return work()
    return json.loads(ranks.all_gather(at, lambda: b"" if ranks.rank else json.dumps(work()).encode())[0])


def first_then_others(ranks: Ranks, at: str, work: Callable[[], Any]) -> Any:
    """Let rank 0 do `work`, which writes files, then the others, which find the files; return this rank's result."""
    if ranks.size == 1:
        return work()
    done: list[Any] = []

    def share() -> bytes:
        done.append(work())
        return b""

    ranks.all_gather(at, lambda: b"" if ranks.rank else share())
    ranks.all_gather(at, lambda: share() if ranks.rank else b"")
    return done[0]


def check_same(ranks: Ranks, at: str, own: Mapping[str, Any]) -> None:
    """Raise ConfigError in every rank unless all ranks have the values of rank 0, by name."""
    if ranks.size == 1:
        return
    every = [json.loads(each) for each in ranks.all_gather(at, lambda: json.dumps(own).encode())]
    for rank, found in enumerate(every):
        names = sorted(name for name in {*every[0], *found} if every[0].get(name) != found.get(name))
        if names:
            shown = "; ".join(
                f"{name} is {found.get(name)!r} there and {every[0].get(name)!r} on rank 0"
                for name in names[:3]
            )
            more = f", and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(
                f"Rank {rank} differs from rank 0: {shown}{more}. Start every process with the same command, the "
                "same files and the same versions."
            )


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """The place of this process among those of a launcher."""

    rank: int
    size: int
    address: str
    port: int
    local: int
    """Number of this process on its machine."""


def launched_rank(environ: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Return the place of this process; None without a launcher, or for a single process.

    Raises ConfigError for an invalid place.
    """
    given = {name: environ[name] for name in VARIABLES if name in environ}
    if len(given) < len(VARIABLES):
        return None
    try:
        rank, size, port = (int(given[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local = int(environ.get("LOCAL_RANK", rank))
    except ValueError:
        rank, size, port, local = 0, 0, 0, 0
    if not 0 <= rank < size:
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(
            f"The launcher's variables are invalid: {shown}. RANK counts from 0 to WORLD_SIZE - 1. Start the processes with "
            "`torchrun`, or unset these variables for a single process."
        )
    return LaunchedRank(rank, size, given["MASTER_ADDR"], port, local) if size > 1 else None
