"""Choose how the episodes of a run are collected ahead of its updates."""

from __future__ import annotations

from contextlib import ExitStack

from kapelle.engines.rollout.protocol import Interruptible
from kapelle.errors import ConfigError
from kapelle.features.ahead.asynchronous import AsynchronousRollouts, Sampler
from kapelle.features.ahead.process import SamplingProcess
from kapelle.features.ahead.queue import RolloutsAhead
from kapelle.rollout.episodes import CollectsGroups
from kapelle.rollout.setup import RolloutSetup
from kapelle.setup.preparation import PreparedRun
from kapelle.training.feature import StartedRun
from kapelle.training.rollouts import CurrentRollouts, Rollouts


def rollouts_ahead(
    run: StartedRun, acting: RolloutSetup, loaded: PreparedRun, closing: ExitStack, *, own_engine: bool
) -> Rollouts:
    """Return the object that collects the episodes of a run ahead of its updates.

    The arguments are the same as those of `make_rollouts`. Raises ConfigError if another process cannot create the engine.
    """
    config, bases, player = run.config, loaded.team.bases, run.setup.engine
    if not run.algorithm.collects_episodes:
        return CurrentRollouts(run, acting)
    if not config.training.asynchronous:
        return RolloutsAhead(run, acting)
    sampler: Sampler
    if isinstance(player, CollectsGroups):
        sampler = player
    else:
        elsewhere = "`training.asynchronous` samples in another process, which"
        passed = [path for path in bases.values() if path in loaded.given]
        if passed:
            raise ConfigError(
                f"{elsewhere} reads models from the disk, but the model '{passed[0]}' is in this process's memory. Save it and set "
                "`model.path` to its folder, or set `training.asynchronous: false`."
            )
        if own_engine:
            raise ConfigError(
                f"{elsewhere} cannot use the rollout engine that was passed. Set the engine in the recipe (`engine`), or set "
                "`training.asynchronous: false`."
            )
        if not isinstance(player, Interruptible):
            raise ConfigError(
                f"`training.asynchronous` loads new weights while episodes continue, but the engine {type(player).__name__} cannot pause "
                "its requests. Make it inherit from `Interruptible`, or set `training.asynchronous: false`."
            )
        process = SamplingProcess(config, run.team, bases, run.base_hashes, run.engine)
        closing.callback(process.close)
        sampler = process
    return AsynchronousRollouts(run, acting, sampler)
