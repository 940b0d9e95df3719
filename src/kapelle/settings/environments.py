"""Checks of the environment of a run, and of the settings that depend on the environment."""

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
    """Raise ConfigError if the environment violates its contract. This check comes first, because other checks call the environment."""
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
            f"The environment '{name}' cannot be used for training: {error} Run `kapelle validate {name}` to "
            "check all of it."
        ) from None


def check_server(run: RunToCheck) -> None:
    """Raise ConfigError if no server for outside programs can start on this machine."""
    if run.training and not run.elsewhere and offers(run.config.environment, DrivenByPrograms):
        with noting(run.absent):
            run.config.environment.check_server()


def check_nested(run: RunToCheck) -> None:
    """Raise ConfigError if an outer environment would discard the rewards of the environment inside it; see `check_rewards_kept`."""
    with noting(run.absent, *run.unneeded):
        check_rewards_kept(run.config.environment)


def check_rewards_kept(settings: object) -> None:
    """Raise ConfigError if an environment that rewards whole episodes is nested in another environment, which would discard its rewards."""
    for at, part in parts_of(settings):
        if at and offers(part, RewardsEpisodes) and not offers(settings, DrivenByPrograms):
            raise ConfigError(
                f"`{getattr(part, 'name', at)}` rewards whole episodes, so it cannot be part of another "
                f"environment (`environment.{at}`). Use it as the environment; `rewarded` has a setting "
                "`tools`."
            )


def check_rendered(run: RunToCheck) -> Iterator[str]:
    """Yield a message for each agent that cannot use the pre-rendered prompts of the environment."""
    if not any(getattr(part, "rendered_prompts", False) for _, part in parts_of(run.config.environment)):
        return
    for agent in run.team.agents:
        if agent.prompt is not None or agent.system is not None:
            yield (
                "`environment.rendered_prompts` cannot be combined with the prompt or system message of "
                f"agent '{agent.name}'. Remove them."
            )
        if run.team.policy(agent.name).endpoint is not None:
            yield (
                f"`environment.rendered_prompts` does not support agent '{agent.name}', because it is an "
                "endpoint. Set it to false."
            )


def check_legal_moves(run: RunToCheck) -> Iterator[str]:
    """Yield a message if an agent must choose among legal moves but the environment lists none, or if the agent thinks before choosing."""
    environment = run.config.environment
    constraints = {agent.name: agent.sampling.constraint for agent in run.team.agents}
    agent = next((name for name, each in constraints.items() if each and each.is_legal), None)
    if agent is None:
        return
    if (silent := _without_moves(environment)) is not None:
        yield (
            f"`sampling.choices: legal` of agent '{agent}' needs an environment that lists moves "
            f"(`ListsMoves`), but '{silent}' lists none. Write the choices themselves: `choices: [a, b]`."
        )
    for at, part in parts_of(environment):
        if getattr(part, "thinking", None) is True:
            key = ".".join(filter(None, ["environment", at, "thinking"]))
            yield (
                f"`{key}: true` and `sampling.choices: legal` of agent '{agent}' cannot be combined. Set `{key}: false`."
            )


def _without_moves(environment: Environment) -> str | None:
    """Return the name of the environment, or of a member of a mixture, that does not list legal moves, or None if all of them do."""
    if offers(environment, Mixed):
        return next(filter(None, map(_without_moves, environment.members.values())), None)
    return None if offers(environment, ListsMoves) else environment.name


def showing_images(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return the environments of a run that show images. Each item contains the section, the path in the section, and the name."""
    sections = {"environment": config.environment}
    sections |= {f"evaluation.sets.{name}": each for name, each in config.evaluation.sets.items()}
    return [
        (section, at, getattr(part, "name", at))
        for section, environment in sections.items()
        for at, part in parts_of(environment)
        if offers(part, ShowsImages)
    ]


def text_alone(run: RunToCheck, setting: str) -> Iterator[str]:
    """Yield a message about a setting that supports only text if one of the run's environments shows images."""
    for _, _, name in showing_images(run.config)[:1]:
        yield f"Environment '{name}' shows images, but {setting} supports only text. Remove or change this setting."


def check_images(run: RunToCheck) -> Iterator[str]:
    """Yield messages about nested environments that show images, and about settings that do not support images."""
    config, algorithm = run.config, run.algorithm
    for section, at, name in showing_images(config):
        if at:
            yield (
                f"`{name}` shows images, so it cannot be part of another environment (`{section}.{at}`). Use "
                "it as the environment."
            )
    answers = algorithm.critic is not None and algorithm.critic.view == "answer"
    if answers or algorithm.need(ReadsText) is not None:
        yield from text_alone(run, "`reward_model`" if config.reward_model else f"`{algorithm.name}`")


def demonstrates(environment: Environment) -> bool:
    """Return whether an environment has demonstrations: a script, recorded episodes, or an outside program that acts."""
    if offers(environment, DrivenByPrograms):
        return environment.demonstrates
    return offers(environment, Scripted) or offers(environment, Recorded)


def check_demonstrations(run: RunToCheck) -> Iterator[str]:
    """Yield messages about demonstrations that the environment lacks, and about recorded demonstrations that the algorithm cannot use."""
    algorithm, environment = run.algorithm, run.config.environment
    name = environment.name
    if offers(environment, Recorded) and algorithm.collects_episodes:
        yield (
            f"`{algorithm.name}` samples completions, but environment '{name}' rewards only recorded answers. Set "
            "`algorithm.data: recorded` (dpo, verifier)."
        )
    elif (
        offers(environment, Recorded) and algorithm.data.group_size > 1 and environment.answers_per_task() < 2
    ):
        yield (
            f"`{algorithm.name}` compares several answers to one question, but environment '{name}' has only one "
            "answer per question. Set `environment.name: preferences`."
        )
    elif not algorithm.collects_episodes and not demonstrates(environment):
        yield (
            f"`{algorithm.name}` learns from demonstrations, but environment '{name}' has no script for them. Use "
            "an environment that has a script."
        )


def check_replays(run: RunToCheck) -> Iterator[str]:
    """Yield a message if the algorithm assigns credit by replaying episodes and the episodes cannot be replayed."""
    algorithm, environment, data = run.algorithm, run.config.environment, run.algorithm.data
    replays = data.tree is not None or data.interventions is not None or bool(data.widths)
    alive = report_of(environment).alive if replays else ()
    if alive:
        fix = "Set `algorithm.tree: false`" if data.tree is not None else "Set another `algorithm.name`"
        yield (
            f"`{algorithm.name}` replays episodes, but environment '{environment.name}' uses responses that "
            "may differ in a replay: "
            f"{', '.join(alive)}. {fix}, or remove them."
        )


def check_compared(run: RunToCheck) -> Iterator[str]:
    """Yield the reasons why rewards that compare the episodes of a group cannot be computed for this run."""
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
    """Yield a message for each constant-sum game whose agents share a reward, because all advantages would be 0."""
    how = run.config.algorithm.model_dump().get("team_reward")
    for name in _constant_sums(run.config.environment):
        if how in {"mean", "sum"} and len(run.team.names) > 1:
            yield (
                f"`{name}` is a constant-sum game, but `algorithm.team_reward: {how}` gives all agents the "
                "same reward. Set `algorithm.team_reward: individual`."
            )


def _constant_sums(environment: Environment) -> Iterator[str]:
    """Yield the name of the environment, or of each member of a mixture, that is a constant-sum game."""
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
