"""How the ranks of a run begin: they join, find out that all run the same, and the first one opens the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kapelle.environments.external import External
from kapelle.errors import ConfigError
from kapelle.runtime.ranks import ALONE, Ranks, check_same, seat_here, told
from kapelle.runtime.trees import leaves
from kapelle.settings.schema import RunConfig
from kapelle.team import Team
from kapelle.training.circumstances import circumstances
from kapelle.training.observer import Silent
from kapelle.training.records import Records

WAITING = 1800.0
"""Seconds for which a rank waits for the others where the train engine has no `timeout`."""


def join_ranks(config: RunConfig) -> Ranks:
    """Return the processes that a launcher has started with this one, joined; `ALONE` without a launcher."""
    if seat_here() is None:
        return ALONE
    from kapelle.runtime.rank_group import ranks_here

    return ranks_here(float(getattr(config.train_engine, "timeout", WAITING)))


def check_same_run(ranks: Ranks, config: RunConfig, team: Team, began_from: Mapping[str, Path]) -> None:
    """Raise ConfigError in every rank unless all have the same settings, data, weights and versions.

    Also for settings that need a single process.
    """
    if ranks.size == 1:
        return
    _refuse_what_one_process_does(ranks, config)
    own = {f"`{key}`": value for key, value in leaves(config.model_dump(mode="json"), "")}
    for kind, found in circumstances(config, team, began_from).items():
        if kind != "machine":
            own |= {
                f"{kind[:-1] if kind == 'versions' else kind} of {name}": value
                for name, value in found.items()
            }
    check_same(ranks, "start", own)


def _refuse_what_one_process_does(ranks: Ranks, config: RunConfig) -> None:
    training, environment = config.training, config.environment
    if training.overlap:
        raise ConfigError(
            f"`training.overlap` samples in a second process, but {ranks.size} processes share the sampling already. Set "
            "`training.overlap: false`."
        )
    if training.partial_rollouts:
        raise ConfigError(
            f"`training.partial_rollouts` leaves groups to the next step when enough others are done, which none of {ranks.size} "
            "processes knows of the others'. Set `training.partial_rollouts: 0`, or train in one process."
        )
    if isinstance(environment, External) and not environment.command:
        raise ConfigError(
            f"`environment.name: external` without a `command` waits for programs that call one server, but each of {ranks.size} "
            "processes serves its own episodes. Name the program in `environment.command`, or train in one process."
        )
    if isinstance(environment, External) and environment.port:
        raise ConfigError(
            f"`environment.port` is {environment.port}, but each of {ranks.size} processes serves its own episodes on a port of "
            "its own. Set `environment.port: 0`."
        )


def of_the_first(ranks: Ranks, opened: Callable[[], Records]) -> Records:
    """Return the records of a run; those of all ranks but the first record nothing."""
    held: list[Records] = []
    told(ranks, "records", lambda: held.append(opened()))
    return held[0] if held else Records(None, Silent())
