"""Who is there, and the first reason why one is not."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # no stub names it

from kapelle.runtime import roll_call
from kapelle.runtime.roll_call import RollCall


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[RollCall]:
    monkeypatch.setattr(roll_call, "SOON", 0.3)
    monkeypatch.setattr(roll_call, "BEAT", 0.05)
    store = HashStore()
    return [RollCall(store, rank, 3) for rank in range(3)]


def test_the_first_reason_stays(calls: list[RollCall]) -> None:
    assert calls[0].failure() is None
    calls[1].fail("no memory")
    calls[2].fail("lost the others")
    assert [call.failure() for call in calls] == [(1, "no memory")] * 3
    assert calls[0].why_lost() == (1, "no memory")


def test_one_that_gives_no_sign_is_lost(calls: list[RollCall]) -> None:
    calls[0].begin()
    calls[2].begin()
    rank, why = calls[0].why_lost()
    calls[0].end()
    calls[2].end()
    assert rank == 1
    assert why.startswith("it died without a word")


def test_of_all_one_speaks(calls: list[RollCall]) -> None:
    said: list[int] = []
    calls[1].say_once(lambda: said.append(1))
    calls[0].say_once(lambda: said.append(0))
    calls[2].say_once(lambda: said.append(2), after_others=True)
    assert said == [1]


def test_who_only_heard_of_it_speaks_where_nobody_else_does(calls: list[RollCall]) -> None:
    said: list[int] = []
    calls[2].say_once(lambda: said.append(2), after_others=True)
    assert said == [2]
