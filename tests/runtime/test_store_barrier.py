"""Threads of several ranks meet by the store, and an error or end of one reaches all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # no stub names it

from kapelle.errors import CheckpointError, EngineError
from kapelle.runtime.rank_group import Heartbeat, StoreBarrier


@dataclass
class Roll:
    rank: int
    size: int = 3
    failed: tuple[int, str] | None = None

    def failure(self) -> tuple[int, str] | None:
        return self.failed


def barriers(store: Any, seconds: float = 60.0, **over: Any) -> list[StoreBarrier]:
    return [StoreBarrier(store, cast("Heartbeat", Roll(rank, **over)), seconds) for rank in range(3)]


def meet(every: list[StoreBarrier], at: str, work: Callable[[int], bytes]) -> list[Any]:
    def one(barrier: StoreBarrier) -> Any:
        try:
            return barrier.all_gather(at, lambda: work(barrier.rank))
        except (CheckpointError, EngineError) as error:
            return error

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(one, every))


def fails_in_the_second(rank: int) -> bytes:
    if rank == 1:
        raise CheckpointError("the disk is full")
    return b"written"


def test_all_ranks_get_all_shares_and_leave_no_keys() -> None:
    store = HashStore()
    every = barriers(store)
    for turn in range(4):
        shares = [bytes([turn, rank]) * (rank * 1000) + b"\n{}\n" for rank in range(3)]
        assert meet(every, "parts", lambda rank: shares[rank]) == [shares] * 3  # noqa: B023 - called at once
    assert store.num_keys() <= 6


def test_an_error_of_one_rank_is_raised_in_all_and_they_continue() -> None:
    every = barriers(HashStore())
    for error in meet(every, "parts", fails_in_the_second):
        assert isinstance(error, CheckpointError)
        assert str(error) == "Rank 1: the disk is full"
    assert meet(every, "seal", lambda rank: b"x") == [[b"x"] * 3] * 3


def test_a_wait_for_an_ended_rank_reports_why() -> None:
    alone = barriers(HashStore(), failed=(2, "it was killed"))[0]
    with pytest.raises(EngineError, match=r"Rank 2 is gone: it was killed\. Resume the run"):
        alone.all_gather("parts", bytes)


def test_every_wait_is_bounded() -> None:
    with pytest.raises(EngineError, match="Not all ranks reached 'parts'"):
        barriers(HashStore(), 0.05)[0].all_gather("parts", bytes)
