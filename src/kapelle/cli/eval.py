"""Implements `kapelle eval`, which measures the success of a team on unseen problems.

The command also measures the success of a single agent with the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.cli import benchmarks
from kapelle.cli.named import owner_of
from kapelle.cli.output import new_file, writing
from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.errors import ConfigError
from kapelle.runs.findings import keep_evaluation
from kapelle.runs.named_checkpoint import split_run
from kapelle.runs.reader import is_run
from kapelle.runtime.console import say
from kapelle.runtime.files import write_all
from kapelle.training.console import returns

if TYPE_CHECKING:
    from kapelle.cli.named import Player
    from kapelle.functional.statistics import MeanScore
    from kapelle.rollout.evaluation.evaluate import Baseline, Evaluation, Lengths
    from kapelle.rollout.evaluation.swap import Swap

NOTHING_MEASURED = 2
"""The exit code if every episode failed."""
NAMES = 26
"""The width of the first column, in characters."""


def run(arguments: argparse.Namespace) -> int:
    """Evaluate the team, print the result and write it to `--output`."""
    if arguments.num_episodes is not None:
        arguments.words = [*arguments.words, f"evaluation.problems={arguments.num_episodes}"]
    if arguments.temperature is not None:
        arguments.words = [*arguments.words, f"evaluation.temperature={arguments.temperature}"]
    if arguments.samples is not None:
        arguments.words = [*arguments.words, f"evaluation.samples={arguments.samples}"]
        # Several answers are sampled, unless settings choose otherwise.
        keys = ("evaluation.temperature=", "evaluation.greedy=")
        if arguments.samples > 1 and not any(str(word).startswith(keys) for word in arguments.words):
            arguments.words = [*arguments.words, "evaluation.greedy=false"]
    each = [arguments]
    if arguments.benchmark == "list":
        say(benchmarks.listed())
        return 0
    chosen = None if arguments.benchmark is None else benchmarks.chosen(arguments)
    if arguments.environment is not None and chosen is None:
        names = list(dict.fromkeys(name.strip() for name in arguments.environment.split(",")))
        if "" in names:
            raise ConfigError(
                f"--environment '{arguments.environment}' has an empty name. Separate names by one comma."
            )
        each = [_alone(arguments, name, names) for name in names]
    hush()
    if arguments.output is None:
        return _run(arguments, each, chosen)[0]
    out = Path(arguments.output)
    if out.suffix not in (".json", ".jsonl"):
        raise ConfigError(
            f"--output {out}: use a name that ends in .json for one object with the results and every episode, or in .jsonl for one line per episode."
        )
    with new_file(out, "--output") as file:  # an unusable file is an error before anything is sampled
        code, rows = _run(arguments, each, chosen)
        with writing(out, "--output"):
            text = json.dumps(whole(rows), indent=2) + "\n" if out.suffix == ".json" else lines_of(rows)
            write_all(file.fileno(), text.encode("ascii"))
    return code


def _alone(arguments: argparse.Namespace, name: str, names: Sequence[str]) -> argparse.Namespace:
    """Return the arguments for one of several environments, in which the settings `NAME.key=value` become `environment.key=value`."""
    words = []
    for word in arguments.words:
        owner = owner_of(word, names) if "=" in word else None
        if owner in (name, None):
            words.append(word if owner is None else f"environment.{word[len(name) + 1 :]}")
    return argparse.Namespace(**{**vars(arguments), "environment": name, "words": words})


def lines_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the episodes of evaluations as JSON Lines. Each line contains the player, the steps and the environment."""
    return "".join(
        json.dumps(
            {"player": row["player"], "steps": row["steps"], "environment": row["environment"], **each}
        )
        + "\n"
        for row in rows
        for each in row["episodes"]
    )


def whole(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a single evaluation unchanged, or the results of several evaluations as a list."""
    return rows[0] if len(rows) == 1 else {"evaluations": list(rows)}


def _players(
    arguments: argparse.Namespace, each: Sequence[argparse.Namespace], chosen: benchmarks.Chosen | None
) -> Iterator[tuple[Player, argparse.Namespace]]:
    """Yield the player of each environment, or of each benchmark, with its arguments."""
    from kapelle.cli.named import check_playable, open_player

    if chosen is not None:
        yield from benchmarks.players(arguments, chosen)
        return
    for own in each[1:]:  # the first one is checked when it is opened
        check_playable(own, own.environment)
    for own in each:
        yield open_player(own), own


def _run(
    arguments: argparse.Namespace, each: Sequence[argparse.Namespace], chosen: benchmarks.Chosen | None
) -> tuple[int, list[dict[str, Any]]]:
    """Evaluate on each environment in turn. Returns the exit code, and one row with all episodes for each environment."""
    rows: list[dict[str, Any]] = []
    code = 0
    for number, (player, own) in enumerate(_players(arguments, each, chosen)):
        result, baselines, swap = _measure(player, own)
        if chosen is not None:
            result = benchmarks.completed(player, result)
        row = _row(player, result, baselines, swap)
        if chosen is not None:
            row |= benchmarks.about(player, result)
        rows.append({**row, "episodes": _episodes(result)})
        run, _ = split_run(player.name)
        if player.steps is not None and is_run(run):  # an exported team stays unchanged
            keep_evaluation(run, row, split_words(own.words)[1])
        if not arguments.json and arguments.table is None:
            scores = benchmarks.lines_of(row)
            for line in [
                *([""] if number else []),
                *_lines(player, result, baselines, swap, row["environment"]),
                *scores,
            ]:
                say(line)
        if result.problems and result.failed == result.problems:
            code = NOTHING_MEASURED
    if arguments.json:
        plain = [{key: value for key, value in row.items() if key != "episodes"} for row in rows]
        say(json.dumps(whole(plain)))
    elif arguments.table is not None:
        from kapelle.rollout.evaluation.tables import table_of

        say(table_of(arguments.table, rows))
    return code, rows


def _measure(
    player: Player, arguments: argparse.Namespace
) -> tuple[Evaluation, Sequence[Baseline], Swap | None]:
    """Evaluate the team on unseen problems, the swap with `--swap`, and the baselines unless `--no-baselines` is set."""
    from kapelle.rollout.evaluation.evaluate import compute_matched, decoded, evaluate_held_out
    from kapelle.rollout.evaluation.swap import compare_swap, swapped
    from kapelle.runtime.event_loop import run_async
    from kapelle.setup.problems import choose_tasks
    from kapelle.setup.prompt_lengths import short_enough

    settings = player.config.evaluation
    setup = player.setup
    fits = short_enough(player.config, setup.team, setup.engine.renderer)
    # A team that cannot exchange weights is an error before anything is sampled.
    exchanged = swapped(setup) if arguments.swap else None
    tasks = choose_tasks(setup.environment, "test", settings.problems, fits=fits)
    say(f"playing {len(tasks)} unseen problems …", sys.stderr)
    result = evaluate_held_out(setup, settings, settings.problems, player.config.seed, player.returns, fits)
    swap = None
    if exchanged is not None:
        say("playing them with exchanged weights …", sys.stderr)
        other, acts_with = exchanged
        after = evaluate_held_out(
            other, settings, settings.problems, player.config.seed, player.returns, fits
        )
        swap = compare_swap(result, after, acts_with)
    baselines: Sequence[Baseline] = []
    if not arguments.no_baselines and len(setup.team.agents) > 1:
        say("playing the baselines: the same number of tokens without a team …", sys.stderr)
        alone = decoded(setup, settings)
        baselines = run_async(lambda: compute_matched(alone, tasks, result.tokens, player.config.seed))
    return result, baselines, swap


def _episodes(result: Evaluation) -> list[dict[str, Any]]:
    """Return the task, the rewards, the texts and, if the episode failed, the error of each episode."""
    return [
        {
            "task": episode.task.id,
            "set": episode.task.part,
            "sample": sample,
            "question": episode.task.question,
            "success": episode.success,
            "reward": {agent: episode.total(agent) for agent in episode.agents},
            "length": len(episode.turns),
            "error": episode.error,
            "turns": [
                {
                    "agent": turn.agent,
                    "text": turn.text,
                    "tokens": turn.token_counts[1],
                    "prompt_tokens": turn.token_counts[0],
                    "finish_reason": turn.finish_reason,
                }
                for turn in episode.turns
            ],
        }
        for group in result.groups
        for sample, episode in enumerate(group.episodes)
    ]


def _row(
    player: Player, result: Evaluation, baselines: Sequence[Baseline], swap: Swap | None
) -> dict[str, Any]:
    from kapelle.environment import has_comparable_answers
    from kapelle.rollout.evaluation.evaluate import own_scores, own_totals

    own = (own_scores if has_comparable_answers(player.setup.environment) else own_totals)(result.groups)
    return {
        "player": player.name,
        "steps": player.steps,
        "environment": player.setup.environment.name,
        "greedy": player.config.evaluation.always_greedy,
        "samples": player.config.evaluation.samples,
        "sets": list(player.config.evaluation.sets),
        "team": result.row(),
        "agents": {agent: _rate_row(own.get(agent)) for agent in player.setup.team.names},
        "baselines": [
            {
                "agents": list(each.agents),
                "answers": each.answers,
                "failed_answers": each.failed_answers,
                **each.result.row(),
            }
            for each in baselines
        ],
        **({} if swap is None else {"swap": swap.row()}),
    }


def _rate_row(rate: MeanScore | None) -> dict[str, Any] | None:
    if rate is None:
        return None
    return {
        "success": rate.value,
        "interval": rate.interval,
        "scored": rate.scored,
        "problems": rate.played,
        "failed": rate.failed,
    }


def _lines(
    player: Player, result: Evaluation, baselines: Sequence[Baseline], swap: Swap | None, environment: str
) -> list[str]:
    trained = "" if player.steps is None else f" after {player.steps} steps"
    settings = player.config.evaluation
    how = "greedy decoding" if settings.always_greedy else "sampled as in training"
    if not settings.always_greedy and settings.temperature is not None:
        how = f"sampled at temperature {settings.temperature:g}"
    if settings.samples > 1:
        how += f", {settings.samples} answers each"
    lines = [
        f"{player.name}{trained}: {result.problems} unseen problems of {environment}, {how}, 95 % intervals",
        "",
        _line("team", *_team(result), f"{result.tokens:.1f} tokens per problem"),
        *(_line(f"  {tag}", *_rate(part)) for tag, part in result.parts.items()),
        *(
            _line(f"  {part}", "reward " + ", ".join(f"{who} {value:+.3f}" for who, value in earned.items()))
            for part, earned in result.part_reward.items()
        ),
        *_agents(player, result),
        "",
        *(_line(f"  length of {agent}", *_length(each)) for agent, each in result.lengths.items()),
    ]
    if result.cost is not None:
        lines.append(_line("  cost", f"{result.cost:.6g} an episode"))
    if result.reason:
        lines.append(f"  not scored: {result.reason}")
    if swap is not None:
        lines += ["", "the same problems with exchanged weights"]
        lines += [_line(f"  {role}", f"weights of {agent}") for role, agent in swap.acts_with.items()]
        lines.append(_line("  team", *_team(swap.result), f"{swap.result.tokens:.1f} tokens per problem"))
        if swap.change is not None:
            low, high = swap.interval or (swap.change, swap.change)
            ends = "" if swap.interval is None else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
            lines.append(_line("  change", f"{100 * swap.change:+.1f} points{ends}"))
    if baselines:
        lines += ["", "baselines without a team, with the same number of tokens per problem"]
    for each in baselines:
        who = ", ".join(each.agents)
        name = f"  {who} alone" if each.answers == 1 else f"  {who}, majority of {each.answers}"
        spent = f"{each.result.tokens:.1f} tokens per problem"
        answers = each.answers * each.result.problems
        failed = [f"{each.failed_answers} of {answers} answers failed"] if each.failed_answers else []
        lines.append(_line(name, *_team(each.result), spent, *failed))
    return lines


def _team(result: Evaluation) -> tuple[str, str]:
    if result.success is not None or not result.reward:
        return _rate(result.rate)
    from kapelle.functional.statistics import missing_text

    missing = missing_text(result.failed, result.fewer)
    return (
        f"return {returns(result.reward)}",
        f"played {result.problems - result.failed} of {result.problems}{missing}",
    )


def _length(lengths: Lengths) -> tuple[str, str]:
    spread = f"median {lengths.median:g}, 95 % up to {lengths.p95}, longest {lengths.longest}"
    cut = f", {100 * lengths.cut:.1f} % cut off" if lengths.cut else ""
    return f"{lengths.mean:.1f} tokens", f"{spread}{cut}; reads {lengths.read:.0f}"


def _rate(rate: MeanScore) -> tuple[str, str]:
    from kapelle.functional.statistics import share_text

    return share_text(rate.value, rate.interval), rate.counts()


def _agents(player: Player, result: Evaluation) -> list[str]:
    from kapelle.environment import has_comparable_answers
    from kapelle.functional.statistics import missing_text
    from kapelle.rollout.evaluation.evaluate import own_scores, own_totals

    environment = player.setup.environment
    questions = has_comparable_answers(environment)
    low, high = environment.reward_range
    shares = questions and 0.0 <= low <= high <= 1.0  # rewards of user functions are not shares
    own = (own_scores if questions else own_totals)(result.groups)
    lines = []
    for agent in player.setup.team.names:
        rate = own.get(agent)
        cells: tuple[str, ...]
        if rate is None and result.failed == result.problems:
            continue
        if rate is None:
            cells = ("gives no graded answer",)
        elif shares:
            cells = _rate(rate)
        else:
            ends = f" [{rate.interval[0]:.3f}, {rate.interval[1]:.3f}]" if rate.interval else ""
            counts = f"in {rate.scored} of {rate.played}{missing_text(rate.failed, '')}"
            cells = (f"reward {rate.value:.3f}{ends}", counts)
        lines.append(_line(f"  {agent}", *cells))
    return lines


def _line(name: str, value: str, counts: str = "", *rest: str) -> str:
    return f"{name:{NAMES}}  {value:22}  {'  '.join([f'{counts:18}', *rest])}".rstrip()
