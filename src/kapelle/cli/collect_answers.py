"""`kapelle collect --for verifier` and `--show`: write, balance and show graded answers; see `runs/verifier_export.py`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kapelle.cli.output import command, printable, say
from kapelle.cli.stopping import exit_code
from kapelle.errors import DataError
from kapelle.runtime.atomic_files import write_all

if TYPE_CHECKING:
    from kapelle.cli.player import Player
    from kapelle.runs.verifier_export import Balance, Survey

WIDTH = 60
"""Characters of a text in an example."""


def collect(arguments: argparse.Namespace, file: IO[bytes], tasks_at_once: int) -> int:
    """Let a team answer train tasks, keep graded answers as `arguments` ask, and report what was dropped.

    Returns the exit code; Ctrl-C keeps what was played so far.
    """
    from kapelle.cli.player import open_player
    from kapelle.evaluation.evaluate import choose_tasks
    from kapelle.rollout.play import rollout
    from kapelle.runs.sft_export import dump_rows
    from kapelle.runs.verifier_export import answer_rows, balance
    from kapelle.runtime.event_loop import run_async
    from kapelle.runtime.seeds import derive_seed

    player = open_player(arguments)
    tasks = choose_tasks(player.play.environment, "train", arguments.tasks, player.config.seed)
    seed = derive_seed(player.config.seed, "collect")
    rows: list[dict[str, Any]] = []
    failure = ""
    stopped = 0
    try:
        for first in range(0, len(tasks), tasks_at_once):
            chosen = tasks[first : first + tasks_at_once]
            groups = run_async(lambda now=chosen: rollout(player.play, now, arguments.samples, seed))  # type: ignore[misc]
            failure = next((e.error for group in groups for e in group.episodes if e.error), failure)
            rows += answer_rows(groups)
            say(f"{first + len(chosen)}/{len(tasks)} tasks played, {len(rows)} answers graded", sys.stderr)
    except KeyboardInterrupt as stop:
        if not rows:
            raise
        stopped = exit_code(stop)
    kept = balance(rows, seed, equal=not arguments.no_balance)
    if not kept.rows:
        raise DataError(_nothing(kept, failure))
    write_all(file.fileno(), dump_rows(kept.rows, Path(arguments.out)))
    _report(arguments, player, kept, stopped)
    return stopped


def _nothing(kept: Balance, failure: str) -> str:
    if not kept.graded:
        return (
            f"No answer was graded: {failure or 'the workflow asks for no score (`workflow.score_rounds`)'}"
        )
    return (
        f"None of {kept.one_kind_questions} questions has both right and wrong answers: nothing can be balanced. Raise "
        "--samples or --tasks, use another team, or keep all with --no-balance."
    )


def _report(arguments: argparse.Namespace, player: Player, kept: Balance, stopped: int) -> None:
    questions = len({row["question"] for row in kept.rows})
    path = _base(player)
    row = {
        "out": arguments.out,
        "answers": len(kept.rows),
        "questions": questions,
        "graded": kept.graded,
        "repeated": kept.repeated,
        "one_kind": kept.one_kind,
        "one_kind_questions": kept.one_kind_questions,
        "surplus": kept.surplus,
        "model": path,
        "stopped_by": stopped,
    }
    if arguments.json:
        say(json.dumps(row))
        return
    how = "" if arguments.no_balance else ", as many right as wrong ones to each"
    say(f"{arguments.out}: {len(kept.rows)} answers to {questions} questions{how}")
    say(
        f"dropped of {kept.graded} graded answers: {kept.repeated} repeated, {kept.one_kind} to "
        f"{kept.one_kind_questions} questions with only right or only wrong ones, {kept.surplus} without a counterpart"
    )
    say(
        f"train on it: {command('train', 'verifier_file', f'environment.path={arguments.out}', f'model.path={path}')}"
    )


def _base(player: Player) -> str:
    """Return the path of the base model behind the answers, on which a verifier of them should be trained."""
    if player.config.warmup is None:
        return player.config.model.path
    from kapelle.training.warmup import warmed_up

    return str(warmed_up(player.config))


def show(file: Path, *, as_json: bool) -> int:
    """Print what a file of graded answers holds."""
    from kapelle.runs.verifier_export import survey

    found = survey(file)
    if as_json:
        say(json.dumps({"file": str(file), **found.row()}))
        return 0
    for line in _lines(file, found):
        say(line)
    return 0


def _lines(file: Path, found: Survey) -> list[str]:
    low, middle, high = found.per_question
    wrong = found.answers - found.right
    lines = [
        f"{file}: {found.answers} answers to {found.questions} questions, {found.right} right, {wrong} wrong",
        f"questions    {found.both} answered both ways, {found.only_right} only rightly, {found.only_wrong} only wrongly",
        f"each         {low} to {high} answers, median {middle:g}",
        f"split        {found.questions - found.held_out} questions to train on, {found.held_out} held out by `verifier_file`",
    ]
    for name, parts in (("agent", found.by_agent), ("round", found.by_round)):
        lines += [
            f"{name:12} {which}: {part.answers} answers, {100 * part.right:.1f} % right"
            for which, part in parts.items()
        ]
    lines += [
        f"example      {printable(each['question'], WIDTH)} → right: {printable(each['right'], WIDTH)} → wrong: "
        f"{printable(each['wrong'], WIDTH) or '(nothing)'}"
        for each in found.examples
    ]
    return lines
