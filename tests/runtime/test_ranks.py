"""The rank of a process, and checks between ranks before they begin."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from kapelle.errors import ConfigError
from kapelle.runtime.on_demand import Tensor
from kapelle.runtime.ranks import (
    ALONE,
    LaunchedRank,
    Peers,
    Ranks,
    broadcast,
    check_same,
    first_then_others,
    launched_rank,
)

GIVEN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}


class Second(Ranks):
    """Rank 1 of 2; rank 0 shares the given value."""

    rank, size = 1, 2

    def __init__(self, *theirs: object) -> None:
        self.theirs = [json.dumps(each).encode() for each in theirs]
        self.shared: list[bytes] = []

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        self.shared.append(work())
        return [self.theirs.pop(0), self.shared[-1]]

    def store_barrier(self) -> Peers:
        raise AssertionError("nothing meets aside here")

    def add(self, tensors: Sequence[Tensor]) -> None:
        raise AssertionError(tensors)


def test_the_launchers_variables_give_the_place() -> None:
    assert launched_rank(GIVEN) == LaunchedRank(1, 4, "node", 29500, 0)
    assert launched_rank({}) is None
    assert launched_rank({"RANK": "0"}) is None
    assert launched_rank(GIVEN | {"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"WORLD_SIZE": "two"}])
def test_an_impossible_rank_is_an_error(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="RANK counts from 0 to WORLD_SIZE - 1"):
        launched_rank(GIVEN | wrong)


def test_all_ranks_know_what_the_first_finds() -> None:
    assert broadcast(ALONE, "here", lambda: 3) == 3
    second = Second({"found": [1, 2]})
    assert broadcast(second, "here", lambda: pytest.fail("only the first looks")) == {"found": [1, 2]}
    assert second.shared == [b""]


def test_other_calls_work_after_the_first() -> None:
    second, order = Second(None, None), iter(["made", "made again"])
    assert first_then_others(second, "here", lambda: next(order)) == "made"
    assert second.shared == [b"", b""]


def test_ranks_with_other_settings_are_named() -> None:
    same = {"`seed`": 1, "version of torch": "2"}
    check_same(Second(same), "start", same)
    with pytest.raises(ConfigError, match=r"Rank 1 .* `seed` is 2 there and 1 on rank 0\."):
        check_same(Second(same), "start", same | {"`seed`": 2})
    with pytest.raises(ConfigError, match=r"data of mine is None there and 'a' on rank 0"):
        check_same(Second(same | {"data of mine": "a"}), "start", same)
