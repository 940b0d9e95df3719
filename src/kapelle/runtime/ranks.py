"""The interface of ranks, which are processes that run the same program on the same data and divide its work, as in `torchrun`.

Expensive work is divided among the ranks. Every rank makes the same decisions from the same data. Ranks exchange data with
`all_gather`, and sums with `add`: each rank does its share of the work, and then receives the shares of all ranks. An error or a stop
request of one rank is raised in all ranks in this call, so that no rank waits forever. The module `rank_group.py` implements this
interface for several processes; a single process uses `ALONE`.
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
"""The environment variables that describe the place of a process, which launchers such as `torchrun` set."""


class Peers:
    """The ranks from the point of view of one thread, which exchanges data with the same thread of the other ranks.

    This base class implements the case of a single process.
    """

    rank: int = 0
    """Index of this process, from 0. Rank 0 writes files and prints messages."""
    size: int = 1
    """The number of processes."""

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this rank's share of the work, and return the shares of all ranks in order.

        The argument `at` is the name of the exchange. Raises EngineError if ranks are in different exchanges, which is a bug. An
        error of one rank is raised in every rank, with the same type if the type is defined in `errors.py`. A StopRequested of one
        rank is also raised in every rank.
        """
        return [work()]


class Meeting(Peers):
    """A meeting in which processes agree on the end of a step during its rollouts. This base class is for a single process.

    A meeting is separate from the exchanges of the ranks, so that the ranks can update the weights at the same time.
    """

    def begin(self, number: int | None = None) -> int:
        """Start the step with this number (by default the next number), and return the number."""
        return 0

    def fail(self, error: BaseException) -> None:
        """Report why this process failed, so that each waiting process raises PeerFailed.

        This method must be called in the exception handler of the error.
        """

    @property
    def form(self) -> Mapping[str, Any] | None:
        """Plain values with which another process can join the meeting (`rank_group.meeting_from`), or None for a single process."""
        return None


class Ranks(Peers):
    """The ranks from the point of view of the main thread of this process."""

    def store_barrier(self) -> Peers:
        """Return an exchange for one additional thread of each rank, which can be used while the main threads do other work."""
        return self

    def meeting(self) -> Meeting:
        """Return the meeting in which the ranks, or the processes that roll out episodes for them, agree on the end of a step."""
        return Meeting()

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks in place. Shapes must be equal, and results are bitwise identical in all ranks."""

    def take_waits(self) -> dict[str, float]:
        """Return the time in seconds spent waiting for other ranks since the last call, by the name of the exchange."""
        return {}


ALONE = Ranks()
"""The ranks of a single process."""


def broadcast(ranks: Peers, at: str, work: Callable[[], Any]) -> Any:
    """Do `work` only in rank 0, and return its result in every rank. The result must consist of plain JSON values."""
    if ranks.size == 1:
        return work()
    return json.loads(ranks.all_gather(at, lambda: b"" if ranks.rank else json.dumps(work()).encode())[0])


def first_then_others(ranks: Ranks, at: str, work: Callable[[], Any]) -> Any:
    """Do `work`, which writes files, first in rank 0 and then in the other ranks, which find the files. Return the result of this rank."""
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
    """Raise ConfigError in every rank unless all ranks have the same named values as rank 0."""
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
    """The place of this process among the processes that a launcher started."""

    rank: int
    size: int
    address: str
    port: int
    local: int
    """Index of this process among the processes on its machine."""


def launched_rank(environ: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Return the place of this process, or None if there is no launcher or only a single process.

    Raises ConfigError if the environment variables are invalid.
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
