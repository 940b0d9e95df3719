"""Roll out groups of episodes without interruption, while the process that trains requests the results.

The process that trains sends the groups that it wants (`ContinuousRollouts.exchange`). Groups that are new are started, groups that
are no longer wanted are cancelled, and all others continue. New weights are loaded between two tokens: requests are put on hold, and
their next tokens are sampled with the new weights (`Interruptible`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from kapelle.engines.rollout.protocol import HeldRequest, Interruptible
from kapelle.rollout.episodes import Gate, Progress, at_once, complete_groups
from kapelle.rollout.partial import Exchange, GroupKey, PartialGroup, Wanted
from kapelle.rollout.setup import RolloutSetup
from kapelle.types import Group

MAX_CONCURRENT = 4096
"""Maximum number of concurrent episodes of one process."""


class ContinuousRollouts:
    """The groups that this process is rolling out. All methods run in one event loop."""

    def __init__(self, setup: RolloutSetup, step: int) -> None:
        """Set the number of groups of a step. The engine of `setup` must be `Interruptible`."""
        assert isinstance(setup.engine, Interruptible), "checked before the run starts"
        self._setup, self._engine, self._step = setup, setup.engine, step
        self._engine.run_freely()
        self._gate = Gate(at_once(setup, MAX_CONCURRENT))
        self._running: dict[GroupKey, tuple[asyncio.Task[Group], Progress]] = {}

    async def exchange(
        self,
        wanted: Wanted,
        load: Callable[[], object] | None = None,
        *,
        unfinished: bool = False,
        seconds: float = 0.0,
    ) -> Exchange:
        """Roll out the `wanted` groups, and return those that are finished.

        If new weights must be loaded, `load` loads them. With `unfinished`, the other wanted groups are returned as well. If no group
        is finished, wait for one, but at most for the given number of seconds. Raises the error of a group that cannot be rolled out.
        """
        for key in self._running.keys() - wanted.keys():
            self._running.pop(key)[0].cancel()
        left: dict[GroupKey, PartialGroup] = {}
        if load is not None or unfinished:
            held = await self.load(load)
            if unfinished:
                left = {key: self._now(progress, held) for key, (_, progress) in self._running.items()}
        for key in sorted(wanted.keys() - self._running.keys()):  # the oldest group gets the first free place
            self._start(key, wanted[key])
        tasks = [task for task, _ in self._running.values()]
        if tasks and seconds:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finished = {}
        for key, (task, progress) in self._running.items():
            if task.done():
                left.pop(key, None)
                group = task.result()
                finished[key] = replace(progress.groups[0], episodes=group.episodes)
        return Exchange(finished, left)

    async def load(self, load: Callable[[], object] | None) -> Sequence[HeldRequest]:
        """Call `load` between two tokens, and return all unfinished requests with their tokens so far."""
        held = await self._engine.hold()
        try:
            if load is not None:
                load()
        finally:
            self._engine.resume()
        return held

    def _now(self, progress: Progress, held: Sequence[HeldRequest]) -> PartialGroup:
        """Return the state of a group. A group whose episodes share turns or evaluate candidates starts again."""
        data = self._setup.data
        return progress.groups[0] if data.widths or data.tree else progress.now(held)[0]

    def _start(self, key: GroupKey, group: PartialGroup) -> None:
        progress = Progress([group])

        async def whole() -> Group:
            [complete] = await complete_groups(
                self._setup, [group], self._step, progress=progress, gate=self._gate
            )
            return complete

        self._running[key] = asyncio.get_running_loop().create_task(whole()), progress
