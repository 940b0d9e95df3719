"""`kapelle eval`: how good a team is on unseen problems, and what the same tokens achieve without a team."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kapelle.cli.output import returns, say
from kapelle.cli.parser import split_words
from kapelle.cli.quiet import hush
from kapelle.runs.findings import keep_evaluation
from kapelle.runs.named_checkpoint import split_run

if TYPE_CHECKING:
    from kapelle.cli.named import Player
    from kapelle.evaluation.evaluate import Baseline, Evaluation
    from kapelle.metrics.statistics import MeanScore

NOTHING_MEASURED = 2
"""Exit code if every episode failed."""
NAMES = 26
"""Characters of the first column."""


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print the result."""
    hush()
    from kapelle.cli.named import open_player
    from kapelle.evaluation.evaluate import (
        choose_tasks,
        compute_matched,
        evaluate_tasks,
        greedy_play,
        why_fewer,
    )
    from kapelle.runtime.event_loop import run_async

    player = open_player(arguments)
    settings = player.config.evaluation
    play = greedy_play(player.play) if settings.greedy else player.play
    tasks = choose_tasks(play.environment, "test", settings.problems)
    say(f"playing {len(tasks)} unseen problems …", sys.stderr)
    result = run_async(lambda: evaluate_tasks(play, tasks, player.config.seed, player.returns))
    result = replace(result, fewer=why_fewer(play.environment, "test", settings.problems, len(tasks)))
    baselines: Sequence[Baseline] = []
    if not arguments.no_baselines:
        say("playing the baselines: the same number of tokens without a team …", sys.stderr)
        baselines = run_async(lambda: compute_matched(play, tasks, result.tokens, player.config.seed))
    row = _row(player, result, baselines)
    if player.steps is not None:
        keep_evaluation(split_run(player.name)[0], row, split_words(arguments.words)[1])
    if arguments.json:
        say(json.dumps(row))
    else:
        for line in _lines(player, result, baselines):
            say(line)
    return NOTHING_MEASURED if tasks and result.failed == result.problems else 0


def _row(player: Player, result: Evaluation, baselines: Sequence[Baseline]) -> dict[str, Any]:
    from kapelle.environment import asks_questions
    from kapelle.evaluation.evaluate import own_scores, own_totals

    own = (own_scores if asks_questions(player.play.environment) else own_totals)(result.groups)
    return {
        "player": player.name,
        "steps": player.steps,
        "environment": player.play.environment.name,
        "greedy": player.config.evaluation.greedy,
        "team": result.row(),
        "agents": {
            agent: {
                "success": rate.value,
                "interval": rate.interval,
                "scored": rate.scored,
                "problems": rate.played,
                "failed": rate.failed,
            }
            if (rate := own.get(agent)) is not None
            else None
            for agent in player.play.team.names
        },
        "baselines": [
            {
                "agents": list(each.agents),
                "answers": each.answers,
                "failed_answers": each.failed_answers,
                **each.result.row(),
            }
            for each in baselines
        ],
    }


def _lines(player: Player, result: Evaluation, baselines: Sequence[Baseline]) -> list[str]:
    trained = "" if player.steps is None else f" after {player.steps} steps"
    how = "greedy decoding" if player.config.evaluation.greedy else "sampled as in training"
    play = player.play
    lines = [
        f"{player.name}{trained}: {result.problems} unseen problems of {play.environment.name}, {how}, 95 % intervals",
        "",
        _line("team", *_team(result), f"{result.tokens:.1f} tokens a problem"),
        *(_line(f"  {tag}", *_rate(part)) for tag, part in result.parts.items()),
        *(
            _line(f"  {part}", "reward " + ", ".join(f"{who} {value:+.3f}" for who, value in earned.items()))
            for part, earned in result.part_reward.items()
        ),
        *_agents(player, result),
    ]
    if result.reason:
        lines.append(f"  not scored: {result.reason}")
    if baselines:
        lines += ["", "baselines without a team, with the same number of tokens per problem"]
    for each in baselines:
        who = ", ".join(each.agents)
        name = f"  {who} alone" if each.answers == 1 else f"  {who}, majority of {each.answers}"
        spent = f"{each.result.tokens:.1f} tokens a problem"
        asked = each.answers * each.result.problems
        failed = [f"{each.failed_answers} of {asked} answers failed"] if each.failed_answers else []
        lines.append(_line(name, *_rate(each.result.rate), spent, *failed))
    return lines


def _team(result: Evaluation) -> tuple[str, str]:
    if result.success is not None or not result.reward:
        return _rate(result.rate)
    from kapelle.metrics.statistics import missing_text

    missing = missing_text(result.failed, result.fewer)
    return (
        f"return {returns(result.reward)}",
        f"played {result.problems - result.failed} of {result.problems}{missing}",
    )


def _rate(rate: MeanScore) -> tuple[str, str]:
    from kapelle.metrics.statistics import share_text

    return share_text(rate.value, rate.interval), rate.counts()


def _agents(player: Player, result: Evaluation) -> list[str]:
    from kapelle.environment import asks_questions
    from kapelle.evaluation.evaluate import own_scores, own_totals
    from kapelle.metrics.statistics import missing_text

    questions = asks_questions(player.play.environment)
    own = (own_scores if questions else own_totals)(result.groups)
    lines = []
    for agent in player.play.team.names:
        if agent not in own and result.failed == result.problems:
            continue
        if agent not in own:
            lines.append(_line(f"  {agent}", "gives no answer of its own"))
        elif questions:
            lines.append(_line(f"  {agent}", *_rate(own[agent])))
        else:
            rate = own[agent]
            ends = f" [{rate.interval[0]:.3f}, {rate.interval[1]:.3f}]" if rate.interval else ""
            lines.append(
                _line(
                    f"  {agent}",
                    f"reward {rate.value:.3f}{ends}",
                    f"in {rate.scored} of {rate.played}{missing_text(rate.failed, '')}",
                )
            )
    return lines


def _line(name: str, value: str, counts: str = "", *rest: str) -> str:
    return f"{name:{NAMES}}  {value:22}  {'  '.join([f'{counts:18}', *rest])}".rstrip()
