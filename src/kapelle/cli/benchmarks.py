"""Implements `kapelle eval --benchmark`: a run, a model or a recipe's team on published benchmarks (`environments.benchmarks`).

All names, settings and data are checked before a model is loaded. The team is loaded once for all benchmarks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kapelle.cli.named import is_model, is_recipe, open_player, owner_of
from kapelle.cli.parser import split_words
from kapelle.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from kapelle.cli.named import Player
    from kapelle.environments.benchmarks.environment import Benchmark
    from kapelle.rollout.evaluation.evaluate import Evaluation
    from kapelle.settings.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Chosen:
    """The benchmarks of a command, and the words of the command that concern the team."""

    benchmarks: tuple[Benchmark, ...]
    words: tuple[str, ...]


def listed() -> str:
    """Return a table of the benchmarks."""
    from kapelle.environments.benchmarks.definitions import BENCHMARKS

    rows = [("benchmark", "about", "shots", "scores", "data set on the Hub")]
    rows += [
        (name, each.about, str(each.shots), ", ".join(each.metrics), each.hub[0])
        for name, each in BENCHMARKS.items()
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def chosen(arguments: argparse.Namespace) -> Chosen:
    """Return the benchmarks that `--benchmark` names, after all checks that need no weights.

    Raises ConfigError for unknown names and settings, and DataError for missing data. Settings have the form `gsm8k.path=…`.
    """
    from kapelle.environments.benchmarks.definitions import BENCHMARKS
    from kapelle.environments.benchmarks.environment import Benchmark
    from kapelle.settings.overlays import parse_setting

    names = list(dict.fromkeys(name.strip() for name in arguments.benchmark.split(",")))
    for name in names:
        if name not in BENCHMARKS:
            known = ", ".join(BENCHMARKS)
            raise ConfigError(
                f"--benchmark '{name}' is unknown.{did_you_mean(name, BENCHMARKS)} The benchmarks are {known}."
            )
    words = [(word, owner_of(word, BENCHMARKS) if "=" in word else None) for word in arguments.words]
    for word, owner in words:
        if owner is not None and owner not in names:
            raise ConfigError(f"'{word}' is a setting of {owner}, but --benchmark is {arguments.benchmark}.")
    found = []
    for name in names:
        given: dict[str, Any] = {}
        for word, owner in words:
            if owner == name:
                given |= parse_setting(word)[name]
        found.append(_built(Benchmark, name, given))
    if arguments.environment is not None and not is_recipe(arguments.environment):
        raise ConfigError(
            f"--benchmark replaces the environment, and '{arguments.environment}' is not a recipe. Remove --environment."
        )
    result = Chosen(tuple(found), tuple(word for word, owner in words if owner is None))
    for each in result.benchmarks:
        each.check(())
    return result


def _built(kind: type[Benchmark], name: str, given: Mapping[str, Any]) -> Benchmark:
    import pydantic

    try:
        return kind(benchmark=name, **given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        at = ".".join([name, *(str(part) for part in first["loc"])])
        raise ConfigError(f"`{at}`: {first['msg'].removeprefix('Value error, ')}.") from None


def players(arguments: argparse.Namespace, named: Chosen) -> Iterator[tuple[Player, argparse.Namespace]]:
    """Yield the player of each benchmark and its arguments. The weights are the same, and the environment is the benchmark."""
    from kapelle.environment import UsesModels, offers

    given, settings = split_words(named.words)
    model = arguments.model or (given[0] if len(given) == 1 and is_model(given[0]) else None)
    own = argparse.Namespace(**{**vars(arguments), "words": list(named.words)})
    if model is not None and arguments.environment is None:
        # A model without a team answers alone, in the environment of the first benchmark.
        first = named.benchmarks[0]
        fields = first.model_dump(mode="json", exclude_unset=True)
        words = [f"environment.{key}={json.dumps(value)}" for key, value in fields.items() if key != "name"]
        own.model, own.environment, own.words = model, first.name, [*settings, *words]
    config = _config(own)
    for benchmark in named.benchmarks if config is not None else ():
        _check(config, benchmark)
    player = open_player(own)
    asked = any(word.startswith("evaluation.problems=") for word in settings)
    for benchmark in named.benchmarks:
        player.setup.workflow.check(player.setup.team.agents, benchmark)
        environment: Any = benchmark
        if offers(environment, UsesModels) and environment.frozen_models:
            from kapelle.setup.frozen_models import FrozenModels  # slow: torch

            environment = environment.with_models(FrozenModels(player.config.model))
        evaluation = player.config.evaluation.model_copy(update={"sets": {}, "for_set": {}})
        if not asked:
            evaluation = evaluation.model_copy(update={"problems": benchmark.size("test")})
        config = player.config.model_copy(update={"evaluation": evaluation, "environment": benchmark})
        setup = replace(player.setup, environment=environment, workers=None)
        # Baselines would double the queries to a judge, and its ratings have no majority.
        alone = arguments.no_baselines or benchmark.judge is not None
        yield (
            replace(player, config=config, setup=setup),
            argparse.Namespace(**{**vars(arguments), "no_baselines": alone}),
        )


def _config(arguments: argparse.Namespace) -> RunConfig | None:
    """Return the settings of the team, or None if the words name none, for which `open_player` raises an error."""
    from kapelle.rollout.evaluation.playing import model_config
    from kapelle.runs.named_checkpoint import split_run
    from kapelle.runs.reader import is_run
    from kapelle.setup.team_file import is_team
    from kapelle.training.provenance import config_of_run

    given, settings = split_words(arguments.words)
    if arguments.environment is not None and arguments.model is not None:
        return model_config(arguments.model, arguments.environment, settings, real=arguments.real)
    run = split_run(given[0])[0] if len(given) == 1 else None
    return config_of_run(run) if run is not None and (is_run(run) or is_team(run)) else None


def _check(config: Any, benchmark: Benchmark) -> None:
    """Make the checks of a run with the benchmark as its environment, such as the workflow and the length of the prompts."""
    from kapelle.settings.feature import without_features
    from kapelle.setup.preparation import prepare

    evaluation = config.evaluation.model_copy(update={"sets": {}, "for_set": {}})
    changed = config.model_copy(update={"environment": benchmark, "evaluation": evaluation})
    try:
        prepare(without_features(changed), training=False)
    except ConfigError as error:
        form = f"`{benchmark.benchmark}.form=completion`"
        raise ConfigError(str(error).replace("`environment.rendered_prompts`", form)) from None


def completed(player: Player, result: Evaluation) -> Evaluation:
    """Return the result, for `mt_bench` with the answers to the second question of each conversation."""
    from kapelle.rollout.evaluation.evaluate import decoded, evaluate_shared, lengths_of, summarise
    from kapelle.types import Group

    benchmark: Any = player.setup.environment
    tasks = [
        benchmark.second(group.task, episode.answer, sample)
        for group in result.groups
        for sample, episode in enumerate(group.episodes)
        if episode.error is None and benchmark.benchmark == "mt_bench"
    ]
    if not tasks:
        return result
    setup = decoded(player.setup, player.config.evaluation)
    second = evaluate_shared(setup, tasks, player.config.seed + 1, player.returns)
    # One group for each rating, so that the success is the mean of all ratings.
    first = (Group(group.task, (episode,)) for group in result.groups for episode in group.episodes)
    groups = (*first, *second.groups)
    both = summarise(groups, player.returns)
    return replace(both, fewer=result.fewer, lengths=lengths_of(groups), groups=groups)


def about(player: Player, result: Evaluation) -> dict[str, Any]:
    """Return what the result says about the benchmark: its name, its definition and its scores."""
    benchmark: Any = player.setup.environment
    described = benchmark.described()
    episodes = [e for group in result.groups for e in group.valid if e.success is not None]
    scores = {
        metric: fmean(float(e.info.get(metric, e.success)) for e in episodes)
        for metric in benchmark.definition.metrics
        if episodes and (metric == benchmark.main or all(metric in e.info for e in episodes))
    }
    if "rating" in scores:
        scores = {"rating": 10 * scores["rating"]}  # the scale of the judge, 1 to 10
    limits = {agent.name: player.setup.sampling_of(agent).max_tokens for agent in player.setup.team.agents}
    described |= {"evaluated": result.problems, "scores": scores, "max_tokens": limits}
    return {"environment": benchmark.benchmark, "benchmark": described}


def lines_of(row: Mapping[str, Any]) -> list[str]:
    """Return the scores of a benchmark as lines, or an empty list for any other evaluation."""
    found = row.get("benchmark")
    if found is None:
        return []
    scores = [f"  {name:24}  {value:.4g}" for name, value in found["scores"].items()]
    return ["", f"{found['name']}, {found['shots']} shots, {found['form']}: {found['definition']}", *scores]
