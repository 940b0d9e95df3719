"""Implements `kapelle blame`, which measures the agents whose turns made episodes fail.

The measurement samples continuations from before and after each turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.cli.named import check_changeable
from kapelle.cli.output import command, new_file, table, writing
from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.cli.stopping import exit_code
from kapelle.errors import ConfigError
from kapelle.runs.blamed import QUOTED, drop_text
from kapelle.runtime.console import printable, say
from kapelle.runtime.files import write_all
from kapelle.training.console import Lines, Watch

if TYPE_CHECKING:
    from kapelle.runs.blamed import Blame, BlamedEpisode, BlamedTurn

STDOUT = "-"
"""The value of `--json` if no file is given."""
LEGEND = (
    "drop: the probability of success before the turn minus that after it, mean ± standard error over episodes; lost: failed episodes in "
    "which this turn has the largest drop"
)


def run(arguments: argparse.Namespace) -> int:
    """Run the measurement, and print how much the turns of each agent lowered the probability of success."""
    hush()
    named, settings = split_words(arguments.words)
    out = None if arguments.json in (None, STDOUT) else Path(arguments.json)
    if out is not None and out.suffix != ".json":
        raise ConfigError(
            f"--json {out}: give a file that ends in .json, or put --json last to print the result."
        )
    if len(named) != 1:
        raise ConfigError("Give one run directory, for example `kapelle blame runs/mine`.")
    check_changeable(settings)
    try:
        # An unusable file is an error before anything is sampled.
        with nullcontext() if out is None else new_file(out, "--json") as file:
            from kapelle.one_call import blame

            result = blame(
                named[0],
                *settings,
                episodes=arguments.episodes,
                samples=arguments.samples,
                split=arguments.split,
                seed=arguments.seed,
                observer=Watch(Lines(sys.stderr)),
            )
            if file is not None and out is not None:
                with writing(out, "--json"):
                    write_all(file.fileno(), json.dumps(result.row(), indent=2).encode("ascii") + b"\n")
    except KeyboardInterrupt:
        say("stopped; the finished measurements are kept. Repeat the command to continue.", sys.stderr)
        return exit_code()
    if arguments.json == STDOUT:
        say(json.dumps(result.row()))
        return 0
    for line in lines(result, named[0]):
        say(line)
    return 0


def lines(result: Blame, name: str) -> list[str]:
    """Return the result as lines of text: a table by agent and turn, and the most costly turns with their texts."""
    about, spent = result.measured, sum(each.tokens for each in result.episodes)
    count = sum(each.continuations for each in result.episodes)
    title = (
        f"{name} after {about['step']} steps: {len(result.failed)} failed and {len(result.solved)} solved episodes of "
        f"{about['environment']}, {count:,} continuations, {spent:,} tokens"
    )
    found = [title, "", *_table(result), LEGEND]
    unexplained = sum(each.culprit is None for each in result.failed)
    if unexplained:
        found.append(f"{unexplained} failed episodes have no turn with a drop")
    broken = sum(each.failed for each in result.episodes)
    if broken:
        found.append(f"{broken:,} continuations ended in an error and are excluded from all means")
    for reason, episodes in result.excluded.items():
        found.append(
            f"{episodes} episodes are excluded, because they cannot be replayed exactly: {printable(reason)}"
        )
    costly = result.costliest()
    if costly:
        found += ["", "the most costly turns"]
    for episode, turn in costly:
        found += _quoted(episode, turn)
    if result.file is not None:
        run = result.file.parent.parent
        found += ["", f"kept in {result.file}; `{command('view', str(run))}` shows each conversation"]
    return found


def _quoted(episode: BlamedEpisode, turn: BlamedTurn) -> list[str]:
    own = f" turn {turn.number}" if turn.number > 1 else ""
    assert turn.before is not None, "it has a drop"
    assert turn.after is not None
    chances = f"{turn.before:.2f} → {turn.after:.2f}"
    question = printable(episode.question, QUOTED) if episode.question else episode.task
    found = [
        f"  {chances}  {turn.agent}{own}: {printable(turn.text, QUOTED)}",
        f"{'':15}question: {question}",
    ]
    better = [each for each in turn.instead if each.success is not None and each.success > turn.after]
    if better:
        best = max(better, key=lambda each: (each.success or 0.0, each.times))
        found.append(f"{'':15}instead, {best.success:.2f}: {printable(best.text, QUOTED)}")
    return found


def _table(result: Blame) -> list[str]:
    rows = [("agent", "turn", "drop, failed", "drop, solved", "before, failed", "lost")]
    for row in result.rows():
        before: Any = row["failed"]["before"]
        chance = "–" if before is None else f"{before:.3f}"
        drops = drop_text(row["failed"]), drop_text(row["solved"])
        rows.append((printable(row["agent"], 30), str(row["turn"]), *drops, chance, str(row["lost"])))
    return table(rows)
