"""The episodes of a training step, which all ranks collect together, and the weights used to sample them."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from kapelle.algorithm import Algorithm
from kapelle.engines.train.protocol import TrainEngine
from kapelle.errors import ParityError
from kapelle.functional.statistics import merge_rows
from kapelle.rollout.episodes import request_groups
from kapelle.rollout.partial import PartialGroup, dump_partial, load_partial
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
"""Number of turns per policy to compare with the trainer's log-probs when samples of older weights are collected."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Everything that the episodes of steps depend on, except the weights."""

    config: RunConfig
    algorithm: Algorithm
    setup: RolloutSetup
    tasks: TrainingTasks

    def collect(self, number: int) -> list[Group]:
        """Collect the episodes of the tasks of step `number` (from 1); each rank collects its share."""
        meeting = self.setup.ranks.meeting()
        meeting.begin()
        return together(self.setup.ranks, meeting, self.begin(number, meeting)).in_order

    def begin(self, number: int, meeting: Meeting) -> Callable[[], StepShare]:
        """Begin this process's share of a step, and return a function that finishes it.

        Groups are assigned in turn to all processes at the `meeting`. Rollout workers begin now; an engine in this process begins when
        the function is called.
        """
        seed, tasks = derive_seed(self.config.seed, "rollout", number), self.tasks.of(number)
        own = range(meeting.rank, len(tasks), meeting.size)
        collected = request_groups(self.setup, tasks, self.algorithm.data.group_size, seed, own)
        return partial(self._with_redraws, collected, number, seed, meeting)

    def _with_redraws(
        self, collected: Callable[[], list[Group]], number: int, seed: int, meeting: Meeting
    ) -> StepShare:
        """Return this process's share; groups without variance are replaced by groups of other tasks, up to `redraw` times."""
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
    """Collects the episodes of each step. By default nothing is collected for later steps."""

    players: Sequence[LoadsWeights] = ()
    """All samplers for training, which receive the weights of each update."""
    tasks: TrainingTasks
    """The tasks of every step."""
    on_policy: bool = True
    """Whether steps learn only from samples of the current weights; if so, the update compares trainer and sampler."""

    @abstractmethod
    def collect(self, step: StepInProgress) -> list[Group]:
        """Collect and return the groups of a step, and add metrics of how they were collected.

        Raises ParityError if they were sampled by weights other than the published ones.
        """

    def settle(self, step: StepInProgress) -> None:
        """Wait for the episodes that are collected during the update of a step; called before its weights are published."""
        return

    def forget(self) -> None:
        """Drop the episodes that were collected for later steps."""
        return

    def state(self) -> dict[str, object]:
        """Return the episodes that were collected for later steps, for a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        return


class CurrentRollouts(Rollouts):
    """Collects the episodes of each step with the current weights."""

    def __init__(self, run: StartedRun, setup: RolloutSetup) -> None:
        self.players, self._run = run.players, run
        self.tasks = tasks_of(setup, run.config)
        self.on_policy = is_on_policy(run.config)

    def collect(self, step: StepInProgress) -> list[Group]:
        """See `Rollouts`."""
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
    """Return whether steps of a run never learn from samples of earlier weights."""
    return not any(section.off_policy for section in sections_of(config).values())


def compare_turns(
    engine: TrainEngine,
    step: StepInProgress,
    turns: Iterable[Turn],
    versions: Mapping[str, int] | None = None,
    weights: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> None:
    """Compare the log-probs of some turns with the trainer's, and merge the gaps into `step.parity`.

    With `versions`, only tokens that these weights sampled are compared. `weights` are the weights that sampled, by default the current ones.
    """
    samples = fresh_samples(turns, step.setup.team, COMPARED, versions)
    step.parity = merge_rows([step.parity, engine.check_parity(samples, weights)])


def make_rollouts(
    run: StartedRun, acting: RolloutSetup, loaded: PreparedRun, closing: ExitStack, *, own_engine: bool
) -> Rollouts:
    """Return the object that collects the episodes of a run with the setup `acting`; `closing` releases what it starts.

    `loaded` is the run with the bases that were loaded, and `own_engine` is whether a rollout engine was passed.
    """
    makers = [section.rollouts for section in sections_of(run.config).values() if section.rollouts]
    if not makers:
        return CurrentRollouts(run, acting)
    made: Rollouts = find_object(makers[0], "feature")(run, acting, loaded, closing, own_engine=own_engine)
    return made


def check_versions(groups: Sequence[Group], allowed: Sequence[Mapping[str, int]]) -> None:
    """Raise ParityError for a turn that was sampled by versions other than `allowed`, the last of which is the published one."""
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
    """The part of a step that one process has collected, by place among the step's groups."""

    groups: Mapping[int, Group]
    """The finished groups."""
    left: Mapping[int, PartialGroup] = field(default_factory=dict)
    """The groups that a later step finishes."""

    @property
    def in_order(self) -> list[Group]:
        """The finished groups, by place."""
        return [self.groups[place] for place in sorted(self.groups)]


def _agree(meeting: Meeting, dead: Sequence[int]) -> list[int]:
    """Return the places of all processes' groups without variance; random generators continue from the first process's state."""
    if meeting.size == 1:
        return list(dead)
    drawn = None if meeting.rank else random_as_lists(capture_random())
    row = json.dumps({"dead": dead, "random": drawn}).encode()
    rows = [json.loads(each) for each in meeting.all_gather("groups without variance", lambda: row)]
    restore_random(random_from_lists(rows[0]["random"]))
    return sorted(place for each in rows for place in each["dead"])


def together(ranks: Ranks, meeting: Meeting, collect: Callable[[], StepShare | bytes]) -> StepShare:
    """Let each rank collect its share and return the whole step in every rank.

    `collect` returns the share, or its bytes (`dump_share`). The global random generators continue from the states of rank 0. An error is
    raised in every rank; other processes at the `meeting` receive it and stop waiting.
    """
    if ranks.size == 1:
        collected = collect()
        return collected if isinstance(collected, StepShare) else load_share(collected)

    def share() -> bytes:
        try:
            collected = collect()
            return collected if isinstance(collected, bytes) else dump_share(collected)
        except BaseException as error:
            meeting.fail(error)
            raise

    parts = [
        load_share(each, draws=rank == 0) for rank, each in enumerate(ranks.all_gather("rollout", share))
    ]
    return StepShare(
        {place: group for part in parts for place, group in part.groups.items()},
        {place: group for part in parts for place, group in part.left.items()},
    )


def dump_share(share: StepShare) -> bytes:
    """Return a share, and the states of the global random generators after it, as lines."""
    groups, left = dump_groups(0, share.groups.values()), dump_partial(share.left.values()).encode()
    head = {"random": random_as_lists(capture_random()), "rows": groups.count(b"\n")}
    head |= {"groups": list(share.groups), "left": list(share.left)}
    return json.dumps(head).encode() + b"\n" + groups + left


def load_share(text: bytes, *, draws: bool = True) -> StepShare:
    """Return the share that `dump_share` has written; with `draws`, the global random generators continue from its states."""
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
