"""`kapelle play RUN --exact`: exact values of a run's checkpoints in a game small enough to enumerate."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kapelle.cli.output import say
from kapelle.environment import Mixed
from kapelle.errors import ConfigError
from kapelle.runs.findings import keep_exact

if TYPE_CHECKING:
    from kapelle.evaluation.exploitability import Exact
    from kapelle.rollout.play import Play
    from kapelle.training.trainer import Trainer

    Row = tuple[str, Exact]

TITLES = ("policy", "NashConv", "exploitability", "legal moves", "expected returns by seat")
COLUMNS = "{:12}  {:>8}  {:>14}  {:>11}  {}"


def report(path: Path, settings: Sequence[str]) -> None:
    """Print NashConv, exploitability, smallest share of legal moves and returns of every checkpoint and of averages.

    For a mixture, this covers each game that can be enumerated; the others are listed with the reason. Raises
    ConfigError when there is no such game; see `exploitability.language_table`.
    """
    from kapelle.training.trainer import Trainer

    trainer = Trainer.from_run(path, *settings)
    environment = trainer.play.environment
    if not isinstance(environment, Mixed):
        _keep(path, {"": _report(path, trainer, trainer.play)})
        return
    reasons = []
    found: dict[str, list[Row]] = {}
    for part, game in environment.members.items():
        try:
            rows = list(_rows(path, trainer, replace(trainer.play, environment=game)))
        except ConfigError as error:
            reasons.append(f"{part}: {error}")
            continue
        say(f"{part}\n{COLUMNS.format(*TITLES)}")
        for row in rows:
            say(_line(*row))
        found[part] = rows
    for reason in reasons:
        say(reason)
    if len(reasons) == len(environment.members):
        raise ConfigError(f"No game of the mixture in {path} has exact values.")
    _keep(path, found)


def _report(path: Path, trainer: Trainer, play: Play) -> list[Row]:
    rows = []
    say(COLUMNS.format(*TITLES))
    for row in _rows(path, trainer, play):
        say(_line(*row))
        rows.append(row)
    return rows


def _keep(path: Path, found: Mapping[str, Sequence[Row]]) -> None:
    """Leave the values of each checkpoint in the run, for `kapelle view`."""
    rows = [
        {"part": part, "step": int(name), "nash_conv": exact.nash_conv, "exploitability": exact.exploitability, "legal": exact.legal, "returns": list(exact.returns)}
        for part, own in found.items()
        for name, exact in own
        if name.isdecimal()
    ]  # fmt: skip
    keep_exact(path, rows)


def _rows(path: Path, trainer: Trainer, play: Play) -> Iterator[Row]:
    """Yield the policies of one game with their values; ConfigError when it cannot be enumerated or nothing is saved yet."""
    from kapelle.evaluation.exploitability import average, checkpoint_tables, evaluate_table, uniform_table

    game = play.environment
    yield ("uniform", evaluate_table(game, uniform_table(game)))
    tables = []
    saved = checkpoint_tables(play, trainer.engine, path / "checkpoints", lambda line: say(line, sys.stderr))
    for name, table in saved:
        tables.append(table)
        yield (name.lstrip("0") or "0", evaluate_table(game, table))
    if not tables:
        raise ConfigError(
            f"{path} has no whole checkpoint of a step yet. Train on, or set `checkpoint.every` lower."
        )
    if len(tables) > 1:
        yield ("average", evaluate_table(game, average(game, tables)))
    if len(tables) > 3:  # the first ones play worst, and they weigh on the average for long
        yield ("later half", evaluate_table(game, average(game, tables[len(tables) // 2 :])))


def _line(name: str, exact: Exact) -> str:
    returns = ", ".join(f"{value:+.3f}" for value in exact.returns)
    return COLUMNS.format(
        name, f"{exact.nash_conv:.3f}", f"{exact.exploitability:.3f}", f"{exact.legal:.3f}", returns
    )
