"""One preparation for training, validating, comparing and playing: every check, before a model is loaded.

prepared = prepare(config, given)      raises the first error that the run would raise
models = prepared.load()               this takes memory
engine = build_engine(config, models, prepared.team)
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kapelle.algorithm import Algorithm
from kapelle.engines.rollout.protocol import RecordsRouting, Renderer, agent_renderer
from kapelle.engines.train.settings import Fsdp
from kapelle.environment import (
    Described,
    ExternalServer,
    StartsProgram,
    UsesServers,
    offers,
    report_of,
    task_of,
)
from kapelle.errors import ConfigError, ContextError, EpisodeError, noting, raise_all
from kapelle.models.adapters import check_routing
from kapelle.models.checksums import verify_folder
from kapelle.models.outline import (
    Outline,
    check_adapters,
    outline_of_settings,
    read_architecture,
    read_outlines,
    read_settings,
)
from kapelle.models.paths import located
from kapelle.models.renderer import ReadRenderer, load_renderer
from kapelle.models.vision import need_pillow, read_image_processor
from kapelle.models.weight_files import check_architecture, check_files, folder_of
from kapelle.rows import ReadsTokens
from kapelle.runs.definitions import misspelt
from kapelle.runtime.credentials import bearer
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.http import error_message, exchange
from kapelle.runtime.ranks import launched_rank
from kapelle.settings.base import Settings, parts_of
from kapelle.settings.schema import RunConfig
from kapelle.setup.feature import RunToCheck, plans_of
from kapelle.setup.problems import check_sets
from kapelle.setup.team_builder import build_algorithm, build_team
from kapelle.setup.validation import check_run, unneeded
from kapelle.team import Agent, Critic, Policy, Team
from kapelle.types import Split, Task
from kapelle.workflow import CountsTurns, opening

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel
    from kapelle.models.renderer import ChatRenderer


# -------- Contents of weight files, which `validate` checks and a run checks when it loads them


def looked_into(
    config: RunConfig, team: Team, models: Mapping[str, Outline], given: Container[str]
) -> Iterator[str]:
    """Yield the contents of each model's and adapter's files; raise ModelError for files that cannot be loaded."""
    for path, outline in {path: models[base] for base, path in team.bases.items()}.items():
        if path in given or path == "embedded":
            continue
        folder = folder_of(path)
        if folder is None:
            yield f"{path}: not downloaded yet, so its weights are not checked"
            continue
        unchanged = verify_folder(folder)
        yield f"{path}: {_tried(config, path, outline)}{', and as kapelle wrote it' if unchanged else ''}"
    for policy in team.every.values():
        if policy.past is not None and verify_folder(Path(policy.past)):
            yield f"{policy.past}: as kapelle wrote it"


def _tried(config: RunConfig, path: str, outline: Outline) -> str:
    """Return a phrase about the checks of a model's files."""
    later = [] if check_files(path, outline) else ["names and shapes (accelerate is not installed)"]
    if outline_of_settings(read_settings(path)) is None:
        replays = config.model.routing == "replayed"
        small = check_architecture(path, replays_routing=replays)
        if small is None:
            later.append("the output head (no small model can be made of these settings)")
        elif replays and isinstance(config.engine, RecordsRouting):
            config.engine.check_recording(small)
    return (
        f"files whole; {' and '.join(later)} checked when it is loaded"
        if later
        else "files whole, weights fit"
    )


# -------- Which tasks have short enough first prompts (`tasks.max_prompt_tokens`).


def short_enough(
    config: RunConfig, team: Team, renderer_of_policy: Callable[[str], Renderer]
) -> Callable[[Task], bool] | None:
    """Return whether a task's first prompts are within `tasks.max_prompt_tokens`; None without a limit.

    Agents behind endpoints are excluded: only their servers can count tokens.
    """
    most = config.tasks.max_prompt_tokens
    if most is None:
        return None
    limits = []
    for agent in team.agents:
        policy = team.policy(agent.name)
        if policy.endpoint is None:
            renderer = agent_renderer(agent, renderer_of_policy(policy.name))
            limit = renderer.context - agent.sampling.max_tokens if most == "context" else most
            limits.append((agent, renderer, limit))

    def fits(task: Task) -> bool:
        try:
            return all(
                len(renderer.start(opening(agent, task))) <= limit for agent, renderer, limit in limits
            )
        except ContextError:  # the prompt is too long to be counted
            return False

    return fits


# -------- How hard a task is, for a curriculum (`tasks.curriculum`).

SOLVE_RATE = "solve_rate"
"""Word in place of a field: the measured solve rate (`tasks.difficulty`)."""
_LAST_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?=\D*$)")


def hardness(task: Task, field: str) -> float:
    """Return the difficulty of a task: the number in a field of its data, or the last number in its text.

    Tasks without a number have infinite difficulty, and come last. Raises ConfigError for a field that does not exist.
    """
    if field not in task.data:
        known = ", ".join(sorted(task.data)) or "none"
        raise ConfigError(
            f"`tasks.curriculum.by: {field}` is not a field of task {task.id} (its fields: {known}). Name one, or `{SOLVE_RATE}`."
        )
    value = task.data[field]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    number = _LAST_NUMBER.search(value) if isinstance(value, str) else None
    return float(number.group()) if number else inf


# -------- Lengths of prompts, by the models' tokenisers


def check_prompts(
    config: RunConfig,
    team: Team,
    given: Mapping[str, LanguageModel] | None = None,
    problems: int = 64,
    renderer_of: ReadRenderer = load_renderer,
) -> tuple[str, ...]:
    """Raise ContextError if a first prompt of the first tasks leaves no room in the model's context.

    Loads tokenisers, and no models. Later prompts depend on the episode, and are checked during it. Returns notes on chat templates
    and on completions that have less room than `max_tokens`.
    """
    environment = config.environment
    memory = {path: model.renderer for path, model in (given or {}).items()}
    renderers = {
        path: memory.get(path) or renderer_of(path, config.model) for path in set(team.bases.values())
    }
    _check_readers(config, team, renderers)
    longest: dict[str, int] = {}
    readers = [(agent, team.policy(agent.name)) for agent in team.agents]
    here = [(a, agent_renderer(a, renderers[team.bases[p.base]])) for a, p in readers if p.endpoint is None]
    fits = short_enough(config, team, lambda policy: renderers[team.bases[team.policies[policy].base]])
    for split in ("train", "test"):
        size = environment.size(split)
        for index in range(min(problems, problems if size is None else size)):
            task = task_of(environment, split, index)
            for agent, renderer in here if fits is None or fits(task) else ():
                tokens = _tokens(agent, task, renderer)
                longest[agent.name] = max(tokens, longest.get(agent.name, 0))
    notes = [note for renderer in renderers.values() for note in renderer.notes]
    for agent, renderer in here:
        tokens, most = longest.get(agent.name, 0), agent.sampling.max_tokens
        if tokens + most > renderer.context:
            notes.append(
                f"Agent '{agent.name}' may generate {most} tokens (`max_tokens`), but after a prompt of {tokens} only "
                f"{renderer.context - tokens} fit: the model reads {renderer.context}."
            )
        notes += _check_form(agent, renderer)
    need = config.algorithm.build().critic
    if need is not None and need.view == "central":
        most = sum(longest.get(agent.name, 0) + agent.sampling.max_tokens for agent, _ in here)
        reads = min(renderers[team.bases[critic.base]].context for critic in team.critics.values())
        if most > reads:
            notes.append(
                f"The central critic reads what all agents read and wrote: {most} tokens in a first round, and its model reads {reads}."
            )
    return tuple(dict.fromkeys(notes))


def _tokens(agent: Agent, task: Task, renderer: ChatRenderer) -> int:
    """Return the tokens of an agent's first prompt for a task; raise ContextError if no completion fits after it."""
    try:
        tokens = len(renderer.start(opening(agent, task)))
    except ContextError as error:
        raise ContextError(f"Agent '{agent.name}' cannot read task {task.id}. {error}") from None
    if tokens >= renderer.context:
        raise ContextError(
            f"The prompt of agent '{agent.name}' for task {task.id} has {tokens} tokens; the model reads {renderer.context}. "
            "Use a model with a longer context (`model.embedded.context`), or shorter prompts."
        )
    return tokens


def _check_form(agent: Agent, renderer: ChatRenderer) -> tuple[str, ...]:
    """Raise ConfigError for a constraint that no completion of `max_tokens` tokens satisfies; return notes."""
    constraint, most = agent.sampling.constraint, agent.sampling.max_tokens
    if constraint is None or constraint.is_legal:
        return ()
    if constraint.kind == "choices":
        lengths = {text: len(renderer.completion(text)) for text in json.loads(constraint.text)}
        text = max(lengths, key=lambda each: lengths[each])
        if lengths[text] > most:
            raise ConfigError(
                f"The choice {text[:60]!r} of agent '{agent.name}' takes {lengths[text]} tokens. Set `max_tokens: {lengths[text]}`."
            )
        return ()
    from kapelle.models.token_masks import TokenMasks

    tokenizer = renderer.tokenizer
    masks = TokenMasks(tokenizer, max(tokenizer.get_vocab().values()) + 1, renderer.end_ids)
    try:
        fits = masks.fits(constraint, most)
    except ConfigError as error:
        raise ConfigError(f"Agent '{agent.name}': {error}") from None
    if fits:
        return ()
    note = f"Agent '{agent.name}' may generate {most} tokens, and no completion of its {constraint.kind} that is so short"
    if fits is False:
        raise ConfigError(f"{note} exists. Set a higher `max_tokens`.")
    return (f"{note} was found. Set a higher `max_tokens`.",)


def _check_readers(config: RunConfig, team: Team, renderers: Mapping[str, ChatRenderer]) -> None:
    """Raise ConfigError for references and critics with other token ids than the policies that they read."""
    for signal in config.algorithm.build().needs:
        pairs = signal.readers(team) if isinstance(signal, ReadsTokens) else {}
        for policy, reader in pairs.items():
            own, other = (team.bases[team.every[name].base] for name in (policy, reader))
            if not renderers[own].same_tokens(renderers[other]):
                raise ConfigError(
                    f"Policy '{policy}' samples tokens of '{own}', but '{other}' would read them with another vocabulary. "
                    f"Name a model of the same family as the {reader.split(':')[0]} of '{policy}'."
                )


# -------- Servers that a run calls, checked before models load

SECONDS = 5.0
"""Seconds within which a server must answer."""


def check_endpoints(team: Team, environment: object) -> list[str]:
    """Return the addresses of all servers that a run calls; raise ConfigError for one that does not answer or rejects the key."""
    servers = check_keys(team, environment)
    if not servers:
        return []

    async def faults() -> list[str | None]:
        return list(await asyncio.gather(*map(_fault, servers)))

    for server, fault in zip(servers, run_async(faults), strict=True):
        if fault is not None:
            raise ConfigError(f"{server.who} at {server.url} {fault}")
    return [server.url for server in servers]


def check_keys(team: Team, environment: object) -> list[ExternalServer]:
    """Return the servers that a run calls, without calling them; raise ConfigError if a key would be sent unencrypted."""
    found = {policy.endpoint: name for name, policy in team.policies.items() if policy.endpoint is not None}
    servers = [
        ExternalServer(
            f"The endpoint of policy '{name}'", each.url, f"{each.url.rstrip('/')}/models", each.api_key_env
        )
        for each, name in found.items()
    ]
    for _, part in parts_of(environment):
        servers += part.servers() if isinstance(part, UsesServers) else ()
    for server in servers:
        try:
            bearer(server.key_env, server.url)
        except ConfigError as error:
            raise ConfigError(f"{server.who}: {error}") from None
    return servers


async def _fault(server: ExternalServer) -> str | None:
    """Return the fault of a server and how to fix it; None if it answers."""
    import httpx

    headers = bearer(server.key_env, server.url)
    try:
        answer = await exchange("GET", server.probe, None, headers, SECONDS)
    except (EpisodeError, httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        return f"does not answer: {reason}. Start it, or correct its address."
    if answer.status in (401, 403):
        held = f"in ${server.key_env}" if headers else f"(${server.key_env} is empty)"
        return f"refuses the key {held}: HTTP {answer.status}. Put its key into that variable."
    if answer.status >= 500:
        return f"answers HTTP {answer.status}{error_message(answer.body)}. Wait until it is ready, or restart it."
    return None


# -------- The preparation

PROMPTS = 64
"""Number of tasks per split whose first prompt's length is checked."""

DOUBT = "doubt"
"""Word in place of a check's name: the run can train, but it may not do what was intended."""

Passed = Callable[[str, str], None]
"""Function that is called after each check that passed, with the check's name and result; and for each `DOUBT`."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that passed all checks, and its parts, without weights."""

    config: RunConfig
    given: Mapping[str, LanguageModel]
    """Models in memory, by their path in the settings."""
    algorithm: Algorithm
    team: Team
    outlines: Mapping[str, Outline]
    """Base name → the model without its weights."""
    notes: tuple[str, ...] = ()
    """Notes on the tasks: how many are excluded, and how many steps they make."""
    left_out: tuple[str, ...] = ()
    """How many tasks and rows are excluded, and why: one sentence for each reason and split; the run records it."""
    doubts: tuple[str, ...] = ()
    """Effects that may be unintended, such as a `max_tokens` beyond the context."""

    def on_bases(self, bases: Mapping[str, str], held: Mapping[str, LanguageModel]) -> PreparedRun:
        """Return the same run on other bases (name → path); `held` are models in memory, by path."""
        return replace(self, team=replace(self.team, bases=bases), given={**self.given, **held})

    def load(self) -> dict[str, LanguageModel]:
        """Return every base of the team with its weights, by base name; ModelError for one that cannot be read."""
        from kapelle.setup.model_loading import load_models

        return load_models(self.team, self.config.model, self.given)


def prepare(
    config: RunConfig,
    given: Mapping[str, LanguageModel] | None = None,
    *,
    training: bool = True,
    elsewhere: bool = False,
    renderer_of: ReadRenderer = load_renderer,
    passed: Passed | None = None,
    absent: list[str] | None = None,
) -> PreparedRun:
    """Make every check that needs no weights, and return the prepared run.

    `given` are models in memory, by path. Without `training`, checks that only training needs are skipped; for a run `elsewhere`,
    so are checks of this machine's packages and devices. `renderer_of` reads tokenisers. `passed` is called after each check.
    With `absent`, what this machine lacks (a package, rows, a model) is added to it, and checks that need it are skipped. Raises
    the first KapelleError that the run would raise.
    """
    given = given or {}
    doubts: list[str] = []

    def report(name: str, found: str) -> None:
        if name == DOUBT:
            doubts.append(found)
        if passed is not None:
            passed(name, found)

    with noting(absent):
        connect(config.environment)
        connect(config.evaluation.sets)
    algorithm = build_algorithm(config)
    team = build_team(config, algorithm, [] if elsewhere and absent is None else absent)
    check_keys(team, config.environment)
    report("team", f"{', '.join(team.names)}; trained: {', '.join(team.trained) or 'nothing'}")
    check_run(config, algorithm, team, given, training, elsewhere, absent)
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    with noting(absent, *unneeded(training)):
        tested = check_sets(config, team)
        if training:
            for _, part in parts_of(config.environment):
                for remark in report_of(part).remarks():
                    report(DOUBT, remark)
            longer = _too_long(config, team, given, renderer_of)
            config, counted = _counted(config, longer.get("train", (0, ""))[0])
            left_out = (*tested, *(note for tasks, note in longer.values() if tasks))
            notes = (*left_out, *counted)
    for note in notes:
        report("tasks", note)
    report("algorithm", f"{algorithm.name} can train this team")
    best = config.checkpoint.best
    if training and best is not None and (meant := misspelt(best)):
        report(DOUBT, f"No metric of kapelle's is called '{best}' (`checkpoint.best`).{meant}")
    report("workflow", f"{config.workflow.name} can be played on {config.environment.name}")
    turns = config.workflow.most_turns(team.names) if isinstance(config.workflow, CountsTurns) else None
    for agent in team.names:
        if turns is not None and not turns[agent] and team.policy(agent).trained:
            report(
                DOUBT, f"Agent '{agent}' learns, but takes no turn in the workflow `{config.workflow.name}`."
            )
    if passed is not None:
        report("data", _data(config))
        for doubt in report_of(config.environment).doubts():
            report(DOUBT, doubt)
    with noting(absent, *unneeded(training)):
        for note in check_prompts(config, team, given, PROMPTS, renderer_of):
            report(DOUBT, note)
        report("prompts", f"the opening ones of {PROMPTS} tasks of each split fit the context")
    models: Mapping[str, Outline] = {}
    with noting(absent):
        models = read_outlines(team, config.model, given)
        _check_models(config, algorithm, team, models, given, training=training, report=report)
    if passed is not None and models:
        for found in looked_into(config, team, models, given):
            report("weights", found)
        for address in check_endpoints(team, config.environment):
            report("endpoint", f"{address} answers")
    return PreparedRun(config, given, algorithm, team, models, notes, left_out, tuple(doubts))


def _check_models(
    config: RunConfig,
    algorithm: Algorithm,
    team: Team,
    models: Mapping[str, Outline],
    given: Mapping[str, LanguageModel],
    *,
    training: bool,
    report: Passed,
) -> None:
    """Raise ModelError or ConfigError for models that do not fit the settings: files, layers and adapters."""
    check_adapters(team, models)
    plan = RunToCheck(config, algorithm, team)
    raise_all([ConfigError(e) for each in plans_of(config) for e in each.check_memory(plan, models)])
    for path in {*team.bases.values()}.difference(given):
        if "vision_config" in read_settings(path):
            read_image_processor(located(path), read_architecture(path, config.model.embedded))
        elif path == "embedded" and config.model.embedded.sees:
            need_pillow()
    for doubt in check_shapes(config, team, models, training=training):
        report(DOUBT, doubt)
    for base, path in team.bases.items():
        if path not in given:
            check_files(path, models[base])
    report("models", ", ".join(dict.fromkeys(team.bases.values())) + ": settings read, adapters fit")


def in_training(config: RunConfig, team: Team) -> str:
    """Return which weights train, and at which rate: `adapters of rank 16 on all-linear (solver) at lr 1e-05`."""
    usual, found = config.optimizer, dict[tuple[str, float], list[str]]()
    learners: list[Policy | Critic] = [*team.policies.values(), *team.critics.values()]
    for each in learners:
        if not each.trained:
            continue
        kind, rate = "all weights", each.rate.lr or usual.lr
        if isinstance(each, Critic):
            rate = each.rate.lr or usual.critic_lr or usual.lr
            kind = "all weights" if each.whole else "a head"
        if each.lora is not None:
            kind = f"adapters of rank {each.lora.rank} on {', '.join(each.lora.targets)}"
        found.setdefault((kind, rate), []).append(each.name)
    parts = [f"{kind} ({', '.join(names)}) at lr {rate:g}" for (kind, rate), names in found.items()]
    return "; ".join(parts) or "nothing"


def _too_long(
    config: RunConfig, team: Team, given: Mapping[str, LanguageModel], renderer_of: ReadRenderer
) -> dict[Split, tuple[int, str]]:
    """Return, for each finite split, how many tasks `tasks.max_prompt_tokens` excludes, and a note; raise ConfigError if it excludes all."""
    environment, most = config.environment, config.tasks.max_prompt_tokens
    if most is None:
        return {}
    memory = {path: model.renderer for path, model in given.items()}
    renderers = {
        base: memory.get(path) or renderer_of(path, config.model) for base, path in team.bases.items()
    }
    fits = short_enough(config, team, lambda policy: renderers[team.policies[policy].base])
    assert fits is not None, "there is a limit"
    limit = "too many tokens for the model" if most == "context" else f"more than {most} tokens"
    found: dict[Split, tuple[int, str]] = {}
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        size = environment.size(split)
        if not size:  # the split is generated, or empty
            continue
        longer = size - sum(fits(task_of(environment, split, index)) for index in range(size))
        if longer == size > 0:
            raise ConfigError(
                f"`tasks.max_prompt_tokens: {most}` excludes all {size} tasks of `{environment.name}` ({split}). "
                "Raise it, or set a lower `sampling.max_tokens`."
            )
        found[split] = (
            longer,
            f"{split}: {longer} of {size} tasks have a first prompt of {limit} and are left out",
        )
    return found


def _counted(config: RunConfig, too_long: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the settings with the steps of `training.epochs` epochs over the remaining tasks, and a note."""
    environment, training = config.environment, config.training
    curriculum = config.tasks.curriculum
    if curriculum is not None and curriculum.by != SOLVE_RATE:
        hardness(task_of(environment, "train", 0), curriculum.by)
    if training.epochs is None:
        return config, ()
    if config.tasks.difficulty is not None:
        raise ConfigError(
            "`training.epochs` and `tasks.difficulty` exclude each other. Set `training.steps` instead."
        )
    count = environment.size("train")
    if count is None:
        raise ConfigError(
            f"`training.epochs` counts tasks, and those of `{environment.name}` have no end. Set `training.epochs: null` and `training.steps`."
        )
    count -= too_long
    steps = ceil(training.epochs * count / training.tasks_per_step)
    tasks = "task" if count == 1 else "tasks"
    note = (
        f"{training.epochs:g} epochs of {count} {tasks}, {training.tasks_per_step} a step, are {steps} steps"
    )
    changed = training.model_copy(update={"steps": steps})
    return config.model_copy(update={"training": changed}), (note,)


def check_shapes(
    config: RunConfig, team: Team, models: Mapping[str, Outline], *, training: bool
) -> Iterator[str]:
    """Raise ConfigError for settings that models of these shapes (by base) do not support; yield faults of several processes."""
    if config.model.routing == "replayed":
        for model in models.values():
            check_routing(model.layers)
    if not training:
        return
    if config.model.router == "trained" and not any(
        models[base].layers.routers for base in team.trained_bases
    ):
        raise ConfigError(
            "`model.router: trained` needs a mixture of experts that trains all its weights. Set `model.router: frozen`."
        )
    engine, started = config.train_engine, launched_rank()
    if not isinstance(engine, Fsdp) or engine.tensor_parallel == 1:
        return
    from kapelle.engines.train.tensor_parallel import check_split

    parts = 1 if started is None else started.size // engine.tensor_parallel
    for base, path in team.bases.items():
        try:
            settings = read_architecture(path, config.model.embedded)
            check_split(path, settings, models[base].layers, engine.tensor_parallel, parts)
        except ConfigError as error:
            if started is not None:
                raise
            yield f"{error} (One process alone splits nothing.)"


def connect(settings: object) -> None:
    """Let an environment, and those inside it, request descriptions from their servers."""
    for _, part in parts_of(settings):
        if offers(part, Described):
            part.connect()


def _data(config: RunConfig) -> str:
    environment = config.environment
    found = []
    for split, source in environment.sources.items():
        size = environment.size(split)
        count = "generated tasks" if size is None else f"{size} tasks"
        found.append(f"{split}: {source} ({count})")
    return "; ".join([*found, *rows_left_out(config)])


def rows_left_out(config: RunConfig) -> list[str]:
    """Return a sentence for each split from which the environment excludes rows."""
    return [f"{split}: {skipped}" for split, skipped in report_of(config.environment).skipped().items()]


# -------- Settings without the programs that a run would start

S = TypeVar("S")


def without_programs(settings: S) -> tuple[S, list[str]]:
    """Return settings without the MCP servers among their tools, and the command or address of each."""
    left_out: list[str] = []
    changed: S = _without(settings, left_out)
    return changed, left_out


def _without(value: Any, left_out: list[str]) -> Any:
    """Return a value of settings without servers; the same object if it has none."""
    if isinstance(value, Settings):
        own = {name: getattr(value, name) for name in type(value).model_fields}
        found = {name: _without(each, left_out) for name, each in own.items()}
        changed = {name: each for name, each in found.items() if each is not own[name]}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, Mapping):
        inner = {key: _without(each, left_out) for key, each in value.items()}
        return inner if any(inner[key] is not value[key] for key in inner) else value
    if isinstance(value, tuple):
        left_out += [each.server for each in value if isinstance(each, StartsProgram)]
        kept = tuple(_without(each, left_out) for each in value if not isinstance(each, StartsProgram))
        same = len(kept) == len(value) and all(one is other for one, other in zip(kept, value, strict=True))
        return value if same else kept
    return value
