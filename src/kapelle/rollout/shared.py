"""Rollouts that ranks share: groups are dealt whole, in a fixed order, and every rank ends up with all of them.

A group's seeds depend on its task alone, so that its tokens do not depend on who samples them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kapelle.rollout.play import Play, rollout
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.randomness import (
    capture_random,
    random_as_lists,
    random_from_lists,
    restore_random,
)
from kapelle.types import Group, Task


@runtime_checkable
class PlaysGroups(Protocol):
    """A rollout engine that plays whole groups in other processes, instead of answering requests."""

    def play_groups(
        self, play: Play, tasks: Sequence[Task], samples: int, seed: int, own: Sequence[int]
    ) -> list[Group]:
        """Play `samples` episodes of the tasks at the places `own`, as they are played among all; one group for each.

        The global random generators are left as playing them here would leave them.
        """
        ...


def _played_here(
    play: Play, tasks: Sequence[Task], samples: int, seed: int, own: Sequence[int]
) -> list[Group]:
    if not own:
        return []
    if isinstance(play.engine, PlaysGroups):
        return play.engine.play_groups(play, tasks, samples, seed, own)
    return run_async(lambda: rollout(play, tasks, samples, seed, own=own))


def shared_rollout(play: Play, tasks: Sequence[Task], samples: int, seed: int) -> list[Group]:
    """Play `samples` episodes of every task, each rank its share; return one group per task, in order, in every rank.

    The global random generators are left as rank 0 leaves them.
    """
    ranks = play.ranks
    if ranks.size == 1:
        return _played_here(play, tasks, samples, seed, range(len(tasks)))
    dealt = [range(rank, len(tasks), ranks.size) for rank in range(ranks.size)]

    def share() -> bytes:
        own = dealt[ranks.rank]
        groups = _played_here(play, tasks, samples, seed, own)
        drawn = {} if ranks.rank else random_as_lists(capture_random())
        return json.dumps(drawn).encode() + b"\n" + dump_groups(0, groups)

    found: dict[int, Group] = {}
    for rank, part in enumerate(ranks.together("rollout", share)):
        drawn, *rows = part.splitlines()
        if rank == 0:
            restore_random(random_from_lists(json.loads(drawn)))
        found |= zip(dealt[rank], load_groups(map(json.loads, rows)), strict=True)
    return [found[place] for place in range(len(tasks))]
