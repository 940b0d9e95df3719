"""Processes that collect one step agree over a store, also after restarts, and receive failures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kapelle.errors import EngineError, PeerFailed
from kapelle.runtime.interrupts import StopRequested
from kapelle.runtime.rank_group import StoreMeeting, meeting_from, own_store


@pytest.fixture
def form() -> Iterator[dict[str, Any]]:
    """The settings of three members; the store lives as long as the test."""
    store, where = own_store("127.0.0.1")
    yield {**where, "size": 3}
    del store


def at(form: dict[str, Any], rank: int) -> StoreMeeting:
    return meeting_from({**form, "rank": rank})


def met(meetings: list[StoreMeeting], number: int, places: int) -> list[list[list[bytes]]]:
    """Let all members meet in turn, and return what each received."""

    def one(meeting: StoreMeeting) -> list[list[bytes]]:
        meeting.begin(number)
        return [
            meeting.all_gather("here", f"{number}.{place} of {meeting.rank}".encode)
            for place in range(places)
        ]

    with ThreadPoolExecutor() as threads:
        return list(threads.map(one, meetings))


def said(number: int, places: int) -> list[list[bytes]]:
    return [[f"{number}.{place} of {rank}".encode() for rank in range(3)] for place in range(places)]


def test_everyone_receives_all_values_in_order_also_after_a_restart(form: dict[str, Any]) -> None:
    meetings = [at(form, rank) for rank in range(3)]
    assert met(meetings, 1, 3) == [said(1, 3)] * 3
    for rank in range(3):  # alone: what the others said still stands there
        assert met([at(form, rank)], 1, 3) == [said(1, 3)]
    assert met(meetings, 2, 2) == [said(2, 2)] * 3
    assert met(meetings, 3, 1) == [said(3, 1)] * 3


def test_a_failure_reaches_those_that_wait(form: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    first, second, third = (at(form, rank) for rank in range(3))
    for each in (first, second, third):
        each.begin(7)
    try:
        raise EngineError("no memory for the KV cache")
    except EngineError as error:
        third.fail(error)
    second.fail(StopRequested())  # the first failure is kept
    for each in (first, second):
        with pytest.raises(
            PeerFailed, match="Rank 2 failed while it collected episodes: no memory for the KV cache"
        ):
            each.all_gather("groups", bytes)
    assert capfd.readouterr().err == "", "torch prints nothing while one waits"
    meetings = [first, second, third]
    assert met(meetings, 8, 1) == [said(8, 1)] * 3
