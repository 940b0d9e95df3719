"""What ranks play together is what one plays alone, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from tests.support.tiny import sections
from torch import Tensor

from kapelle import Trainer
from kapelle.rollout.episodes import shared_rollout
from kapelle.runtime.ranks import Peers, Ranks
from kapelle.training.selection import training_tasks


class Shared(Exception):
    """A rank has done its share."""


@dataclass
class OneAtATime(Ranks):
    """Ranks that do their shares one after another; each then meets the others' shares."""

    rank: int
    size: int
    shares: list[bytes] = field(default_factory=list)

    def all_gather(self, at: str, work: Callable[[], bytes]) -> list[bytes]:
        if len(self.shares) < self.size:
            self.shares.append(work())
            raise Shared
        return self.shares

    def store_barrier(self) -> Peers:
        raise AssertionError("nothing meets aside here")

    def add(self, tensors: Sequence[Tensor]) -> None:
        raise AssertionError(tensors)


def test_groups_are_dealt_whole_and_come_back_in_order() -> None:
    with Trainer(**sections(training={"steps": 1, "tasks_per_step": 5})) as trainer:
        tasks = training_tasks(trainer.setup.environment, trainer.config, 1)
        alone = shared_rollout(trainer.setup, tasks, 2, seed=3)
        shares: list[bytes] = []
        for rank in range(3):
            setup = replace(trainer.setup, ranks=OneAtATime(rank, 3, shares))
            with pytest.raises(Shared):
                shared_rollout(setup, tasks, 2, seed=3)
        assert [share.count(b"\n") - 1 for share in shares] == [4, 4, 2]
        together = shared_rollout(replace(trainer.setup, ranks=OneAtATime(0, 3, shares)), tasks, 2, seed=3)
    assert [group.task for group in together] == tasks
    for one, other in zip(alone, together, strict=True):
        for here, there in zip(one.episodes, other.episodes, strict=True):
            assert [turn.completion_ids for turn in here.turns] == [
                turn.completion_ids for turn in there.turns
            ]
            assert here.rewards == there.rewards
