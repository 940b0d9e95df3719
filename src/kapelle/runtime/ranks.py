"""Processes that run one program on the same data and share its work: *ranks*, as `torchrun` calls them.

Heavy work is shared. Decisions are made by every rank for itself, from the same data, so that they are the same. Ranks
exchange data in `all_gather` (and sums in `add`): each does its share of the work, then all hold every share. Whatever prevents
one rank from doing its share (an error, a request to stop) is raised in all of them at that point, so that the others do not
wait for it. `rank_group.py` has the processes; a program that is one process has `ALONE`.
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
"""The environment variables by which a launcher tells each process its place, as `torchrun` does."""


class Peers:
    """This process among the ranks, as seen by one of its threads, which exchanges data with the same thread of the others.

    An object of this class is that of a program that is one process.
    """

    rank: int = 0
    """Number of this process, from 0; rank 0 writes files and prints."""
    size: int = 1
    """Number of processes."""

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        """Do this rank's share of something and return all shares, by rank.

        `at` names the exchange; ranks that come to different ones are a defect, and raise EngineError. An error of one rank
        is raised in every rank, of the same type where it is one of `errors.py`; so is StopRequested.
        """
        return [work()]


class Meeting(Peers):
    """Where processes that each play a part of one step agree in the middle of it; that of a single process.

    It is apart from the exchanges of the ranks, so that the ranks can learn meanwhile.
    """

    def begin(self, number: int | None = None) -> int:
        """Begin with a part, of the play of this number, by default the one after the last; return the number."""
        return 0

    def fail(self, error: BaseException) -> None:
        """Tell the others why this one does not come: each that waits raises PeerFailed. Called where it was caught."""

    @property
    def form(self) -> Mapping[str, Any] | None:
        """Plain values by which another process takes this place (`rank_group.meeting_from`); None for one alone."""
        return None


class Ranks(Peers):
    """This process among the ranks, as seen by its main thread."""

    def store_barrier(self) -> Peers:
        """Return the exchange for another thread of each rank, one at a time, while the main threads do other work."""
        return self

    def meeting(self) -> Meeting:
        """Return where the ranks, or processes that play for them, agree while they play a step."""
        return Meeting()

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks, in place; every rank gives tensors of the same shapes, and gets the same bits."""

    def take_waits(self) -> dict[str, float]:
        """Return the seconds for which this rank has waited for others since the last call, by the name of the exchange."""
        return {}


ALONE = Ranks()
"""A program that is one process."""


def broadcast(ranks: Peers, at: str, work: Callable[[], Any]) -> Any:
    """Let rank 0 alone do `work`, and return in every rank what it returned: plain JSON."""
    if ranks.size == 1:
        return work()
    return json.loads(ranks.all_gather(at, lambda: b"" if ranks.rank else json.dumps(work()).encode())[0])


def first_then_others(ranks: Ranks, at: str, work: Callable[[], Any]) -> Any:
    """Let rank 0 do `work`, which writes files, then the others, which find the files; return this rank's own result."""
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
    """Raise ConfigError in every rank unless the values of all ranks, by name, are those of rank 0."""
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
                f"Rank {rank} does not run what rank 0 runs: {shown}{more}. Start every process with the same command, the "
                "same files and the same versions."
            )


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """The place of this process among those that a launcher has started."""

    rank: int
    size: int
    address: str
    port: int
    local: int
    """Number of this process on its machine."""


def launched_rank(environ: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Return the place that the launcher gave this process; None without one, or where it is alone.

    Raises ConfigError for a place that makes no sense.
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
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(
            f"The launcher's variables make no sense: {said}. RANK counts from 0 to WORLD_SIZE - 1. Start the processes with "
            "`torchrun`, or unset these variables to run alone."
        )
    return LaunchedRank(rank, size, given["MASTER_ADDR"], port, local) if size > 1 else None
