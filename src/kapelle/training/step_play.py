"""The episodes of one step of training."""

from __future__ import annotations

from kapelle.algorithm import Algorithm
from kapelle.metrics.definitions import is_dead, own_returns
from kapelle.rollout.play import Play
from kapelle.rollout.shared import shared_rollout
from kapelle.runtime.seeds import derive_seed
from kapelle.settings.schema import RunConfig
from kapelle.training.tasks import training_tasks
from kapelle.types import Group


def play_step(play: Play, config: RunConfig, algorithm: Algorithm, number: int) -> list[Group]:
    """Play the tasks of step `number` (from 1); with `redraw`, replace groups without variance by further tasks.

    Depends on the settings, the number and the weights alone: in whichever process it runs, the episodes are the same.
    """
    data = algorithm.data
    seed = derive_seed(config.seed, "rollout", number)
    tasks = training_tasks(play.environment, config, number)
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
    return groups
