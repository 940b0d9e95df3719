"""Where the actors of a run are placed: the driver lays it out, and each rank reads its own part."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kapelle.environments.external import External
from kapelle.errors import ConfigError
from kapelle.settings.schema import RayConfig, Resources, RunConfig

VARIABLE = "KAPELLE_RAY"
"""Environment variable of a rank that Ray has placed."""


@dataclass(frozen=True, slots=True)
class RolloutPlace:
    """Where one rollout worker is placed."""

    bundle: int
    worlds: tuple[int, ...] = ()
    """Bundles of its environment workers."""


@dataclass(frozen=True, slots=True)
class Bundles:
    """The bundles of resources on which one rank may start actors, by number."""

    rollout: tuple[RolloutPlace, ...] = ()
    """Those of the rollout workers that play for this rank."""
    worlds: tuple[int, ...] = ()
    """Those of the environment workers of a rank that plays itself."""


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
    rollout = tuple(RolloutPlace(each["bundle"], tuple(each["worlds"])) for each in own["rollout"])
    bundles = Bundles(rollout, tuple(own["worlds"]))
    return RayPlacement(said["address"], said["namespace"], said["group"], bundles)


def check_workers(config: RunConfig) -> None:
    """Raise ConfigError for settings that need rollouts in the trainer's own process."""
    if not config.ray.rollout_workers:
        return
    for key, asked in (
        ("training.overlap", config.training.overlap),
        ("training.partial_rollouts", config.training.partial_rollouts),
        ("environment.name: external", isinstance(config.environment, External)),
    ):
        if asked:
            raise ConfigError(
                f"`{key}` needs the trainer's own process to play, but `ray.rollout_workers` is {config.ray.rollout_workers}. Leave "
                "it out, or set `ray.rollout_workers: 0`."
            )


def lay_out(config: RayConfig, ranks: int, worlds: int) -> tuple[list[Resources], list[Bundles]]:
    """Return the resources of each bundle, and the bundles of each rank; rank k itself is placed on bundle k.

    `worlds` is the number of environment workers of each process that plays. Rollout workers are dealt to the ranks in turn.
    """
    held = [config.trainer] * ranks
    found: list[Bundles] = []

    def more(resources: Resources, count: int) -> tuple[int, ...]:
        held.extend([resources] * count)
        return tuple(range(len(held) - count, len(held)))

    for rank in range(ranks):
        own = range(rank, config.rollout_workers, ranks)
        if own:
            players = [(more(config.rollout, 1)[0], more(config.environment, worlds)) for _ in own]
            found.append(Bundles(tuple(RolloutPlace(*each) for each in players)))
        else:
            found.append(Bundles(worlds=more(config.environment, worlds)))
    return held, found
