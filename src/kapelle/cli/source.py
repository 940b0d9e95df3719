"""Determines the run that the arguments of a command describe: a recipe with overlays and settings, or a run directory to resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kapelle.cli.parser import split_words
from kapelle.errors import ConfigError, RunDirectoryError
from kapelle.runs.lock import RunLock
from kapelle.runs.reader import is_run, read_config, read_provenance
from kapelle.runtime.console import say
from kapelle.runtime.ranks import broadcast
from kapelle.settings.aliases import NOTHING_READ, Reading
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import Recipe, builtin_recipes, load_recipe
from kapelle.training.stages import FILE, Stage, checkable, is_done, open_stages, read_stages, start_of


@dataclass(frozen=True, slots=True)
class Source:
    """A resolved run to start or to resume."""

    name: str
    config: RunConfig
    origin: Mapping[str, str]
    run_dir: Path | None
    """The run directory. If None, the command chooses the directory."""
    resume: bool
    start_from: Mapping[str, Path] = field(default_factory=dict)
    """Mapping from a policy to the folder of its initial weights."""
    notes: tuple[str, ...] = ()
    """Notes that are printed before the run."""
    whole: Path | None = None
    """The folder of all stages, if this run is one stage of a staged recipe."""
    read: Reading = NOTHING_READ
    """A description of how setting names of other libraries were converted."""


def read_source(words: Sequence[str], run_dir: str | None, *, resume: bool, real: bool) -> Source:
    """Return the run that `kapelle train` should start or resume. Raises the errors of `recipe.load_recipe`."""
    files, settings = split_words(words)
    folder = Path(run_dir) if run_dir else None
    if resume and (not files or folder is None):
        place = Path(files[0]) if files else folder
        if place is None:
            raise ConfigError("Give the run to resume: `kapelle train --resume RUN`.")
        if real:
            raise ConfigError("--real applies only to a recipe. Remove it.")
        if not is_run(place) and (str(place) in builtin_recipes() or place.suffix in (".yaml", ".yml")):
            raise RunDirectoryError(
                f"{place} is a recipe, not a run. Give a run: `kapelle train --resume RUN`. `kapelle runs ls` lists all runs."
            )
        read_config(place)  # raises when there is no run
        config = str(place / "config.yaml")
        recipe = load_recipe(config, files[1:], settings)
        # Origins come from the run's record, except for settings of this command.
        try:
            before, notes = read_provenance(place), recipe.notes
        except RunDirectoryError as error:
            # The record is only informative: without it, the run continues and writes a new one.
            before, notes = {}, (*recipe.notes, str(error))
        origin = {
            key: before.get(key, source) if source == config else source
            for key, source in recipe.origin.items()
        }
        return Source(
            recipe.config.name, recipe.config, origin, place, resume=True, notes=notes, read=recipe.read
        )
    recipe = read_recipe(words, real=real)
    return Source(
        files[0], recipe.config, recipe.origin, folder, resume, notes=recipe.notes, read=recipe.read
    )


def read_recipe(words: Sequence[str], *, real: bool) -> Recipe:
    """Return the recipe that the arguments name, with its overlays and settings. Raises ConfigError if no recipe is named."""
    files, settings = split_words(words)
    if not files:
        raise ConfigError(
            "Give a recipe: a built-in one (`kapelle recipes ls` lists them), or your own YAML file."
        )
    return load_recipe(files[0], files[1:], settings, real=real)


# -------- Recipes with stages on the command line: find the stages, check them together, then run them in turn


@dataclass(frozen=True, slots=True)
class Staged:
    """The stages of a recipe, and the folder in which they run."""

    recipe: str
    stages: tuple[Stage, ...]
    run_dir: Path | None
    """The folder of all stages. If None, the command chooses the folder."""

    def checked(self) -> Iterator[tuple[Stage, RunConfig]]:
        """Yield every stage with settings that can be checked before any stage has run."""
        with checkable(self.stages) as configs:
            yield from zip(self.stages, configs, strict=True)

    def dry(self, *, as_json: bool) -> Iterator[Source]:
        """Yield every stage as a source that is only displayed and not trained."""
        for stage, config in self.checked():
            if not as_json:
                say(f"# stage {stage.number} of {len(self.stages)}: {stage.name}")
            notes = stage.recipe.notes
            yield Source(self.recipe, config, stage.recipe.origin, None, resume=False, notes=notes)


def find_stages(words: Sequence[str], run_dir: str | None, *, resume: bool, real: bool) -> Staged | None:
    """Return the stages of the given recipe or of the folder to resume, or None for a single run."""
    files, settings = split_words(words)
    folder = Path(run_dir) if run_dir else None
    if resume and (not files or folder is None):
        place = Path(files[0]) if files else folder
        if place is None or not (place / FILE).is_file():
            return None
        return Staged(str(place), read_stages(str(place / FILE), files[1:], settings), place)
    stages = read_stages(files[0], files[1:], settings, real=real) if files else ()
    return Staged(files[0], stages, folder) if stages else None


def stage_sources(staged: Staged, *, resume: bool) -> Iterator[tuple[str, Source]]:
    """Check all stages, and then yield each unfinished stage with a title. The caller trains each stage before requesting the next one.

    With several ranks, the first rank opens the folder and informs the other ranks which stages are finished.
    """
    from kapelle.setup.preparation import prepare
    from kapelle.training.stages import check_weights
    from kapelle.training.starting import join_ranks

    for _, config in staged.checked():
        prepared = prepare(config)
        if not resume:  # a run that continues no longer needs its initial weights
            check_weights(prepared, staged=True)
    ranks = join_ranks(staged.stages[0].recipe.config)
    held: list[RunLock] = []
    whole = Path(broadcast(ranks, "stages", partial(_opened, staged, held, resume=resume)))
    for stage in staged.stages:
        title = f"stage {stage.number} of {len(staged.stages)}, {stage.name}"
        if broadcast(ranks, title, partial(_done, stage, whole, held)):
            if not ranks.rank:
                say(f"{title}: already done")
            continue
        start = start_of(stage, staged.stages, whole)
        source = Source(
            staged.recipe,
            start.config,
            stage.recipe.origin,
            start.run_dir,
            start.resume,
            start.start_from,
            stage.recipe.notes,
            whole,
        )
        yield f"kapelle train: {title}", source
    for lock in held:
        lock.release()


def _opened(staged: Staged, held: list[RunLock], *, resume: bool) -> str:
    """Open and lock the folder of all stages, and return its path."""
    from kapelle.runs.writer import new_path

    whole = staged.run_dir or new_path(staged.recipe)
    held.append(open_stages(whole, staged.stages, resume=resume))
    return str(whole)


def _done(stage: Stage, whole: Path, held: list[RunLock]) -> bool:
    for lock in held:
        lock.recheck()
    return is_done(stage, whole)
