"""Rollouts that run ahead of the update: a bounded queue of steps that are played and not yet learned from.

With `max_staleness` k a step learns from episodes that the weights of k steps before sampled. The queue is part of the
checkpoint, because episodes of old weights cannot be sampled again.

With `partial_rollouts` a step may leave groups unfinished; they wait here for the next one that is played.

Where another process samples (`sampling_process.py`), the last of them is played while the step learns from the first.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kapelle.errors import ParityError
from kapelle.rollout.under_way import GroupUnderWay, dump_under_way, load_under_way
from kapelle.rows import turns_of
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.training.step_play import PlayedStep
from kapelle.types import Group

Left = Sequence[GroupUnderWay]
"""The groups that a step has left unfinished, for the next one."""
UnderWay = Callable[[], PlayedStep]
"""Waits for the episodes of a step that another process plays."""


class RolloutQueue:
    """The queue, and which versions of each policy may be in it."""

    def __init__(self, most: int, oldest: int | None = None) -> None:
        """Allow at most `most` steps in the queue; 0 is on-policy.

        `oldest` is how many steps older than the current ones weights may be, where groups are left from step to step.
        """
        self._most = most
        self._oldest = most if oldest is None else oldest
        self._queue: deque[list[Group]] = deque()
        self._left: Left = ()
        self._versions: deque[dict[str, int]] = deque(maxlen=self._oldest + 1)
        self._under_way: UnderWay | None = None

    def take(
        self,
        number: int,
        versions: Mapping[str, int],
        play: Callable[[int, Left], PlayedStep],
        begin: Callable[[int, Left], UnderWay] | None = None,
    ) -> list[Group]:
        """Return the groups of step `number`, playing steps until the queue is full.

        `versions` are those of the current weights. The last step that the queue has room for is only begun with `begin`,
        if it is not the one that is returned: `settle` waits for it. Raises ParityError if other weights sampled.
        """
        assert self._under_way is None, "what a step began is settled before the next one"
        self._versions.append(dict(versions))
        while len(self._queue) <= self._most:
            if begin is not None and self._queue and len(self._queue) == self._most:
                self._under_way = begin(number + len(self._queue), self._left)
                break
            self._keep(play(number + len(self._queue), self._left))
        groups = self._queue.popleft()
        self._refuse_other_weights(groups, self._versions)
        return groups

    def settle(self) -> tuple[PlayedStep, Mapping[str, int]] | None:
        """Wait for the step that was begun and put it into the queue; return it and the versions that played it.

        None if none was begun. Raises ParityError if other weights sampled than those that were current when it began.
        """
        if self._under_way is None:
            return None
        played = self._under_way()
        self._keep(played)
        self._under_way = None
        return played, self._versions[-1]

    def _keep(self, played: PlayedStep) -> None:
        """Put a step that the current weights played into the queue; what older ones had begun may be of those."""
        went_on = [group.task for group in self._left]
        begun_now = [group for group in played.groups if group.task not in went_on]
        self._refuse_other_weights(begun_now, [self._versions[-1]])
        self._refuse_other_weights(played.groups, self._versions)
        self._queue.append(played.groups)
        self._left = played.left

    def _refuse_other_weights(
        self, groups: Sequence[Group], allowed: Sequence[Mapping[str, int]] | deque[dict[str, int]]
    ) -> None:
        sampled = [(turn, version) for _, turn in turns_of(groups) for version, _ in turn.runs]
        for turn, version in sampled:
            if all(version != versions[turn.policy] for versions in allowed):
                raise ParityError(
                    f"Agent '{turn.agent}' sampled with version {version} of policy '{turn.policy}', but version "
                    f"{allowed[-1][turn.policy]} was published: the rollout engine did not take the new weights."
                )

    def staleness(self, groups: Sequence[Group]) -> float:
        """Return the mean age in steps, over turns, of the weights that sampled; of a turn the mean over its tokens."""
        ages: list[float] = []
        for _, turn in turns_of(groups):
            held = [versions[turn.policy] for versions in self._versions]
            found = {version: len(held) - 1 - k for k, version in enumerate(held)}
            ages.append(
                sum(found[version] * tokens for version, tokens in turn.versions) / len(turn.completion_ids)
                if turn.versions
                else found[turn.version]
            )
        return sum(ages) / len(ages) if ages else 0.0

    def mark(self) -> Callable[[], None]:
        """Return a function that restores the queue and its versions as they are now, with nothing under way."""
        queue, versions, left = self._queue.copy(), self._versions.copy(), self._left

        def restore() -> None:
            self._queue, self._versions, self._left, self._under_way = queue, versions, left, None

        return restore

    def state(self) -> dict[str, object]:
        """Return the queue and its versions as plain values."""
        assert self._under_way is None, "a checkpoint is written between steps"
        return {
            "queue": [dump_groups(0, groups).decode("ascii") for groups in self._queue],
            "versions": [dict(versions) for versions in self._versions],
            **({"left": dump_under_way(self._left)} if self._left else {}),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._queue = deque(
            load_groups([json.loads(line) for line in text.splitlines()]) for text in state["queue"]
        )
        self._versions = deque((dict(each) for each in state["versions"]), maxlen=self._oldest + 1)
        self._left = load_under_way(state.get("left", ""))
