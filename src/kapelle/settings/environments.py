"""Checks of a run's environment, and of the settings that depend on it."""

from __future__ import annotations

from collections.abc import Iterator

from kapelle.environment import (
    DrivenByPrograms,
    Environment,
    ListsMoves,
    Mixed,
    Recorded,
    RewardsEpisodes,
    Scripted,
    ShowsImages,
    check_capabilities,
    check_declared,
    offers,
    report_of,
    size_of,
)
from kapelle.errors import ConfigError, noting
from kapelle.rows import PlaysAlone, ReadsText
from kapelle.runtime.foreign_code import Unfit, call_user_code
from kapelle.settings.base import parts_of
from kapelle.settings.checks import Check, RunToCheck
from kapelle.settings.schema import RunConfig


def check_fit(run: RunToCheck) -> None:
    """Raise ConfigError for an environment that does not keep its contract; other checks call it."""
    environment, seconds = run.config.environment, run.config.patience.environment
    try:
        check_declared(environment, seconds)
        with noting(run.absent, *run.unneeded):
            call_user_code("check", seconds, environment.check, run.team.names)
            check_capabilities(environment, len(run.team.names), seconds)
            for split in ("train", "test"):
                size_of(environment, split, seconds)
    except Unfit as error:
        name = environment.name
        raise ConfigError(
            f"The environment '{name}' is not fit for training: {error} `kapelle validate {name}` checks all of it."
        ) from None


def check_server(run: RunToCheck) -> None:
    """Raise ConfigError if no server for outside programs can start here."""
    if run.training and not run.elsewhere and offers(run.config.environment, DrivenByPrograms):
        with noting(run.absent):
            run.config.environment.check_server()


def check_nested(run: RunToCheck) -> None:
    """Raise ConfigError for an environment whose rewards another one would drop; see `check_rewards_kept`."""
    with noting(run.absent, *run.unneeded):
        check_rewards_kept(run.config.environment)


def check_rewards_kept(settings: object) -> None:
    """Raise ConfigError for an environment that rewards whole episodes inside another one, which would drop its rewards."""
    for at, part in parts_of(settings):
        if at and offers(part, RewardsEpisodes) and not offers(settings, DrivenByPrograms):
            raise ConfigError(
                f"`{getattr(part, 'name', at)}` rewards whole episodes, and cannot be part of another environment (`environment.{at}`). "
                "Use it as the environment; `rewarded` has a setting `tools`."
            )


def check_rendered(run: RunToCheck) -> Iterator[str]:
    """Yield agents that cannot use prompts that are rendered already."""
    if not any(getattr(part, "rendered_prompts", False) for _, part in parts_of(run.config.environment)):
        return
    for agent in run.team.agents:
        if agent.prompt is not None or agent.system is not None:
            yield (
                f"`environment.rendered_prompts` excludes the prompt and the system message of agent '{agent.name}'. Remove them."
            )
        if run.team.policy(agent.name).endpoint is not None:
            yield f"`environment.rendered_prompts` excludes agent '{agent.name}', an endpoint. Set it to false."


def check_legal_moves(run: RunToCheck) -> Iterator[str]:
    """Yield that an agent chooses among legal moves which the environment does not list, or after a thought."""
    environment = run.config.environment
    constraints = {agent.name: agent.sampling.constraint for agent in run.team.agents}
    agent = next((name for name, each in constraints.items() if each and each.is_legal), None)
    if agent is None:
        return
    if (silent := _without_moves(environment)) is not None:
        yield (
            f"`sampling.choices: legal` of agent '{agent}' needs an environment that lists moves (`ListsMoves`), and '{silent}' lists none. "
            "Write the texts themselves, `choices: [a, b]`."
        )
    for at, part in parts_of(environment):
        if getattr(part, "thinking", None) is True:
            key = ".".join(filter(None, ["environment", at, "thinking"]))
            yield (
                f"`{key}: true` and `sampling.choices: legal` of agent '{agent}' exclude each other. Set `{key}: false`."
            )


def _without_moves(environment: Environment) -> str | None:
    """Return the name of an environment, or of a member of a mixture, that lists no moves; None if all do."""
    if offers(environment, Mixed):
        return next(filter(None, map(_without_moves, environment.members.values())), None)
    return None if offers(environment, ListsMoves) else environment.name


def showing_images(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return the environments of a run that show images: their section, their path in it, and their name."""
    sections = {"environment": config.environment}
    sections |= {f"evaluation.sets.{name}": each for name, each in config.evaluation.sets.items()}
    return [
        (section, at, getattr(part, "name", at))
        for section, environment in sections.items()
        for at, part in parts_of(environment)
        if offers(part, ShowsImages)
    ]


def text_alone(run: RunToCheck, setting: str) -> Iterator[str]:
    """Yield the fault of a setting that does not support images, if an environment shows some."""
    for _, _, name in showing_images(run.config)[:1]:
        yield f"Environment '{name}' shows images, and {setting} reads text alone. Remove it, or change it."


def check_images(run: RunToCheck) -> Iterator[str]:
    """Yield environments with images inside others, and settings that do not support images."""
    config, algorithm = run.config, run.algorithm
    for section, at, name in showing_images(config):
        if at:
            yield (
                f"`{name}` shows images, and cannot be part of another environment (`{section}.{at}`). Use it as the environment."
            )
    answers = algorithm.critic is not None and algorithm.critic.view == "answer"
    if answers or algorithm.need(ReadsText) is not None:
        yield from text_alone(run, "`reward_model`" if config.reward_model else f"`{algorithm.name}`")


def demonstrates(environment: Environment) -> bool:
    """Return whether an environment has demonstrations: a script, records, or an outside program that acts."""
    if offers(environment, DrivenByPrograms):
        return environment.demonstrates
    return offers(environment, Scripted) or offers(environment, Recorded)


def check_demonstrations(run: RunToCheck) -> Iterator[str]:
    """Yield demonstrations that the environment lacks, and recorded ones that the algorithm cannot use."""
    algorithm, environment = run.algorithm, run.config.environment
    name = environment.name
    if offers(environment, Recorded) and algorithm.collects_episodes:
        yield f"`{algorithm.name}` samples, but environment '{name}' rewards recorded answers alone. Set `algorithm.data: recorded` (dpo, verifier)."
    elif (
        offers(environment, Recorded) and algorithm.data.group_size > 1 and environment.answers_per_task() < 2
    ):
        yield f"`{algorithm.name}` compares several answers to one question, but environment '{name}' has one. Set `environment.name: preferences`."
    elif not algorithm.collects_episodes and not demonstrates(environment):
        yield f"`{algorithm.name}` learns from demonstrations, but environment '{name}' has no script for them. Use one that has."


def check_replays(run: RunToCheck) -> Iterator[str]:
    """Yield a message if episodes cannot be replayed for the algorithm's credit."""
    algorithm, environment, data = run.algorithm, run.config.environment, run.algorithm.data
    replays = data.tree is not None or data.interventions is not None or bool(data.widths)
    alive = report_of(environment).alive if replays else ()
    if alive:
        fix = "Set `algorithm.tree: false`" if data.tree is not None else "Set another `algorithm.name`"
        yield (
            f"`{algorithm.name}` replays episodes, but environment '{environment.name}' relies on answers that may differ the next time: "
            f"{', '.join(alive)}. {fix}, or remove them."
        )


def check_compared(run: RunToCheck) -> Iterator[str]:
    """Yield the reasons why rewards that compare the episodes of a group cannot be given."""
    environment, name, data = run.config.environment, run.algorithm.name, run.algorithm.data
    if not (offers(environment, RewardsEpisodes) and environment.compared):
        return
    compares = f"{environment.compared[0]} compares the episodes of a group, and"
    if data.group_size < 2:
        yield f"{compares} `{name}` collects one episode per task. Set `algorithm.group_size: 2` or more."
    if data.tree:
        yield f"{compares} `{name}` rewards the candidates of a tree one by one. Set `algorithm.tree: false`."
    if data.interventions or run.algorithm.need(PlaysAlone):
        yield f"{compares} `{name}` collects single episodes without their group. Choose another algorithm."


def check_opposed(run: RunToCheck) -> Iterator[str]:
    """Yield constant-sum games with shared rewards: every advantage would be 0."""
    how = run.config.algorithm.model_dump().get("team_reward")
    for name in _constant_sums(run.config.environment):
        if how in {"mean", "sum"} and len(run.team.names) > 1:
            yield (
                f"`{name}` is a constant-sum game, and `algorithm.team_reward: {how}` rewards all agents alike. Set "
                "`algorithm.team_reward: individual`."
            )


def _constant_sums(environment: Environment) -> Iterator[str]:
    """Yield the names of constant-sum games: an environment, and the members of a mixture."""
    for member in environment.members.values() if offers(environment, Mixed) else ():
        yield from _constant_sums(member)
    if report_of(environment).constant_sum:
        yield environment.name


CHECKS: tuple[Check, ...] = (
    check_images,
    check_rendered,
    check_legal_moves,
    check_fit,
    check_server,
    check_nested,
)
TRAINING_CHECKS: tuple[Check, ...] = (check_compared, check_replays, check_opposed, check_demonstrations)
