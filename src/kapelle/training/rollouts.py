"""The episodes of a training step, which all ranks collect together, and the weights that sample them."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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
from kapelle.training.collate import fresh_samples
from kapelle.training.feature import LoadsWeights, StartedRun, StepInProgress
from kapelle.training.selection import TrainingTasks, tasks_of
from kapelle.types import Group, Turn

COMPARED = 16
"""Number of turns per policy to compare with the trainer's log-probs when samples of older weights are collected."""


class Rollouts:
    """Collects the episodes of each step with the current weights. Features replace it with subclasses."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        setup: RolloutSetup,
        engine: TrainEngine,
        players: Sequence[LoadsWeights] = (),
    ) -> None:
        self._config, self._algorithm, self._engine, self._team = config, algorithm, engine, setup.team
        self.players = players
        """All samplers for training; they get the weights of each update."""
        self.tasks = tasks_of(setup, config)
        """The tasks of every step."""
        self.on_policy = not any(section.off_policy for section in sections_of(config).values())
        """Whether steps learn from samples of the current weights alone; the update then compares trainer and sampler."""

    def collect(self, step: StepInProgress) -> list[Group]:
        """Collect and return the groups of a step, and add metrics of how they were collected.

        Raises ParityError if other weights than the published ones sampled them.
        """
        setup = self.prepared(step)
        versions = dict(self._engine.versions)
        groups = collect_step(setup, self._config, self._algorithm, self.tasks, step.number)
        if self._algorithm.plays:
            check_versions(groups, [versions])
            if not self.on_policy:
                self.compare(step, [turn for _, turn in turns_of(groups)])
                setup.engine.release_caches()
        step.metrics |= {**step.parity, **self.tasks.metrics()}
        return groups

    def prepared(self, step: StepInProgress) -> RolloutSetup:
        """Prepare the tasks of a step, and return the setup of its episodes."""
        self.tasks.measure(step.setup)
        self.tasks.assign = step.assign
        return replace(step.setup, data=self._algorithm.data)

    def compare(
        self,
        step: StepInProgress,
        turns: Iterable[Turn],
        versions: Mapping[str, int] | None = None,
        weights: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Compare the log-probs of some turns with the trainer's, and merge the gaps into `step.parity`.

        With `versions`, only the tokens that these weights sampled. `weights` are those that sampled; by default the current
        ones.
        """
        samples = fresh_samples(turns, self._team, COMPARED, versions)
        step.parity = merge_rows([step.parity, self._engine.check_parity(samples, weights)])

    def settle(self, step: StepInProgress) -> None:
        """Wait for the episodes that are collected during the update of a step; called before its weights are published."""

    def forget(self) -> None:
        """Drop the episodes that were collected for later steps."""

    def state(self) -> dict[str, object]:
        """Return the episodes that were collected for later steps, for a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""


def make_rollouts(
    run: StartedRun,
    acting: RolloutSetup,
    bases: Mapping[str, str],
    in_memory: Container[str],
    closing: ExitStack,
    *,
    own_engine: bool,
) -> Rollouts:
    """Return the object that collects the episodes of a run with the setup `acting`; `closing` releases what it starts.

    `bases` are the paths of the team's bases by name, `in_memory` the paths of models that were passed, and `own_engine` is
    whether a rollout engine was passed.
    """
    makers = [section.rollouts for section in sections_of(run.config).values() if section.rollouts]
    if not makers:
        return Rollouts(run.config, run.algorithm, acting, run.engine, run.players)
    made: Rollouts = find_object(makers[0], "feature")(
        run, acting, bases, in_memory, closing, own_engine=own_engine
    )
    return made


def check_versions(groups: Sequence[Group], allowed: Sequence[Mapping[str, int]]) -> None:
    """Raise ParityError for a turn that was sampled by other versions than `allowed`, the last of which is the published one."""
    sampled = {(turn.policy, version): turn.agent for _, turn in turns_of(groups) for version, _ in turn.runs}
    for (policy, version), agent in sampled.items():
        if all(version != versions[policy] for versions in allowed):
            raise ParityError(
                f"Agent '{agent}' sampled with version {version} of policy '{policy}', but version "
                f"{allowed[-1][policy]} was published: the rollout engine did not take the new weights."
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


def collect_step(
    setup: RolloutSetup, config: RunConfig, algorithm: Algorithm, source: TrainingTasks, number: int
) -> list[Group]:
    """Collect the episodes of the tasks of step `number` (from 1), each rank its share.

    With `redraw`, groups without variance are replaced by further tasks. The result depends only on the settings, the number and
    the weights.
    """
    meeting = setup.ranks.meeting()
    meeting.begin()
    share = begin_share(setup, config, algorithm, source, number, meeting)
    return together(setup.ranks, meeting, share).in_order


def begin_share(
    setup: RolloutSetup,
    config: RunConfig,
    algorithm: Algorithm,
    source: TrainingTasks,
    number: int,
    meeting: Meeting,
) -> Callable[[], StepShare]:
    """Begin with this process's share of a step, and return a function that finishes it.

    Groups are assigned in turn to all processes at the `meeting`. Rollout workers begin now; an engine of this process begins when
    the function is called.
    """
    seed, tasks = derive_seed(config.seed, "rollout", number), source.of(number)
    own = range(meeting.rank, len(tasks), meeting.size)
    collected = request_groups(setup, tasks, algorithm.data.group_size, seed, own)
    return partial(_with_redraws, collected, setup, algorithm, source, number, seed, meeting)


def _with_redraws(
    collected: Callable[[], list[Group]],
    setup: RolloutSetup,
    algorithm: Algorithm,
    source: TrainingTasks,
    number: int,
    seed: int,
    meeting: Meeting,
) -> StepShare:
    """Return this process's share; groups without variance are replaced up to `redraw` times."""
    data, returns = algorithm.data, algorithm.returns or own_returns
    groups = {meeting.rank + k * meeting.size: group for k, group in enumerate(collected())}
    for attempt in range(1, data.redraw + 1):
        dead = _agree(meeting, [place for place, group in groups.items() if is_dead(group, returns)])
        if not dead:
            break
        tasks = source.of(number, attempt)
        own = range(meeting.rank, len(dead), meeting.size)
        other_seed = derive_seed(seed, "redraw", attempt)
        replacements = request_groups(setup, [tasks[k] for k in dead], data.group_size, other_seed, own)()
        groups = {place: group for place, group in groups.items() if place not in dead}
        groups |= {dead[k]: group for k, group in zip(own, replacements, strict=True)}
    return StepShare(groups)


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

    `collect` returns the share, or its bytes (`dump_share`). The global random generators continue as those of rank 0. An error is
    raised in every rank; other processes at the `meeting` receive it, and stop waiting.
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
    """Return the share that `dump_share` has written; with `draws` the global random generators continue from its states."""
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
