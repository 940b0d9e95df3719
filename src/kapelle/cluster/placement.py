"""Where the actors of a run are placed: the driver lays it out, and each rank reads its own part."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from kapelle.environment import PlayedFromOutside, offers
from kapelle.errors import ConfigError
from kapelle.settings.schema import RayConfig, Resources, RunConfig
from kapelle.team import split_scored

if TYPE_CHECKING:
    from kapelle.setup.preparation import PreparedRun

VARIABLE = "KAPELLE_RAY"
"""Environment variable of a rank that Ray has placed."""


@dataclass(frozen=True, slots=True)
class RolloutPlace:
    """Where one rollout worker is placed."""

    bundle: int | None
    """None for a worker that joins when the cluster has room."""
    worlds: tuple[int | None, ...] = ()
    """Bundles of its environment workers; None as for itself."""
    samplers: tuple[tuple[str, int], ...] = ()
    """Of each pool (`ray.pools`) its name, and the bundle of the sampling worker that it asks."""


@dataclass(frozen=True, slots=True)
class Bundles:
    """The bundles of resources on which one rank may start actors, by number."""

    rollout: tuple[RolloutPlace, ...] = ()
    """Those of the rollout workers that play for this rank."""
    worlds: tuple[int | None, ...] = ()
    """Those of the environment workers of a rank that plays itself."""
    scoring: tuple[int, ...] = ()
    """Those of the scoring workers that this rank asks: of all, every one by the number of ranks, from its own number on."""


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """Where one rank may start actors."""

    address: str
    namespace: str
    group: str
    """Name of the placement group."""
    bundles: Bundles

    def variable(self) -> dict[str, str]:
        """Return it as an environment variable."""
        return {VARIABLE: json.dumps(asdict(self))}


def placement_here(environ: Mapping[str, str] = os.environ) -> RayPlacement | None:
    """Return where this rank may start actors; None if Ray has not placed this process."""
    if VARIABLE not in environ:
        return None
    said = json.loads(environ[VARIABLE])
    own = said["bundles"]
    rollout = tuple(
        RolloutPlace(each["bundle"], tuple(each["worlds"]), tuple((name, k) for name, k in each["samplers"]))
        for each in own["rollout"]
    )
    bundles = Bundles(rollout, tuple(own["worlds"]), tuple(own["scoring"]))
    return RayPlacement(said["address"], said["namespace"], said["group"], bundles)


def check_workers(config: RunConfig, ranks: int) -> None:
    """Raise ConfigError for settings that so many ranks and their rollout workers cannot serve."""
    workers, least = config.ray.rollout_workers, config.ray.least_rollout_workers
    if least is not None:
        if least > workers:
            raise ConfigError(
                f"`ray.least_rollout_workers` is {least}, but `ray.rollout_workers`, the most that there may be, is {workers}. Set "
                f"the first one to {workers} or less, or leave it out."
            )
        if least < ranks:
            raise ConfigError(
                f"`ray.least_rollout_workers` is {least}, but each of {ranks} processes needs a worker of its own that is always "
                f"there. Set it to {ranks} or more."
            )
        if least < workers and config.training.partial_rollouts:
            raise ConfigError(
                "`training.partial_rollouts` lets all rollout workers agree on the end of a step, but with "
                f"`ray.least_rollout_workers: {least}` some of {workers} may not be there. Leave one of the two out."
            )
    if config.ray.pools and config.training.partial_rollouts:
        raise ConfigError(
            "`training.partial_rollouts` breaks off what is sampled, which the sampling workers of `ray.pools` do not. Leave one of the "
            "two out."
        )
    if not workers:
        return
    if workers < ranks and config.training.partial_rollouts:
        raise ConfigError(
            f"`training.partial_rollouts` lets all rollout workers agree on the end of a step, but {workers} of them cannot play for "
            f"{ranks} processes. Set `ray.rollout_workers` to {ranks} or more, or to 0."
        )
    if offers(config.environment, PlayedFromOutside):
        raise ConfigError(
            f"`environment.name: {config.environment.name}` needs the trainer's own process to play, but `ray.rollout_workers` is {workers}. Leave "
            "it out, or set `ray.rollout_workers: 0`."
        )


def check_pools(stages: Sequence[PreparedRun]) -> None:
    """Raise ConfigError for scoring workers that would have nothing to score."""
    workers = stages[0].config.ray.scoring_workers
    if workers and not any(split_scored(stage.team)[1].bases for stage in stages):
        raise ConfigError(
            f"`ray.scoring_workers` is {workers}, but nothing of this run is only scored: no verifier pays or teaches (`reward_model`, "
            "`algorithm.verifier`), and there is no teacher and no embedding model of its own. Leave it out, or name one; references "
            "and critics that learn stay in the trainer's processes."
        )


def lay_out(config: RayConfig, ranks: int, worlds: int) -> tuple[list[Resources], list[Bundles]]:
    """Return the resources of each bundle, and the bundles of each rank; rank k itself is placed on bundle k.

    `worlds` is the number of environment workers of each process that plays. Rollout workers and scoring workers are dealt to the
    ranks in turn. Rollout workers beyond `least_rollout_workers` have no bundle.
    """
    least = config.rollout_workers if config.least_rollout_workers is None else config.least_rollout_workers
    held = [config.trainer] * ranks
    found: list[Bundles] = []

    def more(resources: Resources, count: int) -> tuple[int, ...]:
        held.extend([resources] * count)
        return tuple(range(len(held) - count, len(held)))

    pools = {name: more(pool.takes, pool.workers) for name, pool in config.pools.items()}

    def samplers(number: int) -> tuple[tuple[str, int], ...]:
        return tuple((name, bundles[number % len(bundles)]) for name, bundles in pools.items())

    for rank in range(ranks):
        own = range(rank, config.rollout_workers, ranks)
        if own:
            players = [
                RolloutPlace(more(config.rollout, 1)[0], more(config.environment, worlds), samplers(number))
                if number < least
                else RolloutPlace(None, (None,) * worlds, samplers(number))
                for number in own
            ]
            found.append(Bundles(tuple(players)))
        else:
            found.append(Bundles(worlds=more(config.environment, worlds)))
    scoring = more(config.scoring, config.scoring_workers)
    return held, [replace(each, scoring=scoring[rank::ranks]) for rank, each in enumerate(found)]
