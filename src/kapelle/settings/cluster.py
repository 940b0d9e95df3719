"""What a recipe says of a cluster that Ray places a run on (`kapelle train … --launch ray`)."""

from __future__ import annotations

from pydantic import Field

from kapelle.settings.base import Settings


class Resources(Settings):
    """What one actor takes of a machine; Ray counts it, and keeps nobody from using more."""

    cpus: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Cores; also the number of threads that torch uses, at least one."""
    gpus: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """GPUs; a share of one lets actors live on the same GPU. An actor sees no others."""


class RayConfig(Settings):
    """What `--launch ray` places on a cluster, and what each of it takes."""

    address: str | None = None
    """The cluster's address (`auto`, or `host:port`); null starts a Ray of its own on this machine, which ends with the run."""
    rollout_workers: int = Field(default=1, ge=0)
    """Actors that play episodes, shared out over the ranks of the trainer; 0 lets the ranks play, as without Ray."""
    trainer: Resources = Resources()
    """What each rank of the trainer takes."""
    rollout: Resources = Resources()
    """What each rollout worker takes."""
    environment: Resources = Resources()
    """What each environment worker takes; `episode.environment_workers` says how many each process that plays has."""
    spread: bool = False
    """Whether actors are put on as many machines as possible; otherwise on as few."""
    timeout: float = Field(default=60.0, gt=0.0, allow_inf_nan=False)
    """Seconds that the cluster has to find room for all of them, and each actor to start."""
