"""Checks of a run's settings in combination, before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator

from kapelle.algorithm import Algorithm
from kapelle.algorithms.signals.embeddings import Embeddings
from kapelle.algorithms.signals.greedy import GreedyBaseline
from kapelle.algorithms.signals.verifier import VerifierScores
from kapelle.engines.rollout.protocol import (
    ChecksItself,
    HoldsToConstraints,
    ReadsImages,
    RecordsRouting,
)
from kapelle.engines.train.settings import Fsdp
from kapelle.environment import (
    Alive,
    DrivenByPrograms,
    Environment,
    ListsMoves,
    Mixed,
    OpensStates,
    Opposed,
    Recorded,
    RewardsEpisodes,
    Scorable,
    Scripted,
    ShowsImages,
    UsesModels,
    check_capabilities,
    check_declared,
    offers,
    size_of,
    task_of,
)
from kapelle.errors import AbsentCode, ConfigError, DataError, KapelleError, did_you_mean, noting, raise_all
from kapelle.models.devices import check_bitsandbytes, check_four_bit
from kapelle.models.outline import read_settings
from kapelle.models.paths import check_model_path
from kapelle.runs.trackers import check_tracker
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.foreign_code import Unfit, asked, check_parameters
from kapelle.runtime.ranks import launched_rank
from kapelle.settings.base import parts_of
from kapelle.settings.schema import RunConfig
from kapelle.setup.environment_forms import environment_form
from kapelle.setup.feature import RunToCheck, plans_of
from kapelle.setup.team_builder import pools_of
from kapelle.team import Team
from kapelle.workflow import CountsTurns, ScoresRounds


def unneeded(training: bool) -> tuple[type[KapelleError], ...]:
    """Return further errors that are only notes in a run without training, which needs neither its rows nor the user's code."""
    return () if training else (AbsentCode, DataError)


Check = Callable[[RunToCheck], Iterator[str] | None]
"""Yields each fault, its place, and how to fix it; or raises ConfigError for the first fault."""


def check_run(
    config: RunConfig,
    algorithm: Algorithm,
    team: Team,
    given: Container[str] = (),
    training: bool = True,
    elsewhere: bool = False,
    absent: list[str] | None = None,
) -> None:
    """Raise ConfigError with all faults of these settings; cheap, loads no model. Arguments as in `RunToCheck`."""
    run = RunToCheck(config, algorithm, team, given, training, elsewhere, absent)
    faults: list[ConfigError] = []
    for check in (*CHECKS, *(CHECKS_OF_TRAINING if training else ())):
        try:
            faults += map(ConfigError, check(run) or ())
        except ConfigError as fault:
            faults.append(fault)
            if check is _check_environment:  # later checks call the environment
                break
        except KapelleError:  # errors of a model or of rows; faults of settings come first
            raise_all(faults)
            raise
    raise_all(faults)


def _check_environment(run: RunToCheck) -> None:
    environment, seconds = run.config.environment, run.config.patience.environment
    try:
        check_declared(environment, seconds)
        with noting(run.absent, *unneeded(run.training)):
            asked("check", seconds, environment.check, run.team.names)
            check_capabilities(environment, len(run.team.names), seconds)
            for split in ("train", "test"):
                size_of(environment, split, seconds)
    except Unfit as error:
        name = environment.name
        raise ConfigError(
            f"The environment '{name}' is not fit for training: {error} `kapelle validate {name}` checks all of it."
        ) from None


def _check_engine(run: RunToCheck) -> None:
    engine = run.config.engine
    if run.config.model.routing == "replayed" and not isinstance(engine, RecordsRouting):
        raise ConfigError(
            f"`model.routing: replayed` is not supported by `engine.name: {engine.name}`. Set `model.routing: free`."
        )
    if isinstance(engine, ChecksItself):
        engine.check_policies(run.team.every.values())
        if not run.elsewhere:
            with noting(run.absent):
                engine.check()


def _check_places(run: RunToCheck) -> Iterator[str]:
    """Yield the things that worker and sampler processes cannot reach."""
    config, environment = run.config, run.config.environment
    workers, name = config.episode.environment_workers, environment.name
    for part, each in config.evaluation.sets.items():
        if offers(each, UsesModels) and each.frozen_models:
            yield (
                f"`evaluation.sets.{part}` is judged by '{each.frozen_models[0].path}', a model in this process. Name an endpoint as its judge."
            )
    models = environment.frozen_models if offers(environment, UsesModels) else ()
    if workers and models and not offers(environment, RewardsEpisodes):
        yield (
            f"Episodes of `{name}` use '{models[0].path}', a model in this process. Set `episode.environment_workers: 0`, or name an endpoint."
        )
    if run.training and not run.elsewhere and offers(environment, DrivenByPrograms):
        with noting(run.absent):
            environment.check_server()
    if workers and offers(environment, OpensStates):
        yield f"Episodes of `{name}` are on its servers. Set `episode.environment_workers: 0`."
    elif workers:
        environment_form(environment)
    with noting(run.absent, *unneeded(run.training)):
        check_paying(environment)


def _check_workflow(run: RunToCheck) -> Iterator[str]:
    workflow, team, config = run.config.workflow, run.team, run.config
    try:
        check_parameters("`check`", workflow.check, "agents", "environment")
        with noting(run.absent):
            asked("check", config.patience.environment, workflow.check, team.agents, config.environment)
        check_parameters("`run`", workflow.run, "scene")
        if inspect.isasyncgenfunction(workflow.run) or inspect.isgeneratorfunction(workflow.run):
            raise Unfit("`run` has a `yield`. Write `async def run(self, scene)` without it.")
    except Unfit as error:
        raise ConfigError(f"The workflow '{workflow.name}' cannot be played: {error}") from None
    if not isinstance(workflow, CountsTurns):  # an episode ends at the first turn without weights
        return
    for agent, listed in team.turns_of.items():
        turns = workflow.most_turns(team.names)[agent]
        if turns != len(listed):
            yield (
                f"`weights.per_turn` of agent '{agent}' has weights for {len(listed)} turns, but the workflow gives it {turns}. Set `per_turn: {turns}`."
            )


def _check_prices(run: RunToCheck) -> Iterator[str]:
    known = [*run.team.names, "default"]
    for name in run.config.evaluation.prices:
        if name not in known:
            yield f"`evaluation.prices` names '{name}', which is not an agent of the team.{did_you_mean(name, known)}"


def _check_models(run: RunToCheck) -> None:
    model, team = run.config.model, run.team
    for path in team.bases.values():
        if path not in run.given:
            with noting(run.absent):
                check_model_path(path)
    if model.quantization is None:
        return
    if run.training and not team.bases.keys() - team.trained_bases:
        raise ConfigError(
            "`model.quantization: nf4` is for frozen models, and all models of this team are trained. Set `team.sharing: lora`."
        )
    if model.path not in run.given:
        with noting(run.absent):
            check_four_bit(model.path, here=not run.elsewhere)


def _check_installed(run: RunToCheck) -> None:
    """Raise AbsentPackage for optimisers and trackers with missing packages."""
    config = run.config
    if run.elsewhere:
        return
    if config.optimizer.name != "adamw":
        with noting(run.absent):
            check_bitsandbytes(f"optimizer.name: {config.optimizer.name}", "optimizer.name: adamw")
    for tracker in config.trackers:
        with noting(run.absent):
            check_tracker(tracker.name)


def _check_features(run: RunToCheck) -> Iterator[str]:
    for plan in plans_of(run.config):
        yield from plan.check(run)


def _check_constraints(run: RunToCheck) -> None:
    """Raise ConfigError for constraints that an engine, an environment or no text can satisfy."""
    config, team = run.config, run.team
    for agent in team.agents:
        constraint, name = agent.sampling.constraint, agent.name
        if constraint is None:
            continue
        policies = [team.policies[policy] for policy in team.policies_of(name)]
        served = [policy for policy in policies if policy.endpoint is not None]
        if served and constraint.kind not in ("json_schema", "json_object"):
            raise ConfigError(
                f"Agent '{name}' is an endpoint, and endpoints do not support {constraint.kind}. Set `json_schema` in its `sampling`."
            )
        if len(served) < len(policies) and not isinstance(config.engine, HoldsToConstraints):
            raise ConfigError(
                f"`engine.name: {config.engine.name}` does not support the constraint of agent '{name}' (`sampling`). Remove one of them."
            )
        if constraint.is_legal:
            _check_legal_moves(config.environment, name)
        if not run.elsewhere and len(served) < len(policies):
            from kapelle.models.token_masks import check_constraint, check_installed

            with noting(run.absent):
                check_installed()
                try:
                    if not constraint.is_legal:
                        check_constraint(constraint)
                except ConfigError as error:
                    raise ConfigError(f"Agent '{name}': {error}") from None


def _check_legal_moves(environment: Environment, agent: str) -> None:
    silent = _without_moves(environment)
    if silent is not None:
        raise ConfigError(
            f"`sampling.choices: legal` of agent '{agent}' needs an environment that lists moves (`ListsMoves`), and '{silent}' lists none. "
            "Write the texts themselves, `choices: [a, b]`."
        )
    for at, part in parts_of(environment):
        if getattr(part, "thinking", None) is True:
            key = ".".join(["environment", *([at] if at else []), "thinking"])
            raise ConfigError(
                f"`{key}: true` and `sampling.choices: legal` of agent '{agent}' exclude each other. Set `{key}: false`."
            )


def _without_moves(environment: Environment) -> str | None:
    """Return the name of an environment, or of a member of a mixture, that lists no moves; None if all do."""
    if offers(environment, Mixed):
        return next(filter(None, map(_without_moves, environment.members.values())), None)
    return None if offers(environment, ListsMoves) else environment.name


def _check_images(run: RunToCheck) -> Iterator[str]:
    """Yield settings that do not support the images of an environment."""
    config, algorithm, team = run.config, run.algorithm, run.team
    environments = {"environment": config.environment}
    environments |= {f"evaluation.sets.{name}": each for name, each in config.evaluation.sets.items()}
    shown = [
        (key, at, getattr(part, "name", at))
        for key, environment in environments.items()
        for at, part in parts_of(environment)
        if offers(part, ShowsImages)
    ]
    for key, at, name in shown:
        if at:
            raise ConfigError(
                f"`{name}` shows images, and cannot be part of another environment (`{key}.{at}`). Use it as the environment."
            )
    if not shown:
        return
    unsupported = []
    if not isinstance(config.engine, ReadsImages):
        unsupported.append(f"`engine.name: {config.engine.name}`")
    if config.train_engine.name == "fsdp":
        unsupported.append("`train_engine.name: fsdp`")
    if config.episode.environment_workers:
        unsupported.append("`episode.environment_workers`")
    if (algorithm.critic is not None and algorithm.critic.view == "answer") or any(
        algorithm.need(signal) is not None for signal in (VerifierScores, Embeddings)
    ):
        unsupported.append("`reward_model`" if config.reward_model is not None else f"`{algorithm.name}`")
    name = shown[0][2]
    for setting in unsupported:
        yield f"Environment '{name}' shows images, and {setting} reads text alone. Remove it, or change it."
    for base, path in team.bases.items():
        if path in run.given:
            continue
        settings = read_settings(path) if path != "embedded" else {}
        sees = config.model.embedded.sees if path == "embedded" else "vision_config" in settings
        if not sees and (settings or path == "embedded"):  # a name on the hub is not known yet
            raise ConfigError(
                f"Environment '{name}' shows images, and the model '{path}' ({base}) reads text alone. Name a vision-language model, or set "
                "`model.embedded.sees: true`."
            )


def check_paying(settings: object) -> None:
    """Raise ConfigError for an environment that rewards whole episodes inside another one, which would drop its rewards."""
    for at, part in parts_of(settings):
        if at and offers(part, RewardsEpisodes) and not offers(settings, DrivenByPrograms):
            raise ConfigError(
                f"`{getattr(part, 'name', at)}` rewards whole episodes, and cannot stand inside another environment (`environment.{at}`). "
                "Use it as the environment; `rewarded` has a setting `tools`."
            )


def _check_rendered(run: RunToCheck) -> Iterator[str]:
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


def _check_outside(run: RunToCheck) -> Iterator[str]:
    """Yield settings that episodes of an outside program do not support."""
    config = run.config
    if offers(config.environment, DrivenByPrograms) and config.episode.environment_workers:
        yield "`episode.environment_workers` is not supported for episodes of an outside program. Set it to 0."


MOST_EPISODES = 1_000_000
"""Maximum episodes of one step or one evaluation, which are in memory together."""


def _check_amount(run: RunToCheck) -> Iterator[str]:
    """Yield numbers of episodes for which no machine has enough memory."""
    config = run.config
    tasks, group = config.training.tasks_per_step, int(getattr(config.algorithm, "group_size", 1))
    if tasks * group > MOST_EPISODES:
        yield (
            f"`training.tasks_per_step: {tasks}` with `algorithm.group_size: {group}` makes {tasks * group:,} episodes in one step. Set at "
            f"most {MOST_EPISODES:,}."
        )
    if config.evaluation.problems > MOST_EPISODES and config.environment.size("test") is None:
        yield f"`evaluation.problems: {config.evaluation.problems}` are too many. Set at most {MOST_EPISODES:,}."


def _check_learners(run: RunToCheck) -> None:
    """Raise ConfigError if no weights are trained, or weights that the algorithm does not train."""
    config, algorithm, team = run.config, run.algorithm, run.team
    judging = algorithm.critic is not None and algorithm.critic.everyone
    if judging and team.trained:
        raise ConfigError(
            f"`{algorithm.name}` trains no agent, but policy '{team.trained[0]}' of this team is trained. Set `team.sharing: frozen`."
        )
    if not team.trained and not judging:
        raise ConfigError(
            "No agent of this team is trained. Set `team.sharing: lora` or `shared`, or an agent's `weights`."
        )
    for check in algorithm.checks:
        with noting(run.absent):
            check(team)
    learns_beside = algorithm.critic is not None or algorithm.memory_learns
    if config.training.critic_warmup and (not learns_beside or judging):
        raise ConfigError(
            f"`training.critic_warmup` trains critics alone at first, and `{algorithm.name}` trains {'nothing else' if judging else 'no critic'}. Set it to 0."
        )
    if algorithm.critic is not None and algorithm.critic.view == "central" and not config.team.critic_model:
        _check_one_tokeniser(algorithm, team)
    if algorithm.plays:
        _check_sampling(team)


def _check_train_engine(run: RunToCheck) -> None:
    config, team = run.config, run.team
    if not isinstance(config.train_engine, Fsdp):
        return
    places = {base: team.places.get(base, config.model) for base in team.bases}
    policies, critics = team.policies.values(), team.critics.values()
    whole = [policy.name for policy in policies if policy.trained and policy.lora is None]
    whole += [critic.name for critic in critics if critic.trained and critic.whole]
    adapted = [policy.name for policy in policies if policy.lora is not None]
    adapted += [critic.name for critic in critics if not critic.whole]
    started = launched_rank()
    config.train_engine.check(
        {base: place.dtype for base, place in places.items()},
        whole,
        adapted,
        config.optimizer.name,
        1 if started is None else started.size,
    )


def _check_pools(run: RunToCheck) -> None:
    pools_of(run.config, run.team)


def demonstrates(environment: Environment) -> bool:
    """Return whether an environment has demonstrations: a script, records, or an outside program that acts."""
    if offers(environment, DrivenByPrograms):
        return environment.demonstrates
    return offers(environment, Scripted) or offers(environment, Recorded)


def _check_demonstrations(run: RunToCheck) -> Iterator[str]:
    """Yield the parts that lack demonstrations or cannot use recorded ones."""
    algorithm, environment = run.algorithm, run.config.environment
    name = environment.name
    if offers(environment, Recorded) and algorithm.plays:
        raise ConfigError(
            f"`{algorithm.name}` samples, but environment '{name}' rewards recorded answers alone. Set `algorithm.data: recorded` (dpo, verifier)."
        )
    if offers(environment, Recorded) and algorithm.data.group_size > 1 and environment.answers_per_task() < 2:
        raise ConfigError(
            f"`{algorithm.name}` compares several answers to one question, but environment '{name}' has one. Set `environment.name: preferences`."
        )
    if not algorithm.plays and not demonstrates(environment):
        yield f"`{algorithm.name}` learns from demonstrations, but environment '{name}' has no script for them. Use one that has."


def _check_selection(run: RunToCheck) -> Iterator[str]:
    """Yield the reasons why the settings cannot choose tasks."""
    config, tasks = run.config, run.config.tasks
    if tasks.difficulty is not None:
        if config.environment.size("train") is None:
            yield f"`tasks.difficulty` measures every training task, and `{config.environment.name}` generates them. Remove it."
        if not run.algorithm.plays:
            yield f"`tasks.difficulty` measures the team, and `{run.algorithm.name}` does not play. Remove it."
    elif tasks.curriculum is not None and tasks.curriculum.by == "solve_rate":
        yield "`tasks.curriculum` needs solve rates, which nothing measures. Set `tasks.difficulty: {}` too."


def _check_replays(run: RunToCheck) -> Iterator[str]:
    """Yield a message if episodes cannot be replayed for the algorithm's credit."""
    algorithm, environment, data = run.algorithm, run.config.environment, run.algorithm.data
    replays = data.tree is not None or data.interventions is not None or bool(data.widths)
    alive = environment.alive if replays and offers(environment, Alive) else ()
    if alive:
        fix = "Set `algorithm.tree: false`" if data.tree is not None else "Set another `algorithm.name`"
        yield (
            f"`{algorithm.name}` replays episodes, but environment '{environment.name}' relies on answers that may differ the next time: "
            f"{', '.join(alive)}. {fix}, or remove them."
        )


def _check_turn_scores(run: RunToCheck) -> None:
    """Raise ConfigError if the algorithm needs scores of turns, and the environment or the workflow has none."""
    config, algorithm, environment = run.config, run.algorithm, run.config.environment
    if not algorithm.data.scores:
        return
    state = environment.start(task_of(environment, "train", 0), run.team.names, 0)
    scorable = isinstance(state, Scorable)
    run_async(state.close)
    if not scorable:
        raise ConfigError(
            f"`{algorithm.name}` needs a score at every turn, which '{environment.name}' cannot give. Use an environment of questions, or `algorithm.verifier`."
        )
    if not (isinstance(config.workflow, ScoresRounds) and config.workflow.score_rounds):
        raise ConfigError(
            f"`{algorithm.name}` needs a score of every turn. Set `workflow.score_rounds: true` (workflow `debate`), or `algorithm.verifier`."
        )


def _check_compared(run: RunToCheck) -> Iterator[str]:
    """Yield the reasons why rewards that compare the episodes of a group cannot be given."""
    environment, name, data = run.config.environment, run.algorithm.name, run.algorithm.data
    if not (offers(environment, RewardsEpisodes) and environment.compared):
        return
    compares = f"{environment.compared[0]} compares the episodes of a group, and"
    if data.group_size < 2:
        yield f"{compares} `{name}` plays each task once. Set `algorithm.group_size: 2` or more."
    if data.tree:
        yield f"{compares} `{name}` rewards the candidates of a tree one by one. Set `algorithm.tree: false`."
    if data.interventions or run.algorithm.need(GreedyBaseline):
        yield f"{compares} `{name}` plays single episodes without their group. Name another algorithm."


def _check_rewards(run: RunToCheck) -> None:
    _check_shared_rewards(run.config, run.config.environment, run.team)


def _check_shared_rewards(config: RunConfig, environment: Environment, team: Team) -> None:
    """Raise ConfigError for shared rewards of a constant-sum game: every advantage would be 0."""
    how = config.algorithm.model_dump().get("team_reward")
    for member in environment.members.values() if offers(environment, Mixed) else ():
        _check_shared_rewards(config, member, team)
    opposed = offers(environment, Opposed) and environment.constant_sum
    if opposed and how in {"mean", "sum"} and len(team.names) > 1:
        raise ConfigError(
            f"`{environment.name}` is a constant-sum game, and `algorithm.team_reward: {how}` rewards all agents alike. Set "
            "`algorithm.team_reward: individual`."
        )


def _check_one_tokeniser(algorithm: Algorithm, team: Team) -> None:
    """Raise ConfigError for a central critic that would read token ids of different tokenisers."""
    kinds: dict[str, str] = {}
    for agent in team.names:
        policy = team.policy(agent)
        kinds.setdefault("an endpoint" if policy.endpoint else f"'{team.bases[policy.base]}'", agent)
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise ConfigError(
            f"`{algorithm.name}` reads what all agents see as tokens of one model, but '{first}' has {one} and '{second}' {other}. "
            "Set `team.critic_model` (it reads text), or `algorithm.name: ippo`."
        )


def _check_sampling(team: Team) -> None:
    """Raise ConfigError for sampling with log-probs that the trainer cannot compute."""
    for agent in team.agents:
        sampling = agent.sampling
        if not team.policy(agent.name).trained:
            continue
        if sampling.temperature <= 0:
            raise ConfigError(
                f"Agent '{agent.name}' learns, but samples greedily. Set its `sampling.temperature` above 0."
            )
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ConfigError(
                f"Agent '{agent.name}' learns, but samples with top_p {sampling.top_p} and top_k {sampling.top_k}, whose log-probs the trainer "
                "cannot compute. Set `top_p: 1` and `top_k: 0`."
            )


CHECKS: tuple[Check, ...] = (
    _check_images,
    _check_rendered,
    _check_constraints,
    _check_engine,
    _check_environment,
    _check_places,
    _check_workflow,
    _check_prices,
    _check_models,
)
"""Checks of every run."""
CHECKS_OF_TRAINING: tuple[Check, ...] = (
    _check_amount,
    _check_installed,
    _check_learners,
    _check_train_engine,
    _check_pools,
    _check_selection,
    _check_compared,
    _check_replays,
    _check_turn_scores,
    _check_rewards,
    _check_features,
    _check_outside,
    _check_demonstrations,
)
"""Further checks of a run that trains."""
