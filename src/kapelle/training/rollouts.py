"""Which tasks a step of training plays, the episodes of a step, and the queue of steps that are played ahead."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kapelle.algorithm import Algorithm
from kapelle.errors import ParityError
from kapelle.rollout.episodes import PlaysGroups, ask_groups, begun, play_groups
from kapelle.rollout.partial import EndOfStep, PartialGroup, dump_partial, load_partial
from kapelle.rollout.play import Play
from kapelle.rows import turns_of
from kapelle.runs.definitions import is_dead, own_returns
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.randomness import (
    capture_random,
    derive_seed,
    random_as_lists,
    random_from_lists,
    restore_random,
)
from kapelle.runtime.ranks import Meeting, Ranks
from kapelle.settings.schema import RunConfig, TrainingConfig
from kapelle.training.selection import Roles, TrainingTasks
from kapelle.types import Group

# -------- The episodes of one step of training


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """What a step has played."""

    groups: list[Group]
    """Those that are done: what is learned from."""
    left: tuple[PartialGroup, ...] = ()
    """Those that the next step continues (`training.partial_rollouts`)."""


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one process has played of a step, by place among its groups."""

    groups: Mapping[int, Group]
    """Those that are done."""
    left: Mapping[int, PartialGroup]


def play_step(
    play: Play,
    config: RunConfig,
    algorithm: Algorithm,
    source: TrainingTasks,
    number: int,
    left: Sequence[PartialGroup] = (),
) -> PlayedStep:
    """Play the `source`'s tasks of step `number` (from 1), each rank its share.

    With `redraw`, groups without variance are replaced by further tasks.

    `left` is what the step before has left. The result depends only on that, the settings, the number and the weights, so
    that the episodes are the same in whichever process it runs.
    """
    meeting = play.ranks.meeting()
    meeting.begin()
    return together(play.ranks, meeting, begin_share(play, config, algorithm, source, number, left, meeting))


def begin_share(
    play: Play,
    config: RunConfig,
    algorithm: Algorithm,
    source: TrainingTasks,
    number: int,
    left: Sequence[PartialGroup],
    meeting: Meeting,
) -> Callable[[], StepShare]:
    """Begin with this process's share of a step, and return what plays the rest of it.

    Groups are dealt in turn to all that are at the `meeting`. Where rollout workers play, they begin now; an engine of this
    process plays when the rest is called.
    """
    data, engine = algorithm.data, play.engine
    seed = derive_seed(config.seed, "rollout", number)
    tasks = source.of(number)

    def own(groups: int) -> range:
        return range(meeting.rank, groups, meeting.size)

    if config.training.partial_rollouts:
        pool = [*left, *begun(tasks, data.group_size, seed, number)]
        enough = enough_for(config.training, number, pool)
        mine = own(len(pool))

        def play_own() -> Mapping[int, PartialGroup]:
            # Play groups until the rest of them may be left.
            groups = [pool[place] for place in mine]
            return dict(zip(mine, run_async(lambda: play_groups(play, groups, enough, meeting)), strict=True))

        asked = (
            engine.ask_partial(play, pool, enough, meeting) if isinstance(engine, PlaysGroups) else play_own
        )

        def continued() -> StepShare:
            played = asked()
            done = {place: each.group for place, each in played.items() if each.done}
            return StepShare(done, {place: each for place, each in played.items() if not each.done})

        return continued

    first = ask_groups(play, tasks, data.group_size, seed, own(len(tasks)))
    returns = algorithm.returns or own_returns

    def redrawn() -> StepShare:
        groups = dict(zip(own(len(tasks)), first(), strict=True))
        for attempt in range(1, data.redraw + 1):
            dead = agreed(meeting, [k for k, group in groups.items() if is_dead(group, returns)])
            if not dead:
                break
            others = source.of(number, attempt)
            again, other_seed = [others[k] for k in dead], derive_seed(seed, "redraw", attempt)
            mine = own(len(dead))
            fresh = ask_groups(play, again, data.group_size, other_seed, mine)()
            groups = {k: group for k, group in groups.items() if k not in dead}
            for place, group in zip(mine, fresh, strict=True):
                groups[dead[place]] = group
        return StepShare(groups, {})

    return redrawn


def agreed(meeting: Meeting, dead: Sequence[int]) -> list[int]:
    """Return the places of the groups without variance of all that are at the meeting; random generators continue as the first one's."""

    def told() -> bytes:
        return json.dumps(
            {"dead": dead, "random": None if meeting.rank else random_as_lists(capture_random())}
        ).encode()

    if meeting.size == 1:
        return list(dead)
    every = [json.loads(each) for each in meeting.all_gather("groups without variance", told)]
    restore_random(random_from_lists(every[0]["random"]))
    return sorted(place for each in every for place in each["dead"])


def together(ranks: Ranks, meeting: Meeting, play: Callable[[], StepShare | bytes]) -> PlayedStep:
    """Let each rank play its share and return the whole step in every rank, its groups in order.

    `play` returns the share, or the bytes of it (`dump_share`). The global random generators are left as rank 0 leaves them. An
    error is raised in every rank; what is at the `meeting` hears of it, so that nobody waits there.
    """

    def share() -> bytes:
        try:
            played = play()
            return played if isinstance(played, bytes) else dump_share(played)
        except BaseException as error:
            meeting.fail(error)
            raise

    if ranks.size == 1:
        played = play()
        parts = [played if isinstance(played, StepShare) else load_share(played)]
    else:
        parts = [
            load_share(each, draws=rank == 0) for rank, each in enumerate(ranks.all_gather("rollout", share))
        ]
    groups = {place: group for part in parts for place, group in part.groups.items()}
    left = {place: group for part in parts for place, group in part.left.items()}
    return PlayedStep(
        [groups[place] for place in sorted(groups)], tuple(left[place] for place in sorted(left))
    )


def dump_share(share: StepShare) -> bytes:
    """Return a share, and the states of the global random generators after it, as lines."""
    groups, left = dump_groups(0, share.groups.values()), dump_partial(share.left.values()).encode()
    head = {"random": random_as_lists(capture_random()), "rows": groups.count(b"\n")}
    head |= {"groups": list(share.groups), "left": list(share.left)}
    return json.dumps(head).encode() + b"\n" + groups + left


def load_share(text: bytes, *, draws: bool = True) -> StepShare:
    """Return what `dump_share` has written; with `draws` the global random generators continue from its states."""
    first, *lines = text.splitlines()
    head = json.loads(first)
    if draws:
        restore_random(random_from_lists(head["random"]))
    rows = head["rows"]
    groups = load_groups(map(json.loads, lines[:rows]))
    left = load_partial(b"\n".join(lines[rows:]).decode())
    return StepShare(
        dict(zip(head["groups"], groups, strict=True)), dict(zip(head["left"], left, strict=True))
    )


def steps_ahead(training: TrainingConfig) -> int:
    """Return how many steps are played before the one that is learned from.

    All that `max_staleness` allows; with `partial_rollouts` one at most, so that episodes may be left for the others.
    """
    return min(1, training.max_staleness - 1) if training.partial_rollouts else training.max_staleness


def enough_for(training: TrainingConfig, number: int, groups: Sequence[PartialGroup]) -> EndOfStep:
    """Return when step `number` may leave the groups that are not done yet.

    It may once at most `partial_rollouts` of them are left, all young enough for the next step (`max_staleness`).
    """
    most = min(training.tasks_per_step - 1, max(1, int(training.partial_rollouts * training.tasks_per_step)))
    oldest = number - (training.max_staleness - steps_ahead(training))
    must = tuple(place for place, group in enumerate(groups) if group.number <= oldest)
    return EndOfStep(must, most)


# -------- Rollouts that run ahead of the update: a bounded queue of steps that are played and not yet learned from
#
# With `max_staleness` k a step learns from episodes that the weights of k steps before sampled. The queue is part of the
# checkpoint, because episodes of old weights cannot be sampled again.
#
# With `partial_rollouts` a step may leave groups unfinished; they wait here for the next one that is played.
#
# Where another process samples (`sampling_process.py`), the last of them is played while the step learns from the first.

Left = Sequence[PartialGroup]
"""The groups that a step has left unfinished, for the next one."""
Pending = Callable[[], PlayedStep]
"""Waits for the episodes of a step that another process plays."""


class Sampler(Protocol):
    """Plays the steps of training somewhere else, while this process learns."""

    def begin(self, number: int, left: Sequence[PartialGroup], roles: Roles | None = None) -> Pending:
        """Begin to collect step `number` with the weights that were published last; return what waits for its episodes.

        `left` is what the step before it has left, `roles` has the roles that others take in each of its tasks.
        """
        ...

    def load(self, policy: str, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights of a policy; nothing is being played."""
        ...

    @property
    def weights(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights that it plays with, by policy and name: those of the last `load`."""
        ...


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
        self._pending: Pending | None = None

    def take(
        self,
        number: int,
        versions: Mapping[str, int],
        play: Callable[[int, Left], PlayedStep],
        begin: Callable[[int, Left], Pending] | None = None,
    ) -> list[Group]:
        """Return the groups of step `number`, playing steps until the queue is full.

        `versions` are those of the current weights. The last step that the queue has room for is only begun with `begin`,
        if it is not the one that is returned: `settle` waits for it. Raises ParityError if other weights sampled.
        """
        assert self._pending is None, "what a step began is settled before the next one"
        self._versions.append(dict(versions))
        while len(self._queue) <= self._most:
            # The step that fills the queue is played elsewhere while the caller learns from the first one.
            if begin is not None and self._queue and len(self._queue) == self._most:
                self._pending = begin(number + len(self._queue), self._left)
                break
            self._keep(play(number + len(self._queue), self._left))
        groups = self._queue.popleft()
        self._refuse_other_weights(groups, self._versions)
        return groups

    def settle(self) -> tuple[PlayedStep, Mapping[str, int]] | None:
        """Wait for the step that was begun and put it into the queue; return it and the versions that played it.

        None if none was begun. Raises ParityError if other weights sampled than those that were current when it began.
        """
        if self._pending is None:
            return None
        played = self._pending()
        self._keep(played)
        self._pending = None
        return played, self._versions[-1]

    def forget(self) -> None:
        """Drop the episodes that were collected ahead: a policy started again, and they are of other weights."""
        assert self._pending is None, "what a step began is settled first"
        self._queue.clear()
        self._left = ()

    def _keep(self, played: PlayedStep) -> None:
        """Put a step that the current weights played into the queue; groups that a step before it began may have older weights."""
        continued = [group.task for group in self._left]
        begun_now = [group for group in played.groups if group.task not in continued]
        self._refuse_other_weights(begun_now, [self._versions[-1]])
        self._refuse_other_weights(played.groups, self._versions)
        self._queue.append(played.groups)
        self._left = played.left

    def _refuse_other_weights(
        self, groups: Sequence[Group], allowed: Sequence[Mapping[str, int]] | deque[dict[str, int]]
    ) -> None:
        sampled = {
            (turn.policy, version): turn.agent for _, turn in turns_of(groups) for version, _ in turn.runs
        }
        for (policy, version), agent in sampled.items():
            if all(version != versions[policy] for versions in allowed):
                raise ParityError(
                    f"Agent '{agent}' sampled with version {version} of policy '{policy}', but version "
                    f"{allowed[-1][policy]} was published: the rollout engine did not take the new weights."
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

    def state(self) -> dict[str, object]:
        """Return the queue and its versions as plain values."""
        assert self._pending is None, "a checkpoint is written between steps"
        return {
            "queue": [dump_groups(0, groups).decode("ascii") for groups in self._queue],
            "versions": [dict(versions) for versions in self._versions],
            **({"left": dump_partial(self._left)} if self._left else {}),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._pending = None  # of a step that did not end
        self._queue = deque(
            load_groups([json.loads(line) for line in text.splitlines()]) for text in state["queue"]
        )
        self._versions = deque((dict(each) for each in state["versions"]), maxlen=self._oldest + 1)
        self._left = load_partial(state.get("left", ""))
