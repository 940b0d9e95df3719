"""What a recipe may say of what a run keeps: checkpoints, episodes, credit of tokens, trackers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from kapelle.settings.base import Settings

EVERYONE = "*"
"""In `start_from`: every policy that is trained and has no entry of its own."""


def by_agent(value: object) -> object:
    """Return `start_from` as a mapping where one folder is named for all."""
    return {EVERYONE: value} if isinstance(value, str) else value


StartFrom = Annotated[dict[str, str], BeforeValidator(by_agent)]


class CheckpointConfig(Settings):
    """When to save checkpoints and how many to keep."""

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    best: str | None = None
    """Metric of evaluations, or else of steps, whose best checkpoint is kept beside the newest: `success`, `reward/solver`. One is
    saved after every evaluation that is better than all before."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Whether the best value of `best` is the highest or the lowest."""
    background: bool = False
    """Whether the next steps are taken while a checkpoint is written, from a copy in the machine's memory. One is written at a
    time; it counts when it is sealed."""


class EpisodesConfig(Settings):
    """How long recorded episodes are kept; older ones are deleted after a checkpoint, in whole files of up to 16 steps."""

    keep: int | None = Field(default=None, ge=1)
    """Newest training steps whose episodes and traces are kept for certain; null keeps all."""
    keep_evaluations: int | None = Field(default=None, ge=1)
    """Newest training steps whose evaluations' episodes are kept for certain; null keeps all."""


class RecordConfig(Settings):
    """What a run records for people who look at it, beside what it needs itself."""

    credit_episodes: int = Field(default=2, ge=0)
    """Episodes per step of which each token's advantage, credit, ratio and entropy are kept: the best and the worst of the
    groups whose returns differ most. 0 keeps none."""


class TrackerConfig(Settings):
    """A tracker in addition to the files of the run directory."""

    name: Literal["tensorboard", "wandb", "mlflow", "trackio"]
    project: str = "kapelle"
    """Name of the project, or of MLflow's experiment."""
    offline: bool = True
    """Keep everything on this machine, where the tracker can."""
    transcripts: int = Field(default=10, ge=0)
    """Steps between two tables of what a few episodes' agents said; 0 sends none."""
