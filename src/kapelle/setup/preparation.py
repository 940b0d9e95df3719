"""Prepares runs for training, validation, comparison and play. All checks are made before a model is loaded.

prepared = prepare(config, given)      raises the first error that the run would raise
models = prepared.load()               this takes memory
engine = build_engine(config, models, prepared.team)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kapelle.algorithm import Algorithm
from kapelle.engines.rollout.protocol import RecordsRouting
from kapelle.engines.train.settings import Fsdp
from kapelle.environment import Described, StartsProgram, offers, report_of
from kapelle.errors import ConfigError, noting, raise_all
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
from kapelle.models.pretrained import located
from kapelle.models.renderer import ReadRenderer, load_renderer
from kapelle.models.vision import need_pillow, read_image_processor
from kapelle.models.weight_files import check_architecture, check_files, folder_of
from kapelle.runs.definitions import misspelt
from kapelle.runtime.ranks import launched_rank
from kapelle.settings.base import Settings, parts_of
from kapelle.settings.checks import RunToCheck
from kapelle.settings.schema import RunConfig
from kapelle.setup.feature import plans_of
from kapelle.setup.problems import check_sets
from kapelle.setup.prompt_lengths import PROMPTS, check_prompts, excluded_tasks, renderers_of
from kapelle.setup.servers import check_endpoints, check_keys
from kapelle.setup.team_builder import build_algorithm, build_team
from kapelle.setup.validation import check_run
from kapelle.team import Critic, Policy, Team
from kapelle.types import Split
from kapelle.workflow import CountsTurns

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel


# -------- Contents of weight files: `validate` checks them here, and a run checks them when it loads them


def looked_into(run: RunToCheck, models: Mapping[str, Outline]) -> Iterator[str]:
    """Yield the result of checking the files of each model and each adapter.

    Raises ModelError for files that cannot be loaded.
    """
    for path, outline in {path: models[base] for base, path in run.team.bases.items()}.items():
        if path in run.given or path == "embedded":
            continue
        folder = folder_of(path)
        if folder is None:
            yield f"{path}: not downloaded yet, so its weights are not checked"
            continue
        unchanged = verify_folder(folder)
        yield (
            f"{path}: "
            f"{_tried(run.config, path, outline)}{', and unchanged since kapelle wrote it' if unchanged else ''}"
        )
    for policy in run.team.every.values():
        if policy.past is not None and verify_folder(Path(policy.past)):
            yield f"{policy.past}: unchanged since kapelle wrote it"


def _tried(config: RunConfig, path: str, outline: Outline) -> str:
    """Return a phrase that describes which checks were made on the files of a model."""
    later = [] if check_files(path, outline) else ["names and shapes (accelerate is not installed)"]
    if outline_of_settings(read_settings(path)) is None:
        replays = config.model.routing == "replayed"
        small = check_architecture(path, replays_routing=replays)
        if small is None:
            later.append("the output head (no small model can be created from these settings)")
        elif replays and isinstance(config.engine, RecordsRouting):
            config.engine.check_recording(small)
    then = f"; {' and '.join(later)} checked when it is loaded" if later else ", weights fit"
    return f"files whole{then}"


# -------- The preparation

DOUBT = "doubt"
"""Passed in place of the name of a check to report that the run can train but may not do what was intended."""

Passed = Callable[[str, str], None]
"""A function that is called with the name and the result of each check that passed, and with each `DOUBT`."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that passed all checks, with all of its parts except the weights."""

    config: RunConfig
    given: Mapping[str, LanguageModel]
    """The models in memory, by their path in the settings."""
    algorithm: Algorithm
    team: Team
    outlines: Mapping[str, Outline]
    """Mapping from the name of a base model to the model without its weights."""
    notes: tuple[str, ...] = ()
    """Notes about the tasks: how many are excluded, and the resulting number of steps."""
    excluded: tuple[str, ...] = ()
    """The number of excluded tasks and rows and the reason, in one sentence for each reason and split. These sentences are
    recorded with the run."""
    doubts: tuple[str, ...] = ()
    """Effects of the settings that may be unintended, such as a `max_tokens` beyond the model's context."""

    def on_bases(self, bases: Mapping[str, str], held: Mapping[str, LanguageModel]) -> PreparedRun:
        """Return the same run with other base models.

        The argument `bases` maps names to paths, and `held` contains models in memory by path.
        """
        return replace(self, team=replace(self.team, bases=bases), given={**self.given, **held})

    def load(self) -> dict[str, LanguageModel]:
        """Load every base model of the team with its weights and return the models by name.

        Raises ModelError for a model that cannot be read.
        """
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
    """Make all checks that do not need weights, and return the prepared run.

    The argument `given` contains models in memory, by path. If `training` is false, checks that matter only for
    training are skipped. If `elsewhere` is true, checks of the packages and devices of this machine are also skipped.
    The function `renderer_of` reads tokenisers. The function `passed` is called after each check. If `absent` is given,
    missing packages, rows and models are added to it, and the checks that need them are skipped. Raises the first
    KapelleError that the run would raise.
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
    run = RunToCheck(config, algorithm, team, given, training, elsewhere, absent)
    check_run(run)
    notes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    with noting(absent, *run.unneeded):
        tested = check_sets(config, team)
        if training:
            for _, part in parts_of(config.environment):
                for remark in report_of(part).remarks():
                    report(DOUBT, remark)
            longer: Mapping[Split, tuple[int, str]] = {}
            if config.tasks.max_prompt_tokens is not None:
                longer = excluded_tasks(run, renderers_of(run, given, renderer_of))
            config, counted = _counted(config, longer.get("train", (0, ""))[0])
            excluded = (*tested, *(note for tasks, note in longer.values() if tasks))
            notes = (*excluded, *counted)
    for note in notes:
        report("tasks", note)
    report("algorithm", f"{algorithm.name} can train this team")
    best = config.checkpoint.best
    if training and best is not None and (meant := misspelt(best)):
        report(DOUBT, f"`checkpoint.best` is '{best}', which is not a metric of kapelle.{meant}")
    report("workflow", f"{config.workflow.name} works with {config.environment.name}")
    turns = config.workflow.most_turns(team.names) if isinstance(config.workflow, CountsTurns) else None
    for agent in team.names:
        if turns is not None and not turns[agent] and team.policy(agent).trained:
            report(
                DOUBT,
                f"Agent '{agent}' is trained, but the workflow `{config.workflow.name}` gives it no turn.",
            )
    if passed is not None:
        report("data", _data(config))
        for doubt in report_of(config.environment).doubts():
            report(DOUBT, doubt)
    with noting(absent, *run.unneeded):
        for note in check_prompts(run, renderers_of(run, given, renderer_of)):
            report(DOUBT, note)
        report("prompts", f"the first prompts of {PROMPTS} tasks of each split fit the context")
    models: Mapping[str, Outline] = {}
    with noting(absent):
        models = read_outlines(team, config.model, given)
        _check_models(run, models, report)
    if passed is not None and models:
        for found in looked_into(run, models):
            report("weights", found)
        for address in check_endpoints(team, config.environment):
            report("endpoint", f"{address} answers")
    return PreparedRun(config, given, algorithm, team, models, notes, excluded, tuple(doubts))


def _check_models(run: RunToCheck, models: Mapping[str, Outline], report: Passed) -> None:
    """Raise ModelError or ConfigError for models whose files, layers or adapters do not fit the settings."""
    config, team = run.config, run.team
    read = {path: models[base] for base, path in team.bases.items() if path not in run.given}
    check_adapters(team, models)
    raise_all([ConfigError(e) for each in plans_of(config) for e in each.check_memory(run, models)])
    for path in read:
        if "vision_config" in read_settings(path):
            read_image_processor(located(path), read_architecture(path, config.model.embedded))
        elif path == "embedded" and config.model.embedded.sees:
            need_pillow()
    for doubt in _check_shapes(run, models):
        report(DOUBT, doubt)
    for path, outline in read.items():
        check_files(path, outline)
    report("models", ", ".join(dict.fromkeys(team.bases.values())) + ": settings read, adapters fit")


def in_training(config: RunConfig, team: Team) -> str:
    """Return a description of the trained weights and learning rates, such as `adapters of rank 16 on all-linear (solver) at lr 1e-05`."""
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


def _counted(config: RunConfig, too_long: int) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the settings with the number of steps computed from `training.epochs` and the number of remaining tasks, and a note."""
    environment, training = config.environment, config.training
    if training.epochs is None:
        return config, ()
    count = environment.size("train")
    if count is None:
        raise ConfigError(
            f"`training.epochs` needs a finite number of tasks, but `{environment.name}` generates tasks "
            "without end. Set `training.epochs: null` and `training.steps`."
        )
    count -= too_long
    steps = ceil(training.epochs * count / training.tasks_per_step)
    tasks = "task" if count == 1 else "tasks"
    note = f"{training.epochs:g} epochs of {count} {tasks}, with {training.tasks_per_step} per step, are {steps} steps"
    changed = training.model_copy(update={"steps": steps})
    return config.model_copy(update={"training": changed}), (note,)


def _check_shapes(run: RunToCheck, models: Mapping[str, Outline]) -> Iterator[str]:
    """Raise ConfigError for settings that the shapes of the models do not support.

    Yields a message for each error that concerns several processes.
    """
    config, team = run.config, run.team
    if config.model.routing == "replayed":
        for model in models.values():
            check_routing(model.layers)
    if not run.training:
        return
    if config.model.router == "trained" and not any(
        models[base].layers.routers for base in team.trained_bases
    ):
        raise ConfigError(
            "`model.router: trained` needs a mixture-of-experts model of which all weights are trained. Set "
            "`model.router: frozen`."
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
            yield f"{error} (With a single process, nothing is split.)"


def connect(settings: object) -> None:
    """Make an environment, and all environments inside it, request their descriptions from their servers."""
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
    return "; ".join([*found, *excluded_rows(config)])


def excluded_rows(config: RunConfig) -> list[str]:
    """Return a sentence for each split from which the environment excludes rows."""
    return [f"{split}: {skipped}" for split, skipped in report_of(config.environment).skipped().items()]


# -------- Removing the programs that a run would start from its settings

S = TypeVar("S")


def without_programs(settings: S) -> tuple[S, list[str]]:
    """Return the settings without the MCP servers in their tools, and the command or URL of each removed server."""
    excluded: list[str] = []
    changed: S = _without(settings, excluded)
    return changed, excluded


def _without(value: Any, excluded: list[str]) -> Any:
    """Return a value in the settings without MCP servers, or the same object if it contains no servers."""
    if isinstance(value, Settings):
        found = {name: _without(getattr(value, name), excluded) for name in type(value).model_fields}
        changed = {name: each for name, each in found.items() if each is not getattr(value, name)}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, Mapping):
        inner = {key: _without(each, excluded) for key, each in value.items()}
        return inner if any(inner[key] is not value[key] for key in inner) else value
    if isinstance(value, tuple):
        excluded += [each.server for each in value if isinstance(each, StartsProgram)]
        kept = tuple(_without(each, excluded) for each in value if not isinstance(each, StartsProgram))
        same = len(kept) == len(value) and all(one is other for one, other in zip(kept, value, strict=True))
        return value if same else kept
    return value
