"""Heartbeats of ranks, and the first reason of a failure."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]

from kapelle.runtime import rank_group
from kapelle.runtime.rank_group import Heartbeat


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    monkeypatch.setattr(rank_group, "SOON", 0.3)
    monkeypatch.setattr(rank_group, "BEAT", 0.05)
    store = HashStore()
    return [Heartbeat(store, rank, 3) for rank in range(3)]


def test_the_first_reason_stays(calls: list[Heartbeat]) -> None:
    assert calls[0].failure() is None
    calls[1].end("no memory")
    calls[2].end("lost the others")
    assert [call.failure() for call in calls] == [(1, "no memory")] * 3
    assert calls[0].why_lost() == (1, "no memory")


def test_a_silent_process_is_lost(calls: list[Heartbeat]) -> None:
    calls[0].begin()
    calls[2].begin()
    rank, why = calls[0].why_lost()
    calls[0].end()
    calls[2].end()
    assert rank == 1
    assert why.startswith("it ended")


def test_one_of_all_prints(calls: list[Heartbeat]) -> None:
    answer: list[int] = []
    calls[1].print_once(lambda: answer.append(1))
    calls[0].print_once(lambda: answer.append(0))
    calls[2].print_once(lambda: answer.append(2), after_others=True)
    assert answer == [1]


class Stopped:
    """A store whose process is stopped: no call returns."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.asked = 0

    def set_timeout(self, _limit: object) -> None:
        """Accept a limit and ignore it."""

    def add(self, *_asked: object) -> int:
        self.asked += 1
        self.goes_on.wait()
        return 1

    check = get = compare_set = add


class Broken(Stopped):
    """A store whose process has ended."""

    def add(self, *_asked: object) -> int:
        self.asked += 1
        raise DistNetworkError("Broken pipe")

    check = get = compare_set = add


def test_a_lost_store_is_queried_once(calls: list[Heartbeat]) -> None:
    store = Broken()
    call = Heartbeat(store, 1, 2)
    assert call.why_lost() == (0, rank_group.STORE_GONE)
    call.end("lost the others")
    assert store.asked == 1  # torch prints a page for every other time
