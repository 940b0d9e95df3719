"""Ranks exchange shares, errors and stop requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from tests.support.ranks import Raised, free_port, run_ranks

from kapelle.errors import NumericsError
from kapelle.runtime.interrupts import StopRequested, catch_interrupts, stop_if_requested
from kapelle.runtime.rank_group import RankGroup, ranks_here
from kapelle.runtime.ranks import LaunchedRank, Ranks, check_same


@pytest.fixture
def group() -> Iterator[RankGroup]:
    made = RankGroup(LaunchedRank(0, 1, "127.0.0.1", free_port(), 0), 30.0)
    yield made
    made.leave()


def test_exchanges_return_shares_and_sums(group: RankGroup) -> None:
    assert group.all_gather("here", lambda: b"\x00 mine") == [b"\x00 mine"]
    assert group.all_gather("here", bytes) == [b""]
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(2, dtype=torch.float64)]
    group.add(tensors)
    assert torch.equal(tensors[0], torch.arange(6.0).view(2, 3))


def test_a_stop_waits_until_the_ranks_meet(group: RankGroup) -> None:
    with catch_interrupts() as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        stop_if_requested()  # what all decide alike is not broken off by one
        with pytest.raises(StopRequested):
            group.all_gather("a share", share)
        with pytest.raises(StopRequested):
            stop_if_requested()
        assert stopped.exit_code == 143


def share() -> bytes:
    stop_if_requested()
    return b""


def meetings() -> list[object]:
    """Exchanges with and without errors in one pair of processes."""
    ranks = ranks_here(60.0)
    found: list[object] = [
        ranks.all_gather("a", lambda: f"from {ranks.rank}".encode() * (1 + 5 * ranks.rank))
    ]
    ones = [torch.full((3,), float(ranks.rank + 1)), torch.full((2, 2), 10.0)]
    ranks.add(ones)
    found.append([each.flatten().tolist() for each in ones])
    for attempt in (_one_fails, _one_stops, lambda r: check_same(r, "start", {"`seed`": r.rank}), _apart):
        try:
            attempt(ranks)
        except BaseException as error:  # noqa: BLE001 - what is looked at
            found.append(f"{type(error).__name__}: {error}")
    with catch_interrupts() as stopped:
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        stop_if_requested()
        ranks.all_gather("b", bytes)
        found.append(stopped.exit_code)
    return found


OTHER = (
    "ConfigError: Rank 1 differs from rank 0: `seed` is 1 there and 0 on rank 0. Start every process with the "
    "same command, the same files and the same versions."
)
APART = (
    "EngineError: The ranks are at different exchanges: rank 0 at 'place 0', rank 1 at 'place 1'. Please report this defect, with the "
    "recipe."
)


def _one_fails(ranks: Ranks) -> None:
    def work() -> bytes:
        if ranks.rank == 1:
            raise NumericsError("a loss is not finite")
        return b""

    ranks.all_gather("update", work)


def _one_stops(ranks: Ranks) -> None:
    def work() -> bytes:
        if ranks.rank == 0:
            raise StopRequested
        return b""

    ranks.all_gather("rollout", work)


def _apart(ranks: Ranks) -> None:
    ranks.all_gather(f"place {ranks.rank}", bytes)


@pytest.mark.slow
def test_two_processes_meet() -> None:
    first, second = run_ranks(2, meetings)
    assert first == second
    assert first == [
        [b"from 0", b"from 1" * 6],
        [[3.0] * 3, [20.0] * 4],
        "NumericsError: Rank 1: a loss is not finite",
        "StopRequested: ",
        OTHER,
        APART,
        130,
    ]


def one_is_lost() -> object:
    ranks = ranks_here(60.0)
    ranks.all_gather("a", bytes)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ranks.all_gather("b", bytes)


@pytest.mark.slow
def test_a_killed_rank_is_named() -> None:
    first, second = run_ranks(2, one_is_lost)
    assert second == Raised("it died")
    assert isinstance(first, Raised)
    assert first.startswith("EngineError: Rank 1 is gone: it ended")


def one_never_joins() -> object:
    if os.environ["RANK"] == "1":
        return None
    return ranks_here(1.0)


@pytest.mark.slow
def test_a_rank_that_never_joins_is_named() -> None:
    first, _ = run_ranks(2, one_never_joins)
    assert "1 of 2 processes have not joined: rank 1." in first
