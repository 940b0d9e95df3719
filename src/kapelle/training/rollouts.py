"""Collect the episodes of training steps in all ranks, and check the weights with which they were sampled."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from kapelle.algorithm import Algorithm
from kapelle.engines.train.protocol import TrainEngine
from kapelle.errors import ParityError
from kapelle.functional.statistics import merge_rows
from kapelle.rollout.episodes import request_groups
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import turns_of
from kapelle.runs.definitions import is_dead, own_returns
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.runtime.plugins import find_object
from kapelle.runtime.randomness import (
    capture_random,
    derive_seed,
    random_as_lists,
    random_from_lists,
    restore_random,
)
from kapelle.runtime.ranks import Meeting, Ranks
from kapelle.settings.feature import sections_of
from kapelle.settings.schema import RunConfig
from kapelle.setup.preparation import PreparedRun
from kapelle.training.collate import fresh_samples
from kapelle.training.feature import LoadsWeights, StartedRun, StepInProgress
from kapelle.training.selection import TrainingTasks, tasks_of
from kapelle.types import Group, Turn

COMPARED = 16
"""The number of turns per policy whose log-probs are compared with those of the trainer if steps use samples of older
weights."""


@dataclass(frozen=True, slots=True)
class Collector:
    """An object that collects episodes of steps. The object contains everything on which the episodes depend except the weights."""

    config: RunConfig
    algorithm: Algorithm
    setup: RolloutSetup
    tasks: TrainingTasks

    def collect(self, number: int) -> list[Group]:
        """Collect the episodes of the step with the given number (starting from 1). Each rank collects its share of the step."""
        meeting = self.setup.ranks.meeting()
        meeting.begin()
        return together(self.setup.ranks, meeting, self.begin(number, meeting)).in_order

    def begin(self, number: int, meeting: Meeting) -> Callable[[], StepShare]:
        """Begin to collect the share of this process in a step, and return a function that finishes the share.

        Groups are assigned in turn to all processes of the `meeting`. Rollout workers begin at once; an engine in this
        process begins when the returned function is called.
        """
        seed, tasks = derive_seed(self.config.seed, "rollout", number), self.tasks.of(number)
        own = range(meeting.rank, len(tasks), meeting.size)
        collected = request_groups(self.setup, tasks, self.algorithm.data.group_size, seed, own)
        return partial(self._with_redraws, collected, number, seed, meeting)

    def _with_redraws(
        self, collected: Callable[[], list[Group]], number: int, seed: int, meeting: Meeting
    ) -> StepShare:
        """Return the share of this process. Groups without variance are replaced by groups of other tasks, up to `redraw` times."""
        data, returns = self.algorithm.data, self.algorithm.returns or own_returns
        groups = {meeting.rank + k * meeting.size: group for k, group in enumerate(collected())}
        for attempt in range(1, data.redraw + 1):
            dead = _agree(meeting, [place for place, group in groups.items() if is_dead(group, returns)])
            if not dead:
                break
            tasks = [self.tasks.of(number, attempt)[k] for k in dead]
            own = range(meeting.rank, len(dead), meeting.size)
            other_seed = derive_seed(seed, "redraw", attempt)
            replacements = request_groups(self.setup, tasks, data.group_size, other_seed, own)()
            groups = {place: group for place, group in groups.items() if place not in dead}
            groups |= {dead[k]: group for k, group in zip(own, replacements, strict=True)}
        return StepShare(groups)


class Rollouts(Protocol):
    """An object that collects the episodes of each step. By default, no episodes are collected for later steps."""

    players: Sequence[LoadsWeights] = ()
    """All samplers for training. The samplers receive the weights after each update."""
    tasks: TrainingTasks
    """The tasks of all steps."""
    on_policy: bool = True
    """Whether steps are trained only on samples of the current weights. If they are, the log-probs of trainer and sampler are
    compared in the update."""

    @abstractmethod
    def collect(self, step: StepInProgress) -> list[Group]:
        """Collect and return the groups of a step, and add metrics of the collection to the step.

        Raises ParityError if the episodes were sampled with weights other than the published weights.
        """

    def settle(self, step: StepInProgress) -> None:
        """Wait for the episodes that are collected during the update of a step.

        This method is called before the updated weights are published.
        """
        return

    def forget(self) -> None:
        """Drop the episodes that were collected for later steps."""
        return

    def state(self) -> dict[str, object]:
        """Return the episodes that were collected for later steps, to store them in a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that a call of `state` returned."""
        return


class CurrentRollouts(Rollouts):
    """Collect the episodes of each step with the current weights."""

    def __init__(self, run: StartedRun, setup: RolloutSetup) -> None:
        self.players, self._run = run.players, run
        self.tasks = tasks_of(setup, run.config)
        self.on_policy = is_on_policy(run.config)

    def collect(self, step: StepInProgress) -> list[Group]:
        """Collect the episodes of a step; see `Rollouts.collect`."""
        config, algorithm, engine = self._run.config, self._run.algorithm, self._run.engine
        setup, versions = replace(step.setup, data=algorithm.data), dict(engine.versions)
        groups = Collector(config, algorithm, setup, self.tasks).collect(step.number)
        if algorithm.collects_episodes:
            check_versions(groups, [versions])
            if not self.on_policy:
                compare_turns(engine, step, [turn for _, turn in turns_of(groups)])
                setup.engine.release_caches()
        step.metrics |= step.parity
        return groups


def is_on_policy(config: RunConfig) -> bool:
    """Return whether the steps of a run are trained only on samples of the current weights."""
    return not any(section.off_policy for section in sections_of(config).values())


def compare_turns(
    engine: TrainEngine,
    step: StepInProgress,
    turns: Iterable[Turn],
    versions: Mapping[str, int] | None = None,
    weights: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> None:
    """Compare the sampling log-probs of some turns with those of the trainer, and merge the differences into `step.parity`.

    With `versions`, only tokens that were sampled with these weight versions are compared. The argument `weights` contains
    the weights that sampled; the default is the current weights.
    """
    samples = fresh_samples(turns, step.setup.team, COMPARED, versions)
    step.parity = merge_rows([step.parity, engine.check_parity(samples, weights)])


def make_rollouts(
    run: StartedRun, acting: RolloutSetup, loaded: PreparedRun, closing: ExitStack, *, own_engine: bool
) -> Rollouts:
    """Return the object that collects the episodes of a run with the setup `acting`.

    Resources that the object starts are released by `closing`. The argument `loaded` is the prepared run with the loaded
    bases, and `own_engine` states whether the caller passed a rollout engine.
    """
    makers = [section.rollouts for section in sections_of(run.config).values() if section.rollouts]
    if not makers:
        return CurrentRollouts(run, acting)
    made: Rollouts = find_object(makers[0], "feature")(run, acting, loaded, closing, own_engine=own_engine)
    return made


def check_versions(groups: Sequence[Group], allowed: Sequence[Mapping[str, int]]) -> None:
    """Raise ParityError if a turn was sampled with weight versions other than `allowed`.

    The last allowed versions are the published ones.
    """
    sampled = {(turn.policy, version): turn.agent for _, turn in turns_of(groups) for version, _ in turn.runs}
    for (policy, version), agent in sampled.items():
        if all(version != versions[policy] for versions in allowed):
            raise ParityError(
                f"Agent '{agent}' sampled with version {version} of policy '{policy}', but version "
                f"{allowed[-1][policy]} was published: the rollout engine did not load the new weights."
            )


# -------- A step that several ranks collect: each rank collects its share of the groups, and all ranks get the whole step


@dataclass(frozen=True, slots=True)
class StepShare:
    """The part of a step that one process has collected. Keys are the positions of groups in the step."""

    groups: Mapping[int, Group]

    @property
    def in_order(self) -> list[Group]:
        """The groups in the order of their positions."""
        return [self.groups[place] for place in sorted(self.groups)]


def _agree(meeting: Meeting, dead: Sequence[int]) -> list[int]:
    """Return the positions of groups without variance in all processes. Random generators are set to the state of the first process."""
    if meeting.size == 1:
        return list(dead)
    drawn = None if meeting.rank else random_as_lists(capture_random())
    row = json.dumps({"dead": dead, "random": drawn}).encode()
    rows = [json.loads(each) for each in meeting.all_gather("groups without variance", lambda: row)]
    restore_random(random_from_lists(rows[0]["random"]))
    return sorted(place for each in rows for place in each["dead"])


def together(ranks: Ranks, meeting: Meeting, collect: Callable[[], StepShare]) -> StepShare:
    """Let each rank collect its share of a step, and return the whole step in every rank.

    The function `collect` returns the share of this rank. The global random generators are set to the states of rank 0. If an
    error occurs, it is raised in every rank; other processes of the `meeting` receive the error and stop waiting.
    """
    if ranks.size == 1:
        return collect()

    def share() -> bytes:
        try:
            return dump_share(collect())
        except BaseException as error:
            meeting.fail(error)
            raise

    parts = [
        load_share(each, draws=rank == 0) for rank, each in enumerate(ranks.all_gather("rollout", share))
    ]
    return StepShare({place: group for part in parts for place, group in part.groups.items()})


def dump_share(share: StepShare) -> bytes:
    """Return a share and the current states of the global random generators as bytes with one record per line."""
    head = {"random": random_as_lists(capture_random()), "groups": list(share.groups)}
    return json.dumps(head).encode() + b"\n" + dump_groups(0, share.groups.values())


def load_share(text: bytes, *, draws: bool = True) -> StepShare:
    """Return the share that `dump_share` has written. With `draws`, set the global random generators to the stored states."""
    first, *lines = text.splitlines()
    head = json.loads(first)
    if draws:
        restore_random(random_from_lists(head["random"]))
    return StepShare(dict(zip(head["groups"], load_groups(map(json.loads, lines)), strict=True)))
