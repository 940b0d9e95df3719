"""Collect episodes ahead of the update, in a bounded queue of steps that wait for their update.

With a `max_staleness` of k, each step trains on episodes that were sampled with the weights of k steps earlier. With
`partial_rollouts`, a step may leave groups unfinished, which the next collected step continues with newer weights. The queue and the
unfinished groups are part of the checkpoint, because episodes of old weights cannot be sampled again. With `overlap`, another process
collects the last step of the queue while this process trains on the first step of the queue.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from kapelle.features.ahead.settings import AheadSettings
from kapelle.rollout.episodes import CollectsGroups, begun, collect_groups
from kapelle.rollout.partial import EndOfStep, PartialGroup, dump_partial, load_partial, unfinished_turns
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import turns_of
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.randomness import derive_seed
from kapelle.runtime.ranks import Meeting
from kapelle.settings.schema import TrainingConfig
from kapelle.training.feature import LoadsWeights, StartedRun, StepInProgress
from kapelle.training.rollouts import (
    Collector,
    Rollouts,
    StepShare,
    check_versions,
    compare_turns,
    is_on_policy,
    together,
)
from kapelle.training.selection import Roles, tasks_of
from kapelle.types import Group

# -------- The episodes of one step, some of which may stay unfinished

Left = Sequence[PartialGroup]
"""Unfinished groups that earlier steps have left."""


def begin_step(collector: Collector, number: int, left: Left, meeting: Meeting) -> Callable[[], StepShare]:
    """Start this process's share of step `number` and of the unfinished groups in `left`; see `Collector.begin`."""
    config, setup = collector.config, collector.setup
    if not config.training.partial_rollouts:
        return collector.begin(number, meeting)
    seed = derive_seed(config.seed, "rollout", number)
    tasks = collector.tasks.of(number)
    groups = [*left, *begun(tasks, collector.algorithm.data.group_size, seed, number)]
    enough = enough_for(config.training, number, groups)
    if isinstance(setup.engine, CollectsGroups):
        collected = setup.engine.request_partial(setup, groups, enough, meeting)
    else:
        collected = partial(_collect, setup, groups, enough, meeting)
    return partial(_as_share, collected)


def _collect(
    setup: RolloutSetup, groups: Sequence[PartialGroup], enough: EndOfStep, meeting: Meeting
) -> dict[int, PartialGroup]:
    """Collect this process's share of groups until the remaining groups may stay unfinished.

    Return all of these groups, keyed by their indices.
    """
    own = range(meeting.rank, len(groups), meeting.size)
    collected = run_async(lambda: collect_groups(setup, [groups[place] for place in own], enough, meeting))
    return dict(zip(own, collected, strict=True))


def _as_share(collected: Callable[[], Mapping[int, PartialGroup]]) -> StepShare:
    groups = collected()
    done = {place: each.group for place, each in groups.items() if each.done}
    return StepShare(done, {place: each for place, each in groups.items() if place not in done})


def steps_ahead(training: AheadSettings) -> int:
    """Return the number of steps that are collected ahead of the step that is trained on.

    The result is the number that `max_staleness` allows. With `partial_rollouts`, the number is at most one, because the rest is
    needed for unfinished groups.
    """
    return min(1, training.max_staleness - 1) if training.partial_rollouts else training.max_staleness


def enough_for(training: TrainingConfig, number: int, groups: Sequence[PartialGroup]) -> EndOfStep:
    """Return the condition under which step `number` may end.

    At most the share `partial_rollouts` of its groups is left for a later step.
    """
    most = min(training.tasks_per_step - 1, max(1, int(training.partial_rollouts * training.tasks_per_step)))
    oldest = number - (training.max_staleness - steps_ahead(training))
    return EndOfStep(tuple(place for place, group in enumerate(groups) if group.number <= oldest), most)


# -------- The queue

Pending = Callable[[], StepShare]
"""Function that waits for the episodes of a step that another process is collecting."""


class Sampler(LoadsWeights, Protocol):
    """An object that collects the episodes of steps in other processes while this process updates the weights."""

    def begin(self, number: int, left: Left, roles: Roles | None = None) -> Pending:
        """Start to collect step `number` with the weights of the last `load`, and return a function that waits for the episodes.

        The argument `left` contains unfinished groups of the previous step, and `roles` contains, for each task, the roles that other
        policies take.
        """
        ...

    @property
    def weights(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights that are used for sampling, by policy and tensor name."""
        ...


class RolloutQueue:
    """A queue of collected steps, oldest first, with the versions of each policy that may have sampled them."""

    def __init__(self, most: int, oldest: int | None = None) -> None:
        """Set the maximum number of steps between two updates (`most`) and the maximum age of weights (`oldest`, default `most`)."""
        self._most = most
        self._oldest = most if oldest is None else oldest
        self._queue: deque[list[Group]] = deque()
        self.left: Left = ()
        """Unfinished groups of the last collected step."""
        self._versions: deque[dict[str, int]] = deque(maxlen=self._oldest + 1)
        self._pending: Pending | None = None

    def take(
        self,
        number: int,
        versions: Mapping[str, int],
        collect: Callable[[int, Left], StepShare],
        begin: Callable[[int, Left], Pending] | None = None,
    ) -> list[Group]:
        """Return the groups of step `number`, and collect steps with `collect` until the queue is full.

        The argument `versions` contains the versions of the current weights. If `begin` is given, the step that fills the queue is
        only started, and `settle` waits for its episodes, unless it is the step that is returned. Raises ParityError if episodes were
        sampled with unexpected weights.
        """
        assert self._pending is None, "`settle` is called between two steps"
        self._versions.append(dict(versions))
        while len(self._queue) <= self._most:
            if begin is not None and self._queue and len(self._queue) == self._most:
                self._pending = begin(number + len(self._queue), self.left)
                break
            self._keep(collect(number + len(self._queue), self.left))
        groups = self._queue.popleft()
        check_versions(groups, self._versions)
        return groups

    def settle(self) -> tuple[StepShare, Mapping[str, int]] | None:
        """Wait for the step that was started, and return it with the versions of the weights that sampled it.

        The result is None if no step was started.

        Raises ParityError if the step was sampled with other weights than those that were current when it started.
        """
        if self._pending is None:
            return None
        share = self._pending()
        self._keep(share)
        self._pending = None
        return share, self._versions[-1]

    def forget(self) -> None:
        """Discard everything that was collected."""
        assert self._pending is None, "`settle` is called first"
        self._queue.clear()
        self.left = ()

    def _keep(self, share: StepShare) -> None:
        """Add a step to the queue. Only groups of earlier steps may contain tokens of older weights."""
        groups, continued = share.in_order, [group.task for group in self.left]
        check_versions([group for group in groups if group.task not in continued], [self._versions[-1]])
        check_versions(groups, self._versions)
        self._queue.append(groups)
        self.left = tuple(share.left[place] for place in sorted(share.left))

    def staleness(self, groups: Sequence[Group]) -> float:
        """Return the mean age in steps of the weights that sampled the turns. The age of a turn is the mean age over its tokens."""
        ages: list[float] = []
        for _, turn in turns_of(groups):
            held = [versions[turn.policy] for versions in self._versions]
            age = {version: len(held) - 1 - k for k, version in enumerate(held)}
            if turn.versions:
                tokens = sum(age[version] * count for version, count in turn.versions)
                ages.append(tokens / len(turn.completion_ids))
            else:
                ages.append(age[turn.version])
        return sum(ages) / len(ages) if ages else 0.0

    def state(self) -> dict[str, object]:
        """Return the queue and the versions as plain values."""
        assert self._pending is None, "a checkpoint is written between steps"
        return {
            "queue": [dump_groups(0, groups).decode("ascii") for groups in self._queue],
            "versions": [dict(versions) for versions in self._versions],
            **({"left": dump_partial(self.left)} if self.left else {}),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self._pending = None  # of a step that failed
        self._queue = deque(
            load_groups([json.loads(line) for line in text.splitlines()]) for text in state["queue"]
        )
        self._versions = deque((dict(each) for each in state["versions"]), maxlen=self._oldest + 1)
        self.left = load_partial(state.get("left", ""))


class RolloutsAhead(Rollouts):
    """Collects episodes ahead of the update, either in this process or with a `Sampler`."""

    def __init__(self, run: StartedRun, setup: RolloutSetup, sampler: Sampler | None) -> None:
        self._config, self._algorithm, self._engine = run.config, run.algorithm, run.engine
        self.players = run.players if sampler is None else [*run.players, sampler]
        self.tasks, self.on_policy = tasks_of(setup, run.config), is_on_policy(run.config)
        self.queue = RolloutQueue(steps_ahead(run.config.training), run.config.training.max_staleness)
        self.sampler = sampler

    def collect(self, step: StepInProgress) -> list[Group]:
        """Return the groups that a step trains on; see `Rollouts`."""
        setup, versions = replace(step.setup, data=self._algorithm.data), dict(self._engine.versions)
        begin = None if self.sampler is None else self._begin
        groups = self.queue.take(step.number, versions, partial(self._here, step, setup), begin)
        if self._config.training.max_staleness:
            step.metrics["staleness"] = self.queue.staleness(groups)
        step.metrics |= step.parity
        return groups

    def _begin(self, number: int, left: Left) -> Pending:
        assert self.sampler is not None, "only a sampler collects during the update"
        return self.sampler.begin(number, left, self.tasks.roles(number))

    def _here(self, step: StepInProgress, setup: RolloutSetup, number: int, left: Left) -> StepShare:
        """Collect step `number` in this process before the update of the current step."""
        if self.sampler is None:
            meeting = setup.ranks.meeting()
            meeting.begin()
            collector = Collector(self._config, self._algorithm, setup, self.tasks)
            share = together(setup.ranks, meeting, begin_step(collector, number, left, meeting))
        else:
            share = self._begin(number, left)()
        if not self.on_policy:
            self._compare(step, share, dict(self._engine.versions))
            setup.engine.release_caches()  # as in a sampling process; otherwise the next step would use these caches
        return share

    def _compare(
        self,
        step: StepInProgress,
        share: StepShare,
        versions: Mapping[str, int],
        weights: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        turns = [turn for _, turn in turns_of(share.in_order)]
        turns += unfinished_turns([share.left[place] for place in sorted(share.left)])
        only = versions if self._config.training.partial_rollouts else None
        compare_turns(self._engine, step, turns, only, weights)

    def settle(self, step: StepInProgress) -> None:
        """Wait for the step that the sampler is collecting, and compare its log-probs with those of the weights that sampled it."""
        settled = self.queue.settle()
        if settled is not None and self.sampler is not None:
            self._compare(step, *settled, self.sampler.weights)
        step.metrics |= step.parity

    def forget(self) -> None:
        """See `Rollouts`."""
        self.queue.forget()

    def state(self) -> dict[str, object]:
        """See `Rollouts`."""
        return self.queue.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Rollouts`."""
        self.queue.load_state(state)
