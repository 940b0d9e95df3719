"""Train on whichever groups are finished, while other processes sample without interruption (`training.asynchronous`).

At the beginning of step s, the weights of step s are published, the groups of step s + `ahead` are started, and the step takes as many
finished groups as a step has tasks. Groups that are still being sampled continue with the new weights. No step waits for a long
episode, except if the episode would otherwise become older than `max_staleness`: each token was sampled with weights of at most
`max_staleness` steps ago.

Every group that is started is trained on, so long episodes are not under-represented. Which groups a step takes depends on the speed of the machine, so a run is not repeatable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from kapelle.features.ahead.staleness import Versions
from kapelle.rollout.episodes import begun
from kapelle.rollout.partial import Exchange, GroupKey, PartialGroup, Wanted, dump_wanted, load_wanted
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import turns_of
from kapelle.runs.definitions import is_dead, own_returns
from kapelle.runtime.interrupts import stop_if_requested
from kapelle.runtime.randomness import derive_seed
from kapelle.runtime.ranks import Meeting
from kapelle.training.feature import LoadsWeights, StartedRun, StepInProgress
from kapelle.training.rollouts import Rollouts, StepShare, compare_turns, together
from kapelle.training.selection import tasks_of
from kapelle.types import Group

WAIT = 0.2
"""Maximum time in seconds of one request to the sampling processes."""
COMPARED = 2
"""Number of groups per process whose log-probs are compared with those of the trainer after an update."""


class Sampler(LoadsWeights, Protocol):
    """An object that rolls out groups in other processes."""

    def exchange(self, wanted: Wanted, *, unfinished: bool = False, seconds: float = 0.0) -> Exchange:
        """Roll out the groups with the weights of the last calls of `load`; see `ContinuousRollouts.exchange`."""
        ...

    @property
    def weights(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights that are used for sampling, by policy and tensor name."""
        ...


def steps_ahead(max_staleness: int) -> int:
    """Return the number of steps whose groups are started before the current step has taken its groups.

    The larger half of `max_staleness` is used for starting groups early, and the rest for groups that take longer than others.
    """
    return (max_staleness + 1) // 2


class AsynchronousRollouts(Rollouts):
    """Takes the groups of each step from sampling processes. Each rank has a sampler for its share of the groups."""

    on_policy = False

    def __init__(self, run: StartedRun, setup: RolloutSetup, sampler: Sampler) -> None:
        self._run, self._sampler, self._ranks = run, sampler, setup.ranks
        self.players = [*run.players, *([] if sampler in run.players else [sampler])]
        self.tasks, training = tasks_of(setup, run.config), run.config.training
        self._setup = replace(setup, data=run.algorithm.data)
        self._most, self._ahead = training.max_staleness, steps_ahead(training.max_staleness)
        self._versions = Versions(self._most)
        self._step = 0
        """The step that takes groups, or that took groups last."""
        self._last = 0
        """The last step whose groups were started."""
        self._wanted: dict[GroupKey, PartialGroup] = {}
        """The unfinished groups of this rank, as they were when a sampler started them."""
        self._finished: dict[GroupKey, PartialGroup] = {}
        """The finished groups of this rank that no step has taken."""

    def collect(self, step: StepInProgress) -> list[Group]:
        """Return the groups that a step trains on, and start groups of later steps; see `Rollouts`."""
        self._step = step.number
        self._versions.append(self._run.engine.versions)
        last = min(step.number + self._ahead, max(self._run.config.training.steps, step.number))
        for number in range(max(self._last + 1, step.number), last + 1):
            self._start(number, step.number)
        with step.setup.timeline.phase("generate"):
            share = together(self._ranks, Meeting(), partial(self._take, step.number))
        groups = share.in_order
        self._versions.check(groups)
        step.metrics["staleness"] = self._versions.staleness(groups)
        step.metrics["unfinished_groups"] = float(len(self._wanted))
        self._compare(step, groups)
        return groups

    def _start(self, number: int, now: int, place: int | None = None, attempt: int = 0) -> None:
        """Start the groups of step `number` at step `now`, or only the group at `place`."""
        config, ranks = self._run.config, self._ranks
        seed = derive_seed(config.seed, "rollout", number)
        if attempt:
            seed = derive_seed(seed, "redraw", attempt)
        groups = begun(self._setup, self.tasks.of(number, attempt), self._setup.data.group_size, seed, now)
        for k in range(ranks.rank, len(groups), ranks.size) if place is None else (place,):
            self._wanted[GroupKey(number, k, attempt)] = groups[k]
        self._last = max(self._last, number)

    def _take(self, number: int) -> StepShare:
        """Wait until the share of this rank is finished, and return it. The oldest groups are taken first."""
        own = range(self._ranks.rank, self.tasks.count, self._ranks.size)
        while True:
            self._receive(WAIT)
            oldest = sorted(self._finished, key=lambda key: (self._finished[key].number, key))
            left = [*self._wanted.values(), *(self._finished[key] for key in oldest[len(own) :])]
            started = sorted(group.number for group in left)
            # The k-th of the other groups is taken in step number + 1 + k // len(own) at the earliest.
            in_time = all(first + self._most > number + k // len(own) for k, first in enumerate(started))
            if len(oldest) >= len(own) and (in_time or not self._wanted):
                break
            stop_if_requested()
        return StepShare(
            {place: self._finished.pop(key).group for place, key in zip(own, oldest, strict=False)}
        )

    def _receive(self, seconds: float = 0.0, *, unfinished: bool = False) -> Wanted:
        """Exchange groups with the sampler, and return the unfinished ones if they are requested.

        A group without variance is replaced as often as `redraw` allows.
        """
        data, returns = self._setup.data, self._run.algorithm.returns or own_returns
        found = self._sampler.exchange(self._wanted, unfinished=unfinished, seconds=seconds)
        for key, group in found.finished.items():
            del self._wanted[key]
            if key.attempt < data.redraw and is_dead(group.group, returns):
                self._start(key.step, self._step, key.place, key.attempt + 1)
            else:
                self._finished[key] = group
        return found.unfinished

    def settle(self, step: StepInProgress) -> None:
        """Compare log-probs of groups that were finished during the update with those of the weights that sampled them."""
        self._receive()
        newest = sorted(self._finished)[-COMPARED:]
        share = StepShare(
            {
                self._ranks.rank + k * self._ranks.size: self._finished[key].group
                for k, key in enumerate(newest)
            }
        )
        groups = together(self._ranks, Meeting(), lambda: share).in_order
        if groups:
            self._compare(step, groups, self._sampler.weights)
        step.metrics |= step.parity

    def _compare(
        self,
        step: StepInProgress,
        groups: Sequence[Group],
        weights: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        turns = [turn for _, turn in turns_of(groups)]
        compare_turns(self._run.engine, step, turns, self._versions.current, weights)

    def forget(self) -> None:
        """Drop all groups, finished or not. The next step starts its own groups."""
        if self._last:
            self._sampler.exchange(
                {}
            )  # otherwise it would continue groups that are wanted again under the same key
        self._wanted, self._finished, self._last = {}, {}, 0

    def state(self) -> dict[str, object]:
        """Return the groups of all ranks that no step has taken, with the turns of unfinished groups so far."""
        now = self._receive(unfinished=True)
        rows = json.dumps([dump_wanted({**self._wanted, **now}), dump_wanted(self._finished)]).encode()
        parts = self._ranks.all_gather("unfinished groups", lambda: rows)
        return {
            "last": self._last,
            "step": self._step,
            "versions": self._versions.state(),
            "groups": [json.loads(part) for part in parts],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Rollouts`. The groups are divided among the ranks, of which there may be another number than before."""
        self.forget()
        self._last, self._step = state["last"], state["step"]
        self._versions.load_state(state["versions"])
        for left, finished in state["groups"]:
            self._wanted |= load_wanted(left)
            self._finished |= load_wanted(finished)
        # Each rank gets as many groups as it takes in the steps that are left.
        order = sorted([*self._wanted, *self._finished])
        own = {
            key for k, key in enumerate(order) if k % self.tasks.count % self._ranks.size == self._ranks.rank
        }
        self._wanted = {key: group for key, group in self._wanted.items() if key in own}
        self._finished = {key: group for key, group in self._finished.items() if key in own}
