"""`kapelle play RUN --exact`: what the checkpoints of a run are worth in a game small enough to enumerate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kapelle.cli.output import say
from kapelle.errors import ConfigError

COLUMNS = "{:12}  {:>8}  {:>14}  {:>11}  {}"


def report(path: Path, settings: Sequence[str]) -> None:
    """Print NashConv, exploitability, least share of legal moves and returns of every checkpoint and their averages.

    Raises ConfigError for a game that cannot be enumerated; see `tabular.language_table`.
    """
    from kapelle.tabular import Exact, average, checkpoint_tables, evaluate_table, uniform_table
    from kapelle.trainer import Trainer

    def row(name: str, exact: Exact) -> str:
        returns = ", ".join(f"{value:+.3f}" for value in exact.returns)
        return COLUMNS.format(
            name, f"{exact.nash_conv:.3f}", f"{exact.exploitability:.3f}", f"{exact.legal:.3f}", returns
        )

    trainer = Trainer.from_run(path, *settings)
    game = trainer.play.environment
    say(COLUMNS.format("policy", "NashConv", "exploitability", "legal moves", "expected returns by seat"))
    say(row("uniform", evaluate_table(game, uniform_table(game))))
    tables = []
    for name, table in checkpoint_tables(trainer.play, trainer.engine, path / "checkpoints"):
        tables.append(table)
        say(row(name.lstrip("0") or "0", evaluate_table(game, table)))
    if not tables:
        raise ConfigError(f"{path} has no checkpoint yet. Train on, or set `checkpoint.every` lower.")
    if len(tables) > 1:
        say(row("average", evaluate_table(game, average(game, tables))))
    if len(tables) > 3:  # the first ones played worst, and an average forgets them slowly
        say(row("later half", evaluate_table(game, average(game, tables[len(tables) // 2 :]))))
