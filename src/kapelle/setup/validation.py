"""Checks of a run's settings in combination, made before a model is loaded.

Every message states what is wrong, where, and how to fix it.
"""

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
    RecordsRouting,
    SeesImages,
)
from kapelle.engines.train.settings import Fsdp
from kapelle.environment import (
    Alive,
    AsksModels,
    Environment,
    ListsMoves,
    Mixed,
    OpensWorlds,
    Opposed,
    PaysEpisodes,
    PlayedFromOutside,
    Recorded,
    Scorable,
    Scripted,
    ShowsImages,
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
from kapelle.workflow import CountsTurns, ScoresRounds, Workflow


def unneeded(training: bool) -> tuple[type[KapelleError], ...]:
    """Return the errors that `prepare` notes beside what is absent: none for training, which needs the rows and the user's own code."""
    return () if training else (AbsentCode, DataError)


Check = Callable[[RunToCheck], Iterator[str] | None]
"""Yields what is wrong, where, and how to fix it, or raises ConfigError for the first fault."""


def check_run(
    config: RunConfig,
    algorithm: Algorithm,
    team: Team,
    given: Container[str] = (),
    training: bool = True,
    elsewhere: bool = False,
    absent: list[str] | None = None,
) -> None:
    """Raise ConfigError for all that these settings cannot be used for; cheap, loads no model. Arguments as in `RunToCheck`."""
    run = RunToCheck(config, algorithm, team, given, training, elsewhere, absent)
    faults: list[ConfigError] = []
    for check in (*CHECKS, *(CHECKS_OF_TRAINING if training else ())):
        try:
            faults += map(ConfigError, check(run) or ())
        except ConfigError as fault:
            faults.append(fault)
            if check is _environment_is_fit:  # those behind it call the environment
                break
        except KapelleError:  # of a model or of rows: settings come first
            raise_all(faults)
            raise
    raise_all(faults)


def _environment_is_fit(run: RunToCheck) -> None:
    environment, seconds = run.config.environment, run.config.patience.environment
    try:
        check_declared(environment, seconds)
        with noting(run.absent, *unneeded(run.training)):
            asked("check", seconds, environment.check, run.team.names)
            check_capabilities(environment, len(run.team.names), seconds)
            for split in ("train", "test"):
                size_of(environment, split, seconds)
    except Unfit as error:
        raise ConfigError(
            f"The environment '{environment.name}' is not fit for training: {error} `kapelle validate {environment.name}` checks all of it."
        ) from None


def _check_engine(run: RunToCheck) -> None:
    engine = run.config.engine
    if run.config.model.routing == "replayed" and not isinstance(engine, RecordsRouting):
        raise ConfigError(
            f"`model.routing: replayed` needs the experts that sampling chose, which `engine.name: {engine.name}` does not tell. Set `model.routing: free`."
        )
    if isinstance(engine, ChecksItself):
        engine.check_policies(run.team.every.values())
        if not run.elsewhere:
            with noting(run.absent):
                engine.check()


def _check_places(run: RunToCheck) -> Iterator[str]:
    """Yield what the processes in which environments and samplers live cannot reach."""
    config, environment = run.config, run.config.environment
    for name, each in config.evaluation.sets.items():
        if offers(each, AsksModels) and each.frozen_models:
            yield (
                f"`evaluation.sets.{name}` is judged by '{each.frozen_models[0].path}', a model in this process. Name an endpoint as its judge."
            )
    models = environment.frozen_models if offers(environment, AsksModels) else ()
    if config.episode.environment_workers and models and not offers(environment, PaysEpisodes):
        yield (
            f"The worlds of `{environment.name}` ask '{models[0].path}', a model in this process. Set `episode.environment_workers` to 0, or name an endpoint."
        )
    if run.training and not run.elsewhere and offers(environment, PlayedFromOutside):
        with noting(run.absent):
            environment.check_server()
    if config.episode.environment_workers:
        if offers(environment, OpensWorlds):
            yield (
                f"The worlds of `{environment.name}` live on its servers. Set `episode.environment_workers: 0`."
            )
        else:
            environment_form(environment)
    with noting(run.absent, *unneeded(run.training)):
        check_paying(environment)


def _check_workflow(run: RunToCheck) -> None:
    workflow = run.config.workflow
    try:
        check_parameters("`check`", workflow.check, "agents", "environment")
        with noting(run.absent):
            asked(
                "check",
                run.config.patience.environment,
                workflow.check,
                run.team.agents,
                run.config.environment,
            )
        check_parameters("`run`", workflow.run, "scene")
        if inspect.isasyncgenfunction(workflow.run) or inspect.isgeneratorfunction(workflow.run):
            raise Unfit("`run` has a `yield`. Write `async def run(self, scene)` without it.")
    except Unfit as error:
        raise ConfigError(f"The workflow '{workflow.name}' cannot be played: {error}") from None
    _check_turns(workflow, run.team)


def _check_prices(run: RunToCheck) -> Iterator[str]:
    for name in run.config.evaluation.prices:
        if name != "default" and name not in run.team.names:
            yield (
                f"`evaluation.prices` names '{name}', which is no agent of the team."
                f"{did_you_mean(name, [*run.team.names, 'default'])}"
            )


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
            "`model.quantization: nf4` holds frozen models in four bits, and all models of this team are trained. Set `team.sharing: lora`."
        )
    if model.path not in run.given:
        with noting(run.absent):
            check_four_bit(model.path, here=not run.elsewhere)


def _check_installed(run: RunToCheck) -> None:
    """Refuse optimisers and trackers whose packages are missing."""
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
    """Refuse completions of a form that nothing holds them to, or that no text has."""
    config, team = run.config, run.team
    for agent in team.agents:
        constraint = agent.sampling.constraint
        if constraint is None:
            continue
        policies = [team.policies[name] for name in team.policies_of(agent.name)]
        served = [policy for policy in policies if policy.endpoint is not None]
        if served and constraint.kind not in ("json_schema", "json_object"):
            raise ConfigError(
                f"Agent '{agent.name}' is an endpoint, and servers share no way to ask for {constraint.kind}. Set `json_schema` in its `sampling`."
            )
        if len(served) < len(policies) and not isinstance(config.engine, HoldsToConstraints):
            raise ConfigError(
                f"Agent '{agent.name}' has a constraint (`sampling`), which `engine.name: {config.engine.name}` does not hold to. Leave one of them out."
            )
        silent = _without_moves(config.environment) if constraint.is_legal else None
        if silent is not None:
            raise ConfigError(
                f"`sampling.choices: legal` of agent '{agent.name}' needs an environment that lists moves (`ListsMoves`), and '{silent}' lists none. "
                "Write the texts themselves, `choices: [a, b]`."
            )
        if constraint.is_legal:
            for at, part in parts_of(config.environment):
                if getattr(part, "thinking", None) is True:
                    key = ".".join(["environment", *([at] if at else []), "thinking"])
                    raise ConfigError(
                        f"`{key}: true` lets agent '{agent.name}' think, and its `sampling.choices: legal` allows a move alone. Set `{key}: false`."
                    )
        if not run.elsewhere and len(served) < len(policies):
            from kapelle.models.token_masks import check_constraint, check_installed

            with noting(run.absent):
                check_installed()
                try:
                    if not constraint.is_legal:
                        check_constraint(constraint)
                except ConfigError as error:
                    raise ConfigError(f"Agent '{agent.name}': {error}") from None


def _without_moves(environment: Environment) -> str | None:
    """Return the name of an environment, or of a member of a mixture, that lists no moves; None if all do."""
    if offers(environment, Mixed):
        return next(filter(None, map(_without_moves, environment.members.values())), None)
    return None if offers(environment, ListsMoves) else environment.name


def _check_images(run: RunToCheck) -> Iterator[str]:
    """Yield what cannot see the images that an environment shows."""
    config, algorithm, team = run.config, run.algorithm, run.team
    played = {"environment": config.environment}
    played |= {f"evaluation.sets.{name}": each for name, each in config.evaluation.sets.items()}
    shown = [
        (key, at, getattr(part, "name", at))
        for key, environment in played.items()
        for at, part in parts_of(environment)
        if offers(part, ShowsImages)
    ]
    if not shown:
        return
    for key, at, name in shown:
        if at:
            raise ConfigError(
                f"`{name}` shows images, and cannot stand inside another environment (`{key}.{at}`). Let it be the environment itself."
            )
    name = shown[0][2]
    shows = f"Environment '{name}' shows images, and"
    if not isinstance(config.engine, SeesImages):
        yield f"{shows} `engine.name: {config.engine.name}` reads text alone. Leave `engine` out."
    if config.train_engine.name == "fsdp":
        yield f"{shows} `train_engine.name: fsdp` passes text alone. Leave `train_engine` out."
    if config.episode.environment_workers:
        yield f"{shows} worlds in `episode.environment_workers` send texts alone. Set it to 0."
    if (algorithm.critic is not None and algorithm.critic.view == "answer") or any(
        algorithm.need(signal) is not None for signal in (VerifierScores, Embeddings)
    ):
        reader = "a reward model" if config.reward_model is not None else f"`{algorithm.name}`"
        yield f"{shows} {reader} reads questions and answers as texts. Leave it out, or name another algorithm."
    for base, path in team.bases.items():
        if path in run.given:
            continue
        settings = read_settings(path) if path != "embedded" else {}
        sees = config.model.embedded.sees if path == "embedded" else "vision_config" in settings
        if not sees and (settings or path == "embedded"):  # a name on the hub is not known yet
            raise ConfigError(
                f"Environment '{name}' shows images, and the model '{path}' ({base}) reads text alone. Name a vision-language model, or for a "
                "trial set `model.embedded.sees: true`."
            )


def check_paying(settings: object) -> None:
    """Refuse an environment that pays whole episodes inside another one, whose worlds would pay nothing for it."""
    for at, part in parts_of(settings):
        if at and offers(part, PaysEpisodes):
            raise ConfigError(
                f"`{getattr(part, 'name', at)}` pays when an episode is over, and cannot stand inside another environment "
                f"(`environment.{at}`). Let it be the environment itself; `rewarded` has a setting `tools`."
            )


def _check_rendered(run: RunToCheck) -> None:
    """Refuse prompts that are rendered already for agents that would change them, or whose model is elsewhere."""
    team = run.team
    rendered = [
        part for _, part in parts_of(run.config.environment) if getattr(part, "rendered_prompts", False)
    ]
    for agent in team.agents if rendered else ():
        policy = team.policy(agent.name)
        if agent.prompt is not None or agent.system is not None:
            raise ConfigError(
                f"`environment.rendered_prompts` uses prompts as they are, and agent '{agent.name}' has a prompt or a system message. Remove them."
            )
        if policy.endpoint is not None:
            raise ConfigError(
                f"`environment.rendered_prompts` needs a model in this process, and agent '{agent.name}' answers from an endpoint. Set it to false."
            )


def _check_outside(run: RunToCheck) -> None:
    """Refuse to play where, or longer than, outside programs can call."""
    config = run.config
    if offers(config.environment, PlayedFromOutside) and config.episode.environment_workers:
        raise ConfigError(
            "`episode.environment_workers` plays in other processes, which an outside program cannot follow. Set `episode.environment_workers: 0`."
        )


def _check_turns(workflow: Workflow, team: Team) -> None:
    """Refuse weights by turn for another number of turns than the workflow's settings give, where they fix one.

    Elsewhere the first turn without weights ends its episode with the reason.
    """
    if not isinstance(workflow, CountsTurns):
        return
    for agent, listed in team.turns_of.items():
        taken = workflow.most_turns(team.names)[agent]
        if taken != len(listed):
            raise ConfigError(
                f"`weights.per_turn` of agent '{agent}' has weights for {len(listed)} turns, but the workflow gives it {taken}. Set `per_turn: {taken}`."
            )


MOST_EPISODES = 1_000_000
"""Of one step, whose episodes are in memory together, or of one evaluation."""


def _check_amount(run: RunToCheck) -> None:
    """Refuse more episodes at once than a machine has room for."""
    config = run.config
    tasks, group = config.training.tasks_per_step, int(getattr(config.algorithm, "group_size", 1))
    if tasks * group > MOST_EPISODES:
        raise ConfigError(
            f"`training.tasks_per_step: {tasks}` with `algorithm.group_size: {group}` makes {tasks * group:,} episodes in one step; "
            f"at most {MOST_EPISODES:,} are played. Lower one of the two."
        )
    if config.evaluation.problems > MOST_EPISODES and config.environment.size("test") is None:
        raise ConfigError(
            f"`evaluation.problems: {config.evaluation.problems}` are too many; at most {MOST_EPISODES:,} are played. Lower it."
        )


def _check_learners(run: RunToCheck) -> None:
    """Refuse to train nothing, or what the algorithm does not train."""
    config, algorithm, team = run.config, run.algorithm, run.team
    judging = algorithm.critic is not None and algorithm.critic.everyone
    if judging and team.trained:
        raise ConfigError(
            f"`{algorithm.name}` trains no agent, but policy '{team.trained[0]}' of this team is trained. Set `team.sharing: frozen`."
        )
    if not team.trained and not judging:
        raise ConfigError(
            "No agent of this team is trained. Set `team.sharing: lora` or `shared`, or give an agent such `weights`."
        )
    for check in algorithm.checks:
        with noting(run.absent):
            check(team)
    learns_beside = algorithm.critic is not None or algorithm.memory_learns
    if config.training.critic_warmup and (not learns_beside or judging):
        raise ConfigError(
            f"`training.critic_warmup` lets critics learn alone at first, and `{algorithm.name}` trains {'nothing else' if judging else 'no critic'}. Set it to 0."
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
    whole = [policy.name for policy in team.policies.values() if policy.trained and policy.lora is None]
    whole += [critic.name for critic in team.critics.values() if critic.trained and critic.whole]
    adapted = [policy.name for policy in team.policies.values() if policy.lora is not None]
    adapted += [critic.name for critic in team.critics.values() if not critic.whole]
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
    """Return whether an environment has demonstrations: a script, records, or an outside program that plays them."""
    if offers(environment, PlayedFromOutside):
        return environment.demonstrates
    return offers(environment, Scripted) or offers(environment, Recorded)


def _check_demonstrations(run: RunToCheck) -> Iterator[str]:
    """Yield that nothing plays the demonstrations that are learned from."""
    algorithm, environment = run.algorithm, run.config.environment
    if offers(environment, Recorded):
        _check_recorded(algorithm, environment.name, environment.answers_per_task())
    if not algorithm.plays and not demonstrates(environment):
        yield (
            f"`{algorithm.name}` learns from demonstrations, but environment '{environment.name}' has no script for them. Use one that has."
        )


def _check_selection(run: RunToCheck) -> Iterator[str]:
    """Yield why tasks cannot be chosen as the settings say."""
    config, name, tasks = run.config, run.config.environment.name, run.config.tasks
    if tasks.difficulty is not None:
        if config.environment.size("train") is None:
            yield f"`tasks.difficulty` measures every task of training, and those of `{name}` have no end. Remove it."
        if not run.algorithm.plays:
            yield f"`tasks.difficulty` measures the team, and `{run.algorithm.name}` does not play. Remove it."
    elif tasks.curriculum is not None and tasks.curriculum.by == "solve_rate":
        yield (
            "`tasks.curriculum` orders tasks by how often they are solved, which nothing measures. Set `tasks.difficulty: {}` too."
        )


def _check_worlds(run: RunToCheck) -> None:
    """Refuse worlds and workflows that cannot do what the algorithm's credit needs."""
    config, algorithm, team, environment = run.config, run.algorithm, run.team, run.config.environment
    data = algorithm.data
    replays = data.tree is not None or data.interventions is not None or bool(data.widths)
    alive = environment.alive if replays and offers(environment, Alive) else ()
    if alive:
        other = "Set `algorithm.tree: false`" if data.tree is not None else "Set another `algorithm.name`"
        raise ConfigError(
            f"`{algorithm.name}` replays episodes, but environment '{environment.name}' relies on answers that may differ the next time: "
            f"{', '.join(alive)}. {other}, or leave that out."
        )
    if not algorithm.data.scores:
        return
    world = environment.start(task_of(environment, "train", 0), team.names, 0)
    scorable = isinstance(world, Scorable)
    run_async(world.close)
    if not scorable:
        raise ConfigError(
            f"`{algorithm.name}` needs a score at every turn, which '{environment.name}' cannot give. Use an environment of questions, or `algorithm.verifier`."
        )
    if not (isinstance(config.workflow, ScoresRounds) and config.workflow.score_rounds):
        raise ConfigError(
            f"`{algorithm.name}` needs a score of every turn. Set `workflow.score_rounds: true` (workflow `debate`), or `algorithm.verifier`."
        )


def _check_compared(run: RunToCheck) -> Iterator[str]:
    """Yield why rewards that compare the episodes of a group cannot be given."""
    environment, algorithm, data = run.config.environment, run.algorithm, run.algorithm.data
    if not (offers(environment, PaysEpisodes) and environment.compared):
        return
    compares = f"{environment.compared[0]} compares the episodes of a group, and"
    if data.group_size < 2:
        yield (
            f"{compares} `{algorithm.name}` plays each task once. Set `algorithm.group_size` to 2 or more, or name an algorithm that has it."
        )
    if data.tree:
        yield f"{compares} `{algorithm.name}` pays the candidates of a tree one by one. Set `algorithm.tree: false`."
    if data.interventions or algorithm.need(GreedyBaseline):
        yield f"{compares} `{algorithm.name}` plays single episodes without their group. Name another algorithm."


def _check_recorded(algorithm: Algorithm, environment: str, answers: int) -> None:
    """Refuse to learn from what records do not hold: answers of the team itself, or more answers than there are."""
    if algorithm.plays:
        raise ConfigError(
            f"`{algorithm.name}` plays, but environment '{environment}' rewards recorded answers alone. Set `algorithm.data: recorded` (dpo, verifier)."
        )
    if algorithm.data.group_size > 1 and answers < 2:
        raise ConfigError(
            f"`{algorithm.name}` compares several answers to one question, but environment '{environment}' has one. Set `environment.name: preferences`."
        )


def _check_rewards(run: RunToCheck) -> None:
    _check_own_rewards(run.config, run.config.environment, run.team)


def _check_own_rewards(config: RunConfig, environment: Environment, team: Team) -> None:
    """Refuse to share rewards that always add up to the same value: every advantage would be 0."""
    how = config.algorithm.model_dump().get("team_reward")
    if offers(environment, Mixed):
        for member in environment.members.values():
            _check_own_rewards(config, member, team)
        return
    opposed = offers(environment, Opposed) and environment.constant_sum
    if opposed and how in {"mean", "sum"} and len(team.names) > 1:
        raise ConfigError(
            f"What one agent wins in '{environment.name}' the others lose, and `algorithm.team_reward: {how}` pays all of them the same. "
            "Set `algorithm.team_reward: individual`."
        )


def _check_one_tokeniser(algorithm: Algorithm, team: Team) -> None:
    """Refuse a central critic whose view would mix the token ids of different tokenisers."""
    kinds: dict[str, str] = {}
    for agent in team.names:
        policy = team.policy(agent)
        kinds.setdefault("an endpoint" if policy.endpoint else f"'{team.bases[policy.base]}'", agent)
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise ConfigError(
            f"`{algorithm.name}` reads what all agents see as tokens of one model, but '{first}' is played by {one} and '{second}' by {other}. "
            "Set `team.critic_model` (it reads text), or `algorithm.name: ippo`."
        )


def _check_sampling(team: Team) -> None:
    """Refuse sampling whose distribution the trainer cannot reproduce exactly."""
    for agent in team.agents:
        s = agent.sampling
        if not team.policy(agent.name).trained:
            continue
        if s.temperature <= 0:
            raise ConfigError(
                f"Agent '{agent.name}' learns, but samples greedily (temperature 0). Set its `sampling.temperature` above 0."
            )
        if s.top_p < 1 or s.top_k > 0:
            raise ConfigError(
                f"Agent '{agent.name}' learns, but samples with top_p {s.top_p} and top_k {s.top_k}, whose log-probs the trainer cannot compute. "
                "Set `top_p: 1` and `top_k: 0`."
            )


CHECKS: tuple[Check, ...] = (
    _check_images,
    _check_rendered,
    _check_constraints,
    _check_engine,
    _environment_is_fit,
    _check_places,
    _check_workflow,
    _check_prices,
    _check_models,
)
"""What every run is checked for."""
CHECKS_OF_TRAINING: tuple[Check, ...] = (
    _check_amount,
    _check_installed,
    _check_learners,
    _check_train_engine,
    _check_pools,
    _check_selection,
    _check_compared,
    _check_worlds,
    _check_rewards,
    _check_features,
    _check_outside,
    _check_demonstrations,
)
"""What training is checked for, too."""
