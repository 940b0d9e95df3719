"""Checks that an environment is fit for training, without a model: for built-in environments and for yours.

    findings = await conform(environment)

Each finding names the check and its result. Nothing is sampled from a model: worlds are driven by hand, with the
environment's own script, with nonsense and with attempts to be paid for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kapelle.conformance.driving import accepts, drive
from kapelle.conformance.finding import Finding
from kapelle.conformance.solutions import gold_pays
from kapelle.conformance.tasks import (
    SPLITS,
    first_tasks,
    same_in_another_process,
    same_tasks,
    settings_survive,
    splits_apart,
)
from kapelle.conformance.worlds import (
    outcomes_kept,
    private_views,
    rewards_in_range,
    same_worlds,
    seats_alike,
)
from kapelle.environment import Environment, Private, Symmetric

__all__ = ["Finding", "Private", "Symmetric", "conform", "drive"]

TASKS = 12
"""Tasks of each split that are checked."""


async def conform(
    environment: Environment, agents: Sequence[str] | None = None, tasks: int = TASKS
) -> list[Finding]:
    """Return the finding of every check; raises what `Environment.check` raises (missing data, wrong teams).

    `agents` are names in seat order; None uses the smallest team that can play.
    """
    seats = tuple(agents or _smallest_team(environment))
    environment.check(seats)
    chosen = {split: first_tasks(environment, split, tasks) for split in SPLITS}
    findings = [
        settings_survive(environment),
        same_tasks(environment, chosen),
        same_in_another_process(environment, chosen),
        splits_apart(environment, chosen),
        await same_worlds(environment, chosen["train"], seats),
        await private_views(environment, chosen["train"], seats),
        await rewards_in_range(environment, chosen["train"], seats),
        await outcomes_kept(environment, chosen["train"], seats),
        await seats_alike(environment, chosen["train"], seats),
    ]
    return findings + await gold_pays(environment, chosen)


def _smallest_team(environment: Environment) -> tuple[str, ...]:
    """Return the smallest team of up to eight agents that the environment accepts; if none is, its check will raise."""
    teams = [tuple(f"agent_{k}" for k in range(size)) for size in range(1, 9)]
    return next((names for names in teams if accepts(environment, names)), teams[0])
