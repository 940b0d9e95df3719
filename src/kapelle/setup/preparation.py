"""One preparation for training, validating, comparing and playing: every check, before a model is loaded.

prepared = prepare(config, given)      raises the first error that the run would meet
models = prepared.load()               this takes memory
engine = build_engine(config, models, prepared.team)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import BaseModel

from kapelle.algorithm import Algorithm
from kapelle.environment import Connecting, Doubting, Skipping, offers
from kapelle.metrics.definitions import misspelt
from kapelle.models.outline import Outline, check_adapters, read_outlines
from kapelle.models.renderer import ReadRenderer, load_renderer
from kapelle.models.weight_files import check_files
from kapelle.setup.endpoints import check_endpoints, check_keys
from kapelle.setup.looking_into import looked_into
from kapelle.setup.prompts import check_prompts
from kapelle.setup.team_builder import build_algorithm, build_team
from kapelle.setup.validation import check_run
from kapelle.team import Team
from kapelle.workflow import CountsTurns

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel
    from kapelle.settings.schema import RunConfig

PROMPTS = 64
"""Tasks of each split whose first prompts are checked for length."""

DOUBT = "doubt"
"""In place of a check's name: nothing forbids to train, but what is said may not be meant."""

Passed = Callable[[str, str], None]
"""Called after each check that passed, with its name and what it found; and for each `DOUBT`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that passed all checks, and what it is made of; no weights."""

    config: RunConfig
    given: Mapping[str, LanguageModel]
    """Models in memory, by their path in the settings."""
    algorithm: Algorithm
    team: Team
    outlines: Mapping[str, Outline]
    """Base name → the model without its weights."""

    def on_bases(self, bases: Mapping[str, str], held: Mapping[str, LanguageModel]) -> Prepared:
        """Return the same run on other bases (name → path); `held` are those in memory, by path."""
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
) -> Prepared:
    """Make every check that needs no weights and return what the run is made of.

    `given` are models in memory, by path. Without `training`, the checks that only training needs are left out; for a run
    `elsewhere`, those of what is installed here and of this machine's devices. `renderer_of` reads tokenisers.
    `passed` is called after each check. Raises the first KapelleError that the run would meet.
    """
    given = given or {}
    report = passed or _ignore
    connect(config.environment)
    algorithm = build_algorithm(config)
    team = build_team(config, algorithm)
    check_keys(team, config.environment)
    report("team", f"{', '.join(team.names)}; {', '.join(team.trained) or 'nothing'} trains")
    check_run(config, algorithm, team, given, training, elsewhere)
    report("algorithm", f"{algorithm.name} can train this team")
    for doubt in _doubts(config) if training else ():
        report(DOUBT, doubt)
    report("workflow", f"{config.workflow.name} can be played on {config.environment.name}")
    for agent in _silent(config, team):
        report(DOUBT, f"Agent '{agent}' learns, but takes no turn in the workflow `{config.workflow.name}`.")
    if passed is not None:
        report("data", _data(config))
        if offers(config.environment, Doubting):
            for doubt in config.environment.doubts():
                report(DOUBT, doubt)
    for note in check_prompts(config, team, given, PROMPTS, renderer_of):
        report(DOUBT, note)
    report("prompts", f"the opening ones of {PROMPTS} tasks of each split fit the context")
    models = read_outlines(team, config.model, given)
    check_adapters(team, models)
    for base, path in team.bases.items():
        if path not in given:
            check_files(path, models[base])
    report("models", ", ".join(dict.fromkeys(team.bases.values())) + ": settings read, adapters fit")
    if passed is not None:
        for found in looked_into(team, models, given):
            report("weights", found)
        for address in check_endpoints(team, config.environment):
            report("endpoint", f"{address} answers")
    return Prepared(config, given, algorithm, team, models)


def _doubts(config: RunConfig) -> Iterator[str]:
    """Yield what training would do other than its settings seem to ask for."""
    rising, steps = config.optimizer.warmup_steps, config.training.steps
    if rising >= steps > 0:
        yield (
            f"The learning rate rises for {rising} steps (`optimizer.warmup_steps`), and training takes {steps}: it never "
            "gets to `optimizer.lr`."
        )
    best = config.checkpoint.best
    if best is not None and (meant := misspelt(best)):
        yield f"No metric of kapelle's is called '{best}' (`checkpoint.best`).{meant}"


def _silent(config: RunConfig, team: Team) -> list[str]:
    """Return the agents that are trained and that the workflow never lets speak, where it knows."""
    if not isinstance(config.workflow, CountsTurns):
        return []
    turns = config.workflow.most_turns(team.names)
    return [name for name in team.names if team.policy(name).trained and not turns[name]]


def connect(settings: object) -> None:
    """Let an environment, and those inside it, ask what they are where somebody else knows that."""
    if offers(settings, Connecting):
        settings.connect()
    elif isinstance(settings, BaseModel):
        connect([value for _, value in settings])
    elif isinstance(settings, Mapping):
        connect(list(settings.values()))
    elif isinstance(settings, list | tuple):
        for value in settings:
            connect(value)


def _ignore(_name: str, _found: str) -> None:
    return None


def _data(config: RunConfig) -> str:
    environment = config.environment
    sources = [
        f"{split}: {source} ({_many(environment.size(split))})"
        for split, source in environment.sources.items()
    ]
    return "; ".join([*sources, *rows_left_out(config)])


def rows_left_out(config: RunConfig) -> list[str]:
    """Return a sentence for each split of which the environment leaves out rows; empty where it uses all."""
    environment = config.environment
    if not offers(environment, Skipping):
        return []
    return [f"{split}: {skipped}" for split, skipped in environment.skipped().items()]


def _many(size: int | None) -> str:
    return "as many tasks as are asked for" if size is None else f"{size} tasks"
