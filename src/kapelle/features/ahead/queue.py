"""Train on samples of older weights, in steps that are collected before the update of earlier steps.

With a `max_staleness` of k, each step trains on episodes that were sampled with the weights of k steps earlier. The queue of collected
steps is part of the checkpoint, because episodes of old weights cannot be sampled again. A run is bitwise repeatable, but nothing is
sampled during an update; see `asynchronous.py`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kapelle.features.ahead.staleness import Versions
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import turns_of
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.training.feature import StartedRun, StepInProgress
from kapelle.training.rollouts import Collector, Rollouts, compare_turns, is_on_policy
from kapelle.training.selection import tasks_of
from kapelle.types import Group


class RolloutsAhead(Rollouts):
    """Collects steps ahead of their update, in a queue."""

    def __init__(self, run: StartedRun, setup: RolloutSetup) -> None:
        self._run, self.players = run, run.players
        self.tasks, self.on_policy = tasks_of(setup, run.config), is_on_policy(run.config)
        self._most = run.config.training.max_staleness
        self._queue: deque[list[Group]] = deque()
        self._versions = Versions(self._most)

    def collect(self, step: StepInProgress) -> list[Group]:
        """Return the groups that a step trains on, and collect later steps until the queue is full."""
        run, setup = self._run, replace(step.setup, data=self._run.algorithm.data)
        self._versions.append(run.engine.versions)
        for number in range(step.number + len(self._queue), step.number + self._most + 1):
            groups = Collector(run.config, run.algorithm, setup, self.tasks).collect(number)
            self._versions.check(groups, only_current=True)
            self._queue.append(groups)
            compare_turns(run.engine, step, [turn for _, turn in turns_of(groups)])
            setup.engine.release_caches()
        groups = self._queue.popleft()
        self._versions.check(groups)
        step.metrics["staleness"] = self._versions.staleness(groups)
        step.metrics |= step.parity
        return groups

    def forget(self) -> None:
        """See `Rollouts`."""
        self._queue.clear()

    def state(self) -> dict[str, object]:
        """See `Rollouts`."""
        return {
            "queue": [dump_groups(0, groups).decode("ascii") for groups in self._queue],
            "versions": self._versions.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Rollouts`."""
        self._queue = deque(
            load_groups([json.loads(line) for line in text.splitlines()]) for text in state["queue"]
        )
        self._versions.load_state(state["versions"])
