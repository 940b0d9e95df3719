"""Implements `kapelle collect`, which writes data for SFT, DPO or a verifier from new episodes, recorded episodes or a program's traces.

The format of the rows is described in `runs/exports.py`, and traces are read by `runs/traces.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
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
    from kapelle.runs.exports import Survey
    from kapelle.types import Group, Split

WIDTH = 60
"""The maximum number of characters of a text in an example."""
TASKS, SAMPLES = 200, 4
"""The default numbers of training tasks and of episodes per task."""
TASKS_AT_ONCE = 64
"""The number of tasks that are rolled out together. The result does not depend on this number."""


def run(arguments: argparse.Namespace) -> int:
    """Collect rows, write them to a file and print a report. After Ctrl-C, the rows collected so far are kept."""
    if arguments.show is not None:
        return _show(Path(arguments.show), as_json=arguments.json)
    _check(arguments)
    hush()
    if arguments.traces is not None:
        return _collect_traces(arguments)
    if arguments.recorded is not None:
        return _collect_recorded(arguments)
    if arguments.purpose == "verifier":
        return _collect_answers(arguments)
    return _collect_episodes(arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Fill in the default values of options that are not given. Raises ConfigError for options that cannot be combined."""
    reads = (
        "--traces" if arguments.traces is not None else "--recorded" if arguments.recorded is not None else ""
    )
    amounts = (arguments.tasks, arguments.samples, arguments.num_episodes)
    if arguments.traces is None and arguments.metric is not None:
        raise ConfigError("--metric needs --traces. Remove --metric, or add --traces PATH.")
    if reads and (arguments.model or arguments.environment or any(amounts) or arguments.real):
        raise ConfigError(f"{reads} reads existing episodes. Remove the options for new episodes.")
    if arguments.traces is not None and (arguments.words or arguments.recorded is not None):
        raise ConfigError("--traces reads existing episodes of a program. Remove the run and the settings.")
    if arguments.traces is not None and not Path(arguments.traces).exists():
        raise ConfigError(f"--traces {arguments.traces}: this file or folder does not exist.")
    if arguments.recorded is not None and (len(arguments.words) != 1 or not is_run(Path(arguments.words[0]))):
        raise ConfigError("--recorded needs one run directory. Give it without any settings.")
    if arguments.purpose == "dpo" and arguments.recorded is None:
        raise ConfigError(
            "--for dpo needs --recorded. For pairs of new episodes, give the environment `preferences` a file of --for sft."
        )
    if arguments.out is None:
        raise ConfigError("`kapelle collect` needs a file to write. Add --out FILE.")
    if arguments.out.endswith((".gz", ".parquet", ".csv")):
        raise ConfigError(
            f"--out {arguments.out}: use a name that ends in .jsonl, .jsonl.zst (compressed) or .json (one array)."
        )
    if arguments.purpose == "verifier" and arguments.min_reward is not None:
        raise ConfigError("A verifier learns from incorrect answers too. Remove --min-reward.")
    if arguments.min_reward is not None and not math.isfinite(arguments.min_reward):
        raise ConfigError(f"--min-reward is {arguments.min_reward}. Give a finite number.")
    if arguments.purpose == "sft" and arguments.no_balance:
        raise ConfigError("--no-balance applies only to --for verifier. Remove it.")
    if arguments.num_episodes is not None:
        if arguments.tasks or arguments.samples:
            raise ConfigError("--num-episodes N is short for --tasks N --samples 1. Remove one of them.")
        arguments.tasks, arguments.samples = arguments.num_episodes, 1
    arguments.tasks, arguments.samples = arguments.tasks or TASKS, arguments.samples or SAMPLES
    arguments.least = -math.inf if arguments.min_reward is None else arguments.min_reward


def _write(file: IO[bytes], rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    from kapelle.runs.exports import dump_rows

    with writing(out, "--out"):
        write_all(file.fileno(), dump_rows(rows, out))


def _too_high(least: float, rewards: Sequence[float]) -> DataError:
    return DataError(
        f"--min-reward {least:g} is above every reward; the highest is {max(rewards):g}. Set a lower value."
    )


def _report(arguments: argparse.Namespace, row: Mapping[str, Any], *lines: str) -> None:
    if arguments.json:
        say(json.dumps({"out": arguments.out, **row}))
        return
    for line in lines:
        say(line)


# -------- New episodes


def _roll_out(
    player: Player,
    arguments: argparse.Namespace,
    rows: list[dict[str, Any]],
    rows_of: Callable[[Sequence[Group]], list[dict[str, Any]]],
    what: str,
) -> int:
    """Roll out training tasks in parts and add the rows of each part.

    Returns 0, or the exit code of Ctrl-C if it was pressed after the first row.
    """
    from kapelle.rollout.episodes import rollout
    from kapelle.runtime.event_loop import run_async
    from kapelle.setup.problems import choose_tasks, untested

    config = player.config
    tasks = choose_tasks(player.setup.environment, "train", arguments.tasks, config.seed, untested(config))
    try:
        for first in range(0, len(tasks), TASKS_AT_ONCE):
            chosen = tasks[first : first + TASKS_AT_ONCE]
            groups = run_async(
                lambda now=chosen: rollout(player.setup, now, arguments.samples, _seed(player))  # type: ignore[misc]
            )
            rows += rows_of(groups)
            say(f"{first + len(chosen)}/{len(tasks)} tasks played, {len(rows)} {what}", sys.stderr)
    except KeyboardInterrupt:
        if not rows:
            raise
        return exit_code()
    return 0


def _seed(player: Player) -> int:
    from kapelle.runtime.randomness import derive_seed

    return derive_seed(player.config.seed, "collect")


def _collect_episodes(arguments: argparse.Namespace) -> int:
    """Write the turns of new episodes whose reward is high enough, for SFT."""
    from kapelle.cli.named import open_player
    from kapelle.runs.exports import episode_reward, good_episodes, sft_rows

    out, rows = Path(arguments.out), list[dict[str, Any]]()
    kept, rewards, errors = 0, list[float](), list[str]()

    def good_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
        nonlocal kept
        episodes = [episode for group in groups for episode in group.episodes]
        errors.extend(each.error for each in episodes if each.error is not None)
        rewards.extend(episode_reward(each) for each in episodes if each.error is None)
        good = list(good_episodes(groups, arguments.least))
        kept += len(good)
        return [row for number, episode in good for row in sft_rows(number, episode)]

    with new_file(out, "--out") as file:
        stopped = _roll_out(open_player(arguments), arguments, rows, good_rows, "turns kept")
        if not kept and rewards and arguments.min_reward is not None:
            raise _too_high(arguments.min_reward, rewards)
        if not kept:
            raise DataError(f"Nothing was collected: {errors[0] if errors else 'no episode was played'}")
        _write(file, rows, out)
    failed, error = len(errors), errors[0] if errors else ""
    episodes = len(rewards) + failed
    least = "" if arguments.min_reward is None else f" with a reward of {arguments.min_reward:g} or more"
    _report(
        arguments,
        {
            "played": episodes,
            "kept": kept,
            "turns": len(rows),
            "best": max(rewards, default=None),
            "failed": failed,
            "error": error,
            "stopped_by": stopped,
        },
        f"{out}: {len(rows)} turns of {kept} episodes out of {episodes}{least}"
        + (f"; {failed} failed: {' '.join(error.split())}" if failed else ""),
    )
    return stopped


def _collect_answers(arguments: argparse.Namespace) -> int:
    """Write graded answers from new episodes, for training a verifier."""
    from kapelle.cli.named import open_player
    from kapelle.runs.exports import answer_rows, balance

    out, rows, failure = Path(arguments.out), list[dict[str, Any]](), ""

    def answers(groups: Sequence[Group]) -> list[dict[str, Any]]:
        nonlocal failure
        failure = next((e.error for group in groups for e in group.episodes if e.error), failure)
        return answer_rows(groups)

    with new_file(out, "--out") as file:
        player = open_player(arguments)
        stopped = _roll_out(player, arguments, rows, answers, "answers graded")
        kept = balance(rows, _seed(player), equal=not arguments.no_balance)
        if not kept.graded:
            raise DataError(f"No answer was graded: {failure or '`workflow.score_rounds` is false'}")
        if not kept.rows:
            raise DataError(
                f"None of the {kept.one_kind_questions} questions has both correct and incorrect answers. Raise --samples or --tasks, or keep all "
                "with --no-balance."
            )
        _write(file, kept.rows, out)
    questions, path = len({row["question"] for row in kept.rows}), _base(player)
    counts = ("graded", "repeated", "one_kind", "one_kind_questions", "surplus")
    _report(
        arguments,
        {
            "answers": len(kept.rows),
            "questions": questions,
            **{name: getattr(kept, name) for name in counts},
            "model": path,
            "stopped_by": stopped,
        },
        f"{out}: {len(kept.rows)} answers to {questions} questions"
        + ("" if arguments.no_balance else ", equally many correct and incorrect ones for each"),
        f"dropped of {kept.graded} graded answers: {kept.repeated} repeated, {kept.one_kind} to {kept.one_kind_questions} questions "
        f"with only correct or only incorrect ones, {kept.surplus} without a counterpart",
        f"train on it: {command('train', 'verifier_file', f'environment.path={out}', f'model.path={path}')}",
    )
    return stopped


def _base(player: Player) -> str:
    """Return the path of the base model of the answers. A verifier of these answers should be trained on the same base model."""
    if player.config.warmup is None:
        return player.config.model.path
    from kapelle.features.warmup.stage import warmed_up

    return str(warmed_up(player.config))


# -------- Recorded episodes and traces


def _collect_recorded(arguments: argparse.Namespace) -> int:
    """Write the recorded episodes that a query selects. The query has the same form as on the episodes page of `kapelle view`."""
    from kapelle.runs.exports import (
        answer_rows,
        balance,
        episode_reward,
        good_episodes,
        preferred,
        sft_rows,
    )
    from kapelle.runs.reader import read_lines
    from kapelle.viewer.selection import check_query, selected

    out, run = Path(arguments.out), Path(arguments.words[0])
    check_query(run, arguments.recorded)
    places, trouble = selected(run, arguments.recorded)
    if trouble:
        raise ConfigError(f"--recorded: the regular expression `re` cannot be used: {trouble}.")
    lines: dict[tuple[Split, int], list[int]] = {}
    for split, step, line in places:
        lines.setdefault((split, step), []).append(line)
    rows: list[Any] = []
    rewards: list[float] = []
    for (split, step), own in lines.items():
        groups = read_lines(run, step, own, split)
        rewards += [episode_reward(each) for group in groups for each in group.episodes if each.error is None]
        if arguments.purpose == "verifier":
            rows += answer_rows(groups)
        else:
            rows += [
                row for k, episode in good_episodes(groups, arguments.least) for row in sft_rows(k, episode)
            ]
    if not rows and rewards and arguments.min_reward is not None:
        raise _too_high(arguments.min_reward, rewards)
    environment, nothing = "trajectories", "every selected episode failed"
    if arguments.purpose == "verifier":
        rows = list(balance(rows, 0, equal=not arguments.no_balance).rows)
        environment, nothing = (
            "labelled",
            "no question has both correct and incorrect graded answers (--no-balance keeps all)",
        )
    elif arguments.purpose == "dpo":
        rows = preferred(rows)
        environment, nothing = "preferences", "no conversation has two completions with different rewards"
    if not rows:
        raise DataError(f"Nothing was collected from {len(places)} selected episodes of {run}: {nothing}.")
    with new_file(out, "--out") as file:
        _write(file, rows, out)
    what = "answers" if arguments.purpose == "verifier" else "turns"
    _report(
        arguments,
        {"rows": len(rows), "episodes": len(places), "environment": environment},
        f"{out}: {len(rows)} {what} of {len(places)} selected episodes, for the environment `{environment}`",
    )
    return 0


def _collect_traces(arguments: argparse.Namespace) -> int:
    """Write the model calls in the traces of a program."""
    from kapelle.runs.exports import balance
    from kapelle.runs.traces import graded_rows, read_traces, sft_rows

    out = Path(arguments.out)
    found = read_traces(Path(arguments.traces), arguments.metric)
    scores = [call.score for call in found.calls if call.score is not None]
    excluded = "; ".join(f"{number} excluded: {why}" for why, number in found.excluded.items())
    if arguments.purpose == "verifier":
        rows: list[Any] = list(balance(graded_rows(found), 0, equal=not arguments.no_balance).rows)
        use = f"train on it: {command('train', 'verifier_file', f'environment.path={out}')}"
    else:
        rows = sft_rows(found, arguments.min_reward)
        use = (
            "for SFT (environment trajectories) and, with scores, DPO (preferences). Traces have no log-probs: policy gradients need "
            "the program's own calls (kapelle serve policy, environment external)."
        )
    if not rows and scores and arguments.min_reward is not None:
        raise _too_high(arguments.min_reward, scores)
    if not rows:
        raise DataError(
            f"Nothing was collected from {arguments.traces}: {len(found.calls)} model calls in {found.spans} spans, {len(scores)} with a "
            f"score{f'; {excluded}' if excluded else ''}. A verifier needs correct and incorrect answers to one question."
        )
    with new_file(out, "--out") as file:
        _write(file, rows, out)
    agents = sorted({str(row["agent"]) for row in rows})
    _report(
        arguments,
        {
            "rows": len(rows),
            "calls": len(found.calls),
            "scored": len(scores),
            "spans": found.spans,
            "agents": agents,
            "excluded": dict(found.excluded),
        },
        f"{out}: {len(rows)} of {len(found.calls)} calls, {len(scores)} with a score, by {', '.join(agents)}",
        *([excluded] if excluded else []),
        use,
    )
    return 0


# -------- `--show`: the contents of a file of graded answers


def _show(file: Path, *, as_json: bool) -> int:
    from kapelle.runs.exports import survey

    found = survey(file)
    for line in [json.dumps({"file": str(file), **found.row()})] if as_json else _lines(file, found):
        say(line)
    return 0


def _lines(file: Path, found: Survey) -> list[str]:
    low, middle, high = found.per_question
    lines = [
        f"{file}: {found.answers} answers to {found.questions} questions, {found.right} correct, {found.answers - found.right} incorrect",
        f"questions    {found.both} with both kinds of answers, {found.only_right} with only correct ones, {found.only_wrong} with only incorrect ones",
        f"each         {low} to {high} answers, median {middle:g}",
        f"split        {found.questions - found.held_out} questions to train on, {found.held_out} held out by `verifier_file`",
    ]
    for name, parts in (("agent", found.by_agent), ("round", found.by_round)):
        for which, part in parts.items():
            lines.append(f"{name:12} {which}: {part.answers} answers, {100 * part.right:.1f} % correct")
    for each in found.examples:
        question, right, wrong = (printable(each[key], WIDTH) for key in ("question", "right", "wrong"))
        lines.append(f"example      {question} → correct: {right} → incorrect: {wrong or '(nothing)'}")
    return lines
