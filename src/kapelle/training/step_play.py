"""The episodes of one step of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kapelle.algorithm import Algorithm
from kapelle.metrics.definitions import is_dead, own_returns
from kapelle.rollout.further import Enough, begun, play_groups
from kapelle.rollout.play import Play
from kapelle.rollout.shared import shared_rollout
from kapelle.rollout.under_way import GroupUnderWay
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.seeds import derive_seed
from kapelle.settings.schema import RunConfig, TrainingConfig
from kapelle.training.tasks import training_tasks
from kapelle.types import Group


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """What a step has played."""

    groups: list[Group]
    """Those that are done: what is learned from."""
    left: tuple[GroupUnderWay, ...] = ()
    """Those that the next step goes on with (`training.partial_rollouts`)."""


def play_step(
    play: Play, config: RunConfig, algorithm: Algorithm, number: int, left: Sequence[GroupUnderWay] = ()
) -> PlayedStep:
    """Play the tasks of step `number` (from 1); with `redraw`, replace groups without variance by further tasks.

    `left` is what the step before has left. Depends on it, the settings, the number and the weights alone: in whichever
    process it runs, the episodes are the same.
    """
    data = algorithm.data
    seed = derive_seed(config.seed, "rollout", number)
    tasks = training_tasks(play.environment, config, number)
    if config.training.partial_rollouts:
        pool = [*left, *begun(tasks, data.group_size, seed, number)]
        return _play_on(play, config.training, number, pool)
    groups = shared_rollout(play, tasks, data.group_size, seed)
    returns = algorithm.returns or own_returns
    for attempt in range(1, data.redraw + 1):
        dead = [k for k, group in enumerate(groups) if is_dead(group, returns)]
        if not dead:
            break
        others = training_tasks(play.environment, config, number, attempt)
        again, other_seed = [others[k] for k in dead], derive_seed(seed, "redraw", attempt)
        fresh = shared_rollout(play, again, data.group_size, other_seed)
        for k, group in zip(dead, fresh, strict=True):
            groups[k] = group
    return PlayedStep(groups)


def steps_ahead(training: TrainingConfig) -> int:
    """Return how many steps are played before the one that is learned from.

    All that `max_staleness` allows; with `partial_rollouts` one at most, so that episodes may be left for the others.
    """
    return min(1, training.max_staleness - 1) if training.partial_rollouts else training.max_staleness


def enough_for(training: TrainingConfig, number: int, groups: Sequence[GroupUnderWay]) -> Enough:
    """Return when the play of step `number` may leave the rest of these groups.

    When no more of them are left than may be, and those are done that would become older than `max_staleness` allows.
    """
    most = min(training.tasks_per_step - 1, max(1, int(training.partial_rollouts * training.tasks_per_step)))
    oldest = number - (training.max_staleness - steps_ahead(training))
    must = [place for place, group in enumerate(groups) if group.number <= oldest]

    def enough(done: Sequence[bool]) -> bool:
        return all(done[place] for place in must) and sum(done) >= len(groups) - most

    return enough


def _play_on(
    play: Play, training: TrainingConfig, number: int, groups: Sequence[GroupUnderWay]
) -> PlayedStep:
    """Play groups until the rest of them may be left."""
    played = run_async(lambda: play_groups(play, groups, enough_for(training, number, groups)))
    done = [each.group for each in played if each.done]
    return PlayedStep(done, tuple(each for each in played if not each.done))
