"""Compute the placement of a run's actors. The driver computes the placement, and each rank reads its own part."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from kapelle.environment import DrivenByPrograms, offers
from kapelle.errors import ConfigError
from kapelle.settings.schema import RayConfig, Resources, RunConfig
from kapelle.team import split_scored

if TYPE_CHECKING:
    from kapelle.setup.preparation import PreparedRun

VARIABLE = "KAPELLE_RAY"
"""Name of the environment variable that contains the placement of a rank."""


@dataclass(frozen=True, slots=True)
class RolloutPlace:
    """The bundles of resources for one rollout worker and its helpers."""

    bundle: int | None
    """Index of the bundle, or None for a worker that joins when the cluster has free resources."""
    worlds: tuple[int | None, ...] = ()
    """Indices of the bundles of the worker's environment workers, or None for those that start when the cluster has free resources."""
    samplers: tuple[tuple[str, int], ...] = ()
    """Pairs of the name of a pool (`ray.pools`) and the index of the bundle of its sampling worker."""


@dataclass(frozen=True, slots=True)
class Bundles:
    """The indices of the bundles of resources on which one rank may start actors."""

    rollout: tuple[RolloutPlace, ...] = ()
    """Bundles of the rank's rollout workers."""
    worlds: tuple[int | None, ...] = ()
    """Bundles of the environment workers of a rank without rollout workers."""
    scoring: tuple[int, ...] = ()
    """Bundles of the rank's scoring workers. Scoring workers are assigned to the ranks in turn."""


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """The bundles on which one rank may start actors, and how the rank connects to the cluster."""

    address: str
    namespace: str
    group: str
    """Name of the placement group of the run."""
    bundles: Bundles

    def variable(self) -> dict[str, str]:
        """Return the placement as an environment variable for the process of the rank."""
        return {VARIABLE: _FORM.dump_json(self).decode()}


_FORM = TypeAdapter(RayPlacement)


def placement_here(environ: Mapping[str, str] = os.environ) -> RayPlacement | None:
    """Return the placement of this rank from its environment variable, or None if Ray has not placed this process."""
    return _FORM.validate_json(environ[VARIABLE]) if VARIABLE in environ else None


def check_workers(config: RunConfig, ranks: int) -> None:
    """Raise ConfigError if the settings are not possible with this number of ranks and rollout workers."""
    workers, least = config.ray.rollout_workers, config.ray.least_rollout_workers
    asynchronous = config.training.asynchronous
    if least is not None and least > workers:
        raise ConfigError(
            f"`ray.least_rollout_workers` is {least}, which exceeds `ray.rollout_workers`. Set it to {workers} or less."
        )
    if least is not None and least < ranks:
        raise ConfigError(
            f"`ray.least_rollout_workers` is {least}, but each of {ranks} processes needs a worker. Set it to {ranks} or more."
        )
    if least is not None and least < workers and asynchronous:
        raise ConfigError(
            f"`training.asynchronous` needs all of {workers} rollout workers. Remove it, or `ray.least_rollout_workers`."
        )
    if config.ray.pools and asynchronous:
        raise ConfigError("`ray.pools` does not support `training.asynchronous`. Remove one of the two.")
    if workers and workers < ranks and asynchronous:
        raise ConfigError(
            f"`training.asynchronous` needs a rollout worker for each of {ranks} processes. Set `ray.rollout_workers` to {ranks} "
            "or more, or to 0."
        )
    if workers and offers(config.environment, DrivenByPrograms):
        raise ConfigError(
            f"`environment.name: {config.environment.name}` runs in the trainer's process. Set `ray.rollout_workers: 0`."
        )


def check_pools(stages: Sequence[PreparedRun]) -> None:
    """Raise ConfigError if there are scoring workers but no model that only scores."""
    workers = stages[0].config.ray.scoring_workers
    if workers and not any(split_scored(stage.team)[1].bases for stage in stages):
        raise ConfigError(
            f"`ray.scoring_workers` is {workers}, but this run has no model that only scores. Add a verifier (`reward_model`, "
            "`algorithm.verifier`), a teacher or an embedding model, or remove the setting."
        )


def lay_out(config: RayConfig, ranks: int, worlds: int) -> tuple[list[Resources], list[Bundles]]:
    """Return the resources of each bundle, and the bundles of each rank. Rank k itself uses bundle k.

    The argument `worlds` is the number of environment workers of each process that rolls out episodes. Rollout workers and scoring
    workers are assigned to the ranks in turn. Rollout workers beyond the first `least_rollout_workers` have no bundle.
    """
    least = config.rollout_workers if config.least_rollout_workers is None else config.least_rollout_workers
    resources = [config.trainer] * ranks
    found: list[Bundles] = []

    def more(each: Resources, count: int) -> tuple[int, ...]:
        resources.extend([each] * count)
        return tuple(range(len(resources) - count, len(resources)))

    pools = {name: more(pool.takes, pool.workers) for name, pool in config.pools.items()}
    for rank in range(ranks):
        own = range(rank, config.rollout_workers, ranks)
        places = []
        for number in own:
            samplers = tuple((name, bundles[number % len(bundles)]) for name, bundles in pools.items())
            if number < least:
                bundle = more(config.rollout, 1)[0]
                places.append(RolloutPlace(bundle, more(config.environment, worlds), samplers))
            else:
                places.append(RolloutPlace(None, (None,) * worlds, samplers))
        found.append(Bundles(tuple(places)) if own else Bundles(worlds=more(config.environment, worlds)))
    scoring = more(config.scoring, config.scoring_workers)
    return resources, [replace(each, scoring=scoring[rank::ranks]) for rank, each in enumerate(found)]
