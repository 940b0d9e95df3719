"""`kapelle collect`: play train tasks and keep their episodes, or only good ones, as data for SFT; see `runs/exports.py`.

With `--for verifier` it keeps graded answers instead, see `collect_answers.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kapelle.cli.output import command, new_file, writing
from kapelle.cli.quiet import hush
from kapelle.cli.stopping import exit_code
from kapelle.errors import ConfigError, DataError
from kapelle.runs.reader import is_run
from kapelle.runtime.console import printable, say
from kapelle.runtime.files import write_all

if TYPE_CHECKING:
    from kapelle.cli.named import Player
    from kapelle.runs.exports import Balance, Survey
    from kapelle.types import Group, Split


# -------- `kapelle collect --for verifier` and `--show`: write, balance and show graded answers; see `runs/exports.py`

WIDTH = 60
"""Characters of a text in an example."""


def _rolled_out(player: Player, arguments: argparse.Namespace) -> Iterator[tuple[int, str, Sequence[Group]]]:
    """Roll out train tasks and yield their groups, each time with the number of the first and how far it is."""
    from kapelle.rollout.episodes import rollout
    from kapelle.runtime.event_loop import run_async
    from kapelle.setup.problems import choose_tasks, untested

    config = player.config
    tasks = choose_tasks(player.play.environment, "train", arguments.tasks, config.seed, untested(config))
    for first in range(0, len(tasks), TASKS_AT_ONCE):
        chosen = tasks[first : first + TASKS_AT_ONCE]
        groups = run_async(lambda now=chosen: rollout(player.play, now, arguments.samples, _seed(player)))  # type: ignore[misc]
        yield first, f"{first + len(chosen)}/{len(tasks)} tasks played", groups


def _seed(player: Player) -> int:
    from kapelle.runtime.randomness import derive_seed

    return derive_seed(player.config.seed, "collect")


def collect(arguments: argparse.Namespace, file: IO[bytes]) -> int:
    """Let a team answer train tasks, keep graded answers as `arguments` ask, and report what was dropped.

    Returns the exit code; Ctrl-C keeps what was played so far.
    """
    from kapelle.cli.named import open_player
    from kapelle.runs.exports import answer_rows, balance, dump_rows

    player = open_player(arguments)
    rows: list[dict[str, Any]] = []
    failure = ""
    stopped = 0
    try:
        for _, progress, groups in _rolled_out(player, arguments):
            failure = next((e.error for group in groups for e in group.episodes if e.error), failure)
            rows += answer_rows(groups)
            say(f"{progress}, {len(rows)} answers graded", sys.stderr)
    except KeyboardInterrupt as stop:
        if not rows:
            raise
        stopped = exit_code(stop)
    kept = balance(rows, _seed(player), equal=not arguments.no_balance)
    if not kept.rows:
        raise DataError(_no_answers(kept, failure))
    write_all(file.fileno(), dump_rows(kept.rows, Path(arguments.out)))
    _report(arguments, player, kept, stopped)
    return stopped


def _no_answers(kept: Balance, failure: str) -> str:
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
    from kapelle.features.warmup.stage import warmed_up

    return str(warmed_up(player.config))


def show(file: Path, *, as_json: bool) -> int:
    """Print what a file of graded answers holds."""
    from kapelle.runs.exports import survey

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


TASKS, SAMPLES = 200, 4
"""Training tasks that are played, and episodes for each, unless set otherwise."""
TASKS_AT_ONCE = 64
"""Tasks that are played together; the result does not depend on it."""


def run(arguments: argparse.Namespace) -> int:
    """Play, filter, write, and report how many episodes were kept; Ctrl-C keeps what was collected so far."""
    if arguments.show is not None:
        return show(Path(arguments.show), as_json=arguments.json)
    _check(arguments)
    if arguments.traces is not None:
        return _collect_traces(arguments, Path(arguments.traces), Path(arguments.out))
    hush()
    out = Path(arguments.out)
    if arguments.recorded is not None:
        return _collect_recorded(arguments, out)
    if arguments.purpose == "verifier":
        with new_file(out, "--out") as file, writing(out, "--out"):
            return collect(arguments, file)
    counts = Counts()
    stopped = 0
    array: list[dict[str, Any]] | None = (
        [] if out.name.endswith(".json") else None
    )  # written when it is whole
    with new_file(out, "--out") as file:
        try:
            _play(arguments, file, counts, array)
        except KeyboardInterrupt as stop:
            if not counts.kept:
                raise
            stopped = exit_code(stop)
        if not counts.kept:
            raise DataError(_nothing(arguments.min_reward, counts))
        if array is not None:
            from kapelle.runs.exports import dump_rows

            with writing(out, "--out"):
                write_all(file.fileno(), dump_rows(array, out))
    if arguments.json:
        say(json.dumps({"out": str(out), **asdict(counts), "stopped_by": stopped}))
    else:
        least = "" if arguments.min_reward is None else f" with a reward of {arguments.min_reward:g} or more"
        say(
            f"{out}: {counts.turns} turns of {counts.kept} episodes out of {counts.played}{least}"
            + (f"; {counts.failed} failed: {' '.join(counts.error.split())}" if counts.failed else "")
        )
    return stopped


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if arguments.traces is None and arguments.metric is not None:
        raise ConfigError("--metric names an evaluation of --traces. Leave it out, or name the traces.")
    if arguments.traces is not None:
        played = (
            arguments.words
            or arguments.model
            or arguments.environment
            or arguments.tasks
            or arguments.samples
        )
        if played or arguments.num_episodes is not None or arguments.real:
            raise ConfigError(
                "--traces reads what a program has said; nobody plays. Leave out the player and its settings."
            )
        if not Path(arguments.traces).exists():
            raise ConfigError(f"--traces {arguments.traces}: there is no such file or folder.")
    if arguments.recorded is not None:
        played = (
            arguments.model or arguments.environment or arguments.tasks or arguments.samples or arguments.real
        )
        if played or arguments.num_episodes is not None or arguments.traces is not None:
            raise ConfigError(
                "--recorded takes what a run has recorded; nobody plays. Leave out the player and its settings."
            )
        if len(arguments.words) != 1 or not is_run(Path(arguments.words[0])):
            raise ConfigError("--recorded takes episodes of one run directory. Name it, and nothing else.")
    elif arguments.purpose == "dpo":
        raise ConfigError(
            "--for dpo keeps pairs among recorded episodes: name them with --recorded. Of played ones, environment `preferences` "
            "makes pairs by itself from what --for sft writes."
        )
    if arguments.out is None:
        raise ConfigError("`kapelle collect` writes a file. Name it with --out FILE.")
    if arguments.out.endswith((".gz", ".parquet", ".csv")):
        raise ConfigError(
            f"--out {arguments.out}: `kapelle collect` writes JSON lines. Name it .jsonl, or .jsonl.zst for them compressed; or "
            ".json for one array."
        )
    if arguments.purpose == "verifier" and arguments.min_reward is not None:
        raise ConfigError("A verifier learns from wrong answers too. Leave --min-reward out.")
    if arguments.min_reward is not None and not math.isfinite(arguments.min_reward):
        raise ConfigError(f"--min-reward is {arguments.min_reward}. Give a number.")
    if arguments.num_episodes is not None and (arguments.tasks or arguments.samples):
        raise ConfigError(
            "--num-episodes N stands for --tasks N --samples 1. Leave out the one or the other."
        )
    if arguments.num_episodes is not None:
        arguments.tasks, arguments.samples = arguments.num_episodes, 1
    arguments.tasks, arguments.samples = arguments.tasks or TASKS, arguments.samples or SAMPLES
    if arguments.purpose == "sft" and arguments.no_balance:
        raise ConfigError("--no-balance is for --for verifier; episodes for SFT are not balanced.")


def _collect_recorded(arguments: argparse.Namespace, out: Path) -> int:
    """Write the recorded episodes that a query selects, as the page of episodes of `kapelle view` does."""
    from kapelle.runs.exports import answer_rows, balance, dump_rows, good_episodes, preferred, sft_rows
    from kapelle.runs.reader import read_lines
    from kapelle.viewer.selection import check_query, selected

    run = Path(arguments.words[0])
    check_query(run, arguments.recorded)
    places, trouble = selected(run, arguments.recorded)
    if trouble:
        raise ConfigError(f"--recorded: the expression `re` cannot be used: {trouble}.")
    lines: dict[tuple[Split, int], list[int]] = {}
    for split, step, line in places:
        lines.setdefault((split, step), []).append(line)
    rows: list[dict[str, Any]] = []
    least = -math.inf if arguments.min_reward is None else arguments.min_reward
    for (split, step), own in lines.items():
        groups = read_lines(run, step, own, split)
        if arguments.purpose == "verifier":
            rows += answer_rows(groups)
        else:
            rows += [
                row for number, episode in good_episodes(groups, least) for row in sft_rows(number, episode)
            ]
    kept: list[Any] = rows
    if arguments.purpose == "verifier":
        kept = list(balance(rows, 0, equal=not arguments.no_balance).rows)
    elif arguments.purpose == "dpo":
        kept = preferred(rows)
    if not kept:
        why = {
            "sft": "no episode without an error, or none with --min-reward",
            "dpo": "no conversation was answered both better and worse. Select right and wrong episodes of the same tasks",
            "verifier": "no question has both right and wrong graded answers (--no-balance keeps all)",
        }[arguments.purpose]
        raise DataError(f"Nothing was collected from {len(places)} selected episodes of {run}: {why}.")
    with new_file(out, "--out") as file, writing(out, "--out"):
        write_all(file.fileno(), dump_rows(kept, out))
    environment = {"sft": "trajectories", "dpo": "preferences", "verifier": "labelled"}[arguments.purpose]
    if arguments.json:
        say(
            json.dumps(
                {"out": str(out), "rows": len(kept), "episodes": len(places), "environment": environment}
            )
        )
        return 0
    what = "answers" if arguments.purpose == "verifier" else "turns"
    say(f"{out}: {len(kept)} {what} of {len(places)} selected episodes, for the environment `{environment}`")
    return 0


def _collect_traces(arguments: argparse.Namespace, path: Path, out: Path) -> int:
    """Write the calls in recordings of a program, and say what they can teach."""
    from kapelle.runs.exports import balance, dump_rows
    from kapelle.runs.traces import graded_rows, read_traces
    from kapelle.runs.traces import sft_rows as rows_of_calls

    found = read_traces(path, arguments.metric)
    scored = sum(call.score is not None for call in found.calls)
    left = "; ".join(f"{number} left out: {why}" for why, number in found.left_out.items())
    if arguments.purpose == "verifier":
        rows: list[Any] = list(balance(graded_rows(found), 0, equal=not arguments.no_balance).rows)
        nothing = (
            f"{scored} of {len(found.calls)} calls have a score; a verifier needs right and wrong answers to one question, with scores "
            "from 0 to 1 (--no-balance keeps all)"
        )
    else:
        rows = rows_of_calls(found, arguments.min_reward)
        nothing = f"{len(found.calls)} calls of models in {found.spans} spans, {scored} with a score"
    if not rows:
        raise DataError(f"Nothing was collected from {path}: {nothing}{f'; {left}' if left else ''}.")
    with new_file(out, "--out") as file, writing(out, "--out"):
        write_all(file.fileno(), dump_rows(rows, out))
    agents = sorted({str(row["agent"]) for row in rows})
    row = {
        "out": str(out),
        "rows": len(rows),
        "calls": len(found.calls),
        "scored": scored,
        "spans": found.spans,
        "agents": agents,
        "left_out": dict(found.left_out),
    }
    if arguments.json:
        say(json.dumps(row))
        return 0
    say(f"{out}: {len(rows)} of {len(found.calls)} calls, {scored} with a score, by {', '.join(agents)}")
    if left:
        say(left)
    if arguments.purpose == "verifier":
        say(f"train on it: {command('train', 'verifier_file', f'environment.path={out}')}")
    else:
        say(
            "for SFT (environment trajectories) and, with scores, DPO (preferences). Traces have no log-probs: policy gradients need the "
            "program's calls themselves (kapelle serve policy, environment external)."
        )
    return 0


@dataclass(slots=True)
class Counts:
    """What was played and kept so far."""

    played: int = 0
    kept: int = 0
    turns: int = 0
    """Rows written: one for each turn of an episode that was kept."""
    best: float | None = None
    """Largest reward of an episode."""
    failed: int = 0
    """Episodes that ended in an error; they have no reward."""
    error: str = ""
    """The error of one of them; empty if none failed."""


def _nothing(least: float | None, counts: Counts) -> str:
    if counts.best is None or least is None:
        return f"Nothing was collected: {counts.error or 'no episode was played'}"
    return (
        f"No episode reached a reward of {least:g}; the best had {counts.best:g}. Lower --min-reward, or raise --tasks "
        "or --samples."
    )


def _play(
    arguments: argparse.Namespace, file: IO[bytes], counts: Counts, array: list[dict[str, Any]] | None
) -> None:
    """Play and filter; rows go to the file as they come, or into `array` where there is one."""
    from kapelle.cli.named import open_player
    from kapelle.runs.exports import dump_rows, episode_reward, good_episodes, sft_rows

    out = Path(arguments.out)
    least = -math.inf if arguments.min_reward is None else arguments.min_reward
    for first, progress, groups in _rolled_out(open_player(arguments), arguments):
        episodes = [episode for group in groups for episode in group.episodes]
        counts.played += len(episodes)
        counts.failed += sum(episode.error is not None for episode in episodes)
        counts.error = next((e.error for e in episodes if e.error), counts.error)
        rewards = [episode_reward(episode) for episode in episodes if episode.error is None]
        counts.best = max([*rewards, *([] if counts.best is None else [counts.best])], default=None)
        good = list(good_episodes(groups, least))
        rows = [row for number, episode in good for row in sft_rows(number, episode)]
        if array is not None:
            array += rows
        else:
            with writing(out, "--out"):
                write_all(file.fileno(), dump_rows(rows, out, first))
        counts.kept, counts.turns = counts.kept + len(good), counts.turns + len(rows)
        say(f"{progress}, {counts.kept} episodes kept", sys.stderr)
