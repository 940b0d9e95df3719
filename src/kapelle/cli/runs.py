"""Implements `kapelle runs`, which lists the runs in a folder, shows or annotates a run, or rolls a run back to an earlier checkpoint."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.cli.output import command, table
from kapelle.errors import ConfigError, RunDirectoryError, did_you_mean
from kapelle.runtime.console import printable, say

if TYPE_CHECKING:
    from kapelle.runs.rollback import RollbackPlan

ACTIONS = ("ls", "show", "note", "rollback")


def run(arguments: argparse.Namespace) -> int:
    """List runs, or show, annotate or roll back a run."""
    action = arguments.action or "ls"
    if action not in ACTIONS:
        raise ConfigError(f"Unknown action '{action}' of `kapelle runs`.{did_you_mean(action, ACTIONS)}")
    if action != "rollback" and (arguments.to is not None or arguments.dry_run):
        raise ConfigError("--to and --dry-run are for `kapelle runs rollback`. Remove them.")
    if action != "note" and (arguments.text is not None or arguments.tag or arguments.untag):
        raise ConfigError("--text, --tag and --untag are for `kapelle runs note`. Remove them.")
    if action == "ls":
        return _list(Path(arguments.place or "runs"), as_json=arguments.json)
    if arguments.place is None:
        raise ConfigError(f"Give a run: `kapelle runs {action} RUN`. `kapelle runs ls` lists them.")
    place = Path(arguments.place)
    if action == "show":
        return _show(place, as_json=arguments.json)
    if action == "note":
        return _note(place, arguments)
    if arguments.to is None:
        raise ConfigError(f"Give the step to go back to: `kapelle runs rollback {place} --to STEP`.")
    from kapelle.cli.quiet import hush

    hush()
    from kapelle.runs.rollback import plan_rollback, roll_back

    dry = arguments.dry_run
    plan = plan_rollback(place, arguments.to) if dry else roll_back(place, arguments.to)
    if arguments.json:
        say(json.dumps({**plan.row(), "dry_run": dry}, indent=1))
        return 0
    for line in _moved(plan, dry=dry):
        say(line)
    return 0


def _list(folder: Path, *, as_json: bool) -> int:
    from kapelle.runs.summary import find_runs, in_words, summarise

    if not folder.is_dir():
        raise RunDirectoryError(
            f"The folder {folder} does not exist. Give a folder of runs: `kapelle runs ls FOLDER`."
        )
    found = [summarise(place) for place in find_runs(folder)]
    if as_json:
        say(json.dumps([each.row() for each in found], indent=1))
        return 0
    if not found:
        say(f"There is no run under {folder}.")
        return 0
    rows = [
        ("run", "state", "health", "recipe", "algorithm", "step", "size", "last metrics, or why it ended")
    ]
    for each in found:
        health = "?" if each.verdict is None else each.verdict.word
        why = each.wrong or (each.failure and each.failure.cause)
        steps, last = f"{each.step}/{each.steps}", printable(why or in_words(each.metrics, 4), 120)
        rows.append(
            (str(each.path), each.state, health, each.recipe, each.algorithm, steps, amount(each.size), last)
        )
    for line in table(rows):
        say(line)
    return 0


def _note(place: Path, arguments: argparse.Namespace) -> int:
    """Change the notes on a run, if new notes are given, and print the notes."""
    from kapelle.runs.findings import keep_notes, read_notes
    from kapelle.runs.reader import is_run, no_run

    if not is_run(place):
        raise no_run(place)
    given = arguments.text is not None or arguments.tag or arguments.untag
    found = (
        keep_notes(place, text=arguments.text, add=arguments.tag, remove=arguments.untag)
        if given
        else read_notes(place)
    )
    if arguments.json:
        say(json.dumps({"tags": list(found.tags), "note": found.text}, indent=1))
        return 0
    say(f"tags: {', '.join(found.tags) or 'none'}")
    say(f"note: {found.text or 'none'}")
    return 0


def _show(place: Path, *, as_json: bool) -> int:
    from kapelle.runs.failure import LOG
    from kapelle.runs.findings import read_notes
    from kapelle.runs.reader import is_run, read_evaluations, read_excluded, read_metrics, read_status
    from kapelle.runs.summary import (
        failures,
        in_words,
        kept_checkpoints,
        last_evaluation,
        own_settings,
        pace_at,
        summarise,
        telling,
    )
    from kapelle.training.console import judged, point_of

    if not is_run(place):
        from kapelle.runs.reader import no_run
        from kapelle.runs.summary import find_runs

        inner = [str(each) for each in find_runs(place)] if place.is_dir() else []
        raise no_run(place, f" It contains runs: {', '.join(inner[:9])}. Give one of them." if inner else "")
    summary = summarise(place)
    if summary.wrong is not None:
        raise RunDirectoryError(f"The run {place} cannot be read: {summary.wrong}")
    status, rows = read_status(place), read_metrics(place)
    own, kept, evaluation = own_settings(place), kept_checkpoints(place), last_evaluation(place)
    aside = sorted(folder.name for folder in (place / "rolled-back").glob("*") if folder.is_dir())
    if as_json:
        row: dict[str, Any] = {
            **summary.row(),
            "status": {
                name: getattr(status, name) for name in ("phase", "pid", "host", "started", "updated")
            },
            "settings": {key: {"value": value, "from": source} for key, (value, source) in own.items()},
            "checkpoints": [
                {"name": each.folder.name, "step": each.step, "size": each.size, "wrong": each.wrong}
                for each in kept
            ],
            "last": rows[-1] if rows else None,
            "evaluation": evaluation,
            "failures": failures(place),
            "rolled_back": aside,
            "noted": asdict(read_notes(place)),
            "excluded": read_excluded(place),
        }
        say(json.dumps(row, indent=1))
        return 0
    say(f"{place}  {summary.state}  step {summary.step} of {summary.steps}  {amount(summary.size)}")
    say(f"  {summary.recipe}, {summary.algorithm}; started {status.started}, last update {status.updated}")
    notes = read_notes(place)
    if notes.tags or notes.text:
        say(f"  noted: {' '.join(f'[{tag}]' for tag in notes.tags)} {printable(notes.text, 400)}".rstrip())
    failure = summary.failure
    if failure is not None:
        for line in failure.lines():
            say(printable(line, 2000))
        for line in () if failure.on_purpose else failure.traceback.splitlines():
            say(f"  {printable(line, 400)}")
        say(f"log: {place / LOG}")
    if summary.verdict is not None and not (failure is not None and summary.verdict.word == "young"):
        for line in summary.verdict.lines():
            say(f"  {line}")
    if (pace := pace_at(place)) is not None and pace.change:
        say(f"  {pace.line()}")
    for line in read_excluded(place):
        say(f"excluded: {printable(line, 400)}")
    say("settings that differ from the defaults")
    if not own:
        say(f"  not recorded; {place / 'config.yaml'} contains all settings")
    for key, (value, source) in own.items():
        say(f"  {key}: {printable(str(value), 80)}  ({source})")
    say("checkpoints")
    for each in kept:
        say(f"  step {each.step:6}  {amount(each.size):>9}  {each.wrong or 'complete'}")
    if rows:
        say(f"metrics of step {rows[-1]['step']:.0f}")
        say(f"  {in_words(telling(rows[-1]))}")
    if evaluation:
        point = point_of(read_evaluations(place)[-1])
        scores = judged(point.verifier) if point.verifier else f"{point.text()}, {point.counts()}"
        scores += f": {point.reason}" if point.reason else ""
        say(f"evaluation after step {point.step} on unseen problems: {printable(scores, 400)}")
    for line in failures(place):
        say(f"warning: {line}")
    for name in aside:
        say(f"rolled back: {place / 'rolled-back' / name}")
    return 0


def _moved(plan: RollbackPlan, *, dry: bool) -> list[str]:
    if plan.nothing:
        return [f"{plan.run} is at step {plan.step} already; nothing was moved."]
    verb = "would move" if dry else "moved"
    lines = [f"{verb} to {plan.aside}:"]
    if plan.checkpoints:
        lines.append(f"  checkpoints {', '.join(folder.name for folder in plan.checkpoints)}")
    lines += [f"  {count} rows of {table}" for table, count in plan.rows.items() if count]
    if plan.episodes:
        lines.append(f"  {len(plan.episodes)} files of episodes")
    if plan.stages:
        lines.append(f"  stages that continued from here: {', '.join(folder.name for folder in plan.stages)}")
    now = "would be" if dry else "is now"
    lines.append(f"{plan.run} {now} at step {plan.step}, checkpoint {plan.to.name}.")
    whole = plan.run.resolve().parent if (plan.run.resolve().parent / "stages.yaml").is_file() else plan.run
    return lines if dry else [*lines, f"Continue with: {command('train', '--resume', str(whole))}"]


def amount(size: int) -> str:
    """Format a number of bytes with a readable unit."""
    number, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
