"""Checks that an environment is fit for training, without a model: for built-in environments and for yours.

    findings = await conform(environment)

Each finding names the check and its result. Nothing is sampled from a model: worlds are driven by hand, with the
environment's own script, with nonsense and with attempts to be paid for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kapelle.conformance import checks
from kapelle.conformance.driving import Finding, Unfit, accepts, asked, drive, reason
from kapelle.environment import Environment, Private, Symmetric
from kapelle.errors import EpisodeError, KapelleError
from kapelle.runtime.deadlines import GaveUp

__all__ = ["Finding", "Private", "Symmetric", "conform", "drive"]

TASKS = 12
"""Tasks of each split that are checked."""


async def conform(
    environment: Environment, agents: Sequence[str] | None = None, tasks: int = TASKS
) -> list[Finding]:
    """Return the finding of every check; raises what `Environment.check` raises (missing data, wrong teams).

    `agents` are names in seat order; None uses the smallest team that can play.
    """
    try:
        found = [checks.declared(environment), checks.described(environment)]
    except Unfit as error:
        return [Finding("description", "failed", str(error))]
    if any(each.status == "failed" for each in found):
        return found
    try:
        seats = tuple(agents or _smallest_team(environment))
        asked("check", environment.check, seats)
        chosen = {split: checks.first_tasks(environment, split, tasks) for split in checks.SPLITS}
    except (Unfit, EpisodeError) as error:
        return [*found, Finding("tasks", "failed", str(error))]
    if empty := [split for split, own in chosen.items() if not own]:
        return [
            *found,
            Finding("tasks", "failed", f"the {empty[0]} split has no task: `size('{empty[0]}')` is 0"),
        ]
    train = chosen["train"]
    work: dict[str, Callable[[], Finding | list[Finding] | Awaitable[Finding | list[Finding]]]] = {
        "settings": lambda: checks.settings_survive(environment),
        "tasks": lambda: checks.same_tasks(environment, chosen),
        "other process": lambda: checks.same_in_another_process(environment, chosen),
        "splits": lambda: checks.splits_apart(environment, chosen),
        "determinism": lambda: checks.same_worlds(environment, train, seats),
        "private views": lambda: checks.private_views(environment, train, seats),
        "rewards": lambda: checks.rewards_in_range(environment, train, seats),
        "records": lambda: checks.outcomes_kept(environment, train, seats),
        "seats": lambda: checks.seats_alike(environment, train, seats),
        "gold": lambda: checks.gold_pays(environment, chosen),
    }
    for name, each in work.items():
        try:
            result = each()
            if isinstance(result, Awaitable):
                result = await result
        except (KapelleError, KeyboardInterrupt, asyncio.CancelledError) as error:
            if not isinstance(error, EpisodeError):
                raise
            result = Finding(name, "failed", str(error))
        except Unfit as error:
            # Every further check would stumble over the same method.
            return [*found, Finding(name, "failed", str(error))]
        except (Exception, GaveUp, SystemExit) as error:  # noqa: BLE001 - the environment's own code
            return [*found, Finding(name, "failed", f"the environment's code raises {reason(error)}")]
        found += result if isinstance(result, list) else [result]
    return found


def _smallest_team(environment: Environment) -> tuple[str, ...]:
    """Return the smallest team of up to eight agents that the environment accepts; if none is, its check will raise."""
    teams = [tuple(f"agent_{k}" for k in range(size)) for size in range(1, 9)]
    return next((names for names in teams if accepts(environment, names)), teams[0])
