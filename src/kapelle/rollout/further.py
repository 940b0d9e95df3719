"""Playing groups until enough of them are done: the others are left where they are, and go on later.

What is left does not depend on time: requests are broken off at a moment when every coroutine waits for an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from kapelle.engines.rollout.protocol import Interrupted, Interruptible
from kapelle.rollout.play import Play, Seat, play_further, play_seats, seats_of
from kapelle.rollout.scene import LiveScene
from kapelle.rollout.under_way import EpisodeUnderWay, GroupUnderWay, as_recorded
from kapelle.types import Episode, Task

Enough = Callable[[Sequence[bool]], bool]
"""Which groups are done → whether the others may be left."""


def begun(tasks: Sequence[Task], samples: int, seed: int, number: int) -> list[GroupUnderWay]:
    """Return groups of which nothing is played yet, with the seeds of `play.rollout`; `number` is that of their step."""
    seats = seats_of(tasks, samples, seed)
    episodes = [EpisodeUnderWay(seat.seed) for seat in seats]
    return [
        GroupUnderWay(task, number, tuple(episodes[g * samples : (g + 1) * samples]))
        for g, task in enumerate(tasks)
    ]


async def play_groups(play: Play, groups: Sequence[GroupUnderWay], enough: Enough) -> list[GroupUnderWay]:
    """Play groups on until enough of them are done, and return all of them as they are then, in order.

    The engine that samples for the team is `Interruptible`.
    """
    playing = _Playing(play, groups, enough)
    try:
        await playing.play()
    finally:
        await playing.end()
    return playing.groups()


class _Playing:
    """The episodes of some groups, while they are played."""

    def __init__(self, play: Play, groups: Sequence[GroupUnderWay], enough: Enough) -> None:
        self._play, self._groups, self._enough = play, groups, enough
        self._places = [(g, k) for g, group in enumerate(groups) for k, _ in enumerate(group.episodes)]
        self._known = {place: groups[place[0]].episodes[place[1]] for place in self._places}
        self._open = {place: each for place, each in self._known.items() if not isinstance(each, Episode)}
        self._scenes: dict[tuple[int, int], LiveScene] = {}
        self._tasks: list[asyncio.Task[object]] = []
        self._stop = asyncio.Event()

    async def play(self) -> None:
        """Play until enough is done, or everything."""
        places = list(self._open)
        seats = [Seat(self._groups[g].task, k, self._open[g, k].seed) for g, k in places]

        async def one(number: int, seat: Seat) -> Episode:
            return await self._one(places[number], seat)

        playing = asyncio.create_task(play_seats(self._play, seats, one, followed=True))
        stopping = asyncio.create_task(self._stop.wait())
        self._tasks += [playing, stopping]
        await asyncio.wait({playing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            assert isinstance(self._play.engine, Interruptible), "checked before the run starts"
            broken = await self._play.engine.interrupt()
            self._note_left(broken)
        if playing.done():
            for place, episode in zip(places, playing.result(), strict=True):
                self._known[place] = episode  # those that were given up, too

    async def _one(self, place: tuple[int, int], seat: Seat) -> Episode:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.append(task)

        def on_scene(scene: LiveScene) -> None:
            self._scenes[place] = scene

        episode = await play_further(self._play, seat.task, self._open[place], seat.sample, on_scene)
        self._scenes.pop(place, None)
        self._known[place] = episode
        if self._enough([group.done for group in self.groups()]):
            self._stop.set()
        return episode

    def _note_left(self, broken: Sequence[Interrupted]) -> None:
        for place, scene in self._scenes.items():
            left = scene.left(broken)
            if left is not None:
                turns, payments = as_recorded(self._open[place], left.turns, left.payments)
                self._known[place] = replace(left, turns=turns, payments=payments)

    async def end(self) -> None:
        """End what still runs: worlds are closed, within their deadlines."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._play.patience.environment)

    def groups(self) -> list[GroupUnderWay]:
        """Return the groups as they are now."""
        return [
            replace(group, episodes=tuple(self._known[g, k] for k, _ in enumerate(group.episodes)))
            for g, group in enumerate(self._groups)
        ]
