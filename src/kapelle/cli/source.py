"""Which run a command means: a recipe with overlays and settings, or a run directory to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kapelle.cli.parser import split_words
from kapelle.errors import ConfigError, RunDirectoryError
from kapelle.runs.reader import read_config, read_provenance
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import Recipe, load_recipe


@dataclass(frozen=True, slots=True)
class Source:
    """A resolved run to start or to continue."""

    name: str
    config: RunConfig
    origin: Mapping[str, str]
    run_dir: Path | None
    """None where the command may choose."""
    resume: bool
    start_from: Mapping[str, Path] = field(default_factory=dict)
    """Policy → folder of weights that it starts from."""
    notes: tuple[str, ...] = ()
    """Notes to print before it runs."""
    whole: Path | None = None
    """The folder of all stages, when this run is one of several."""


def read_source(words: Sequence[str], run_dir: str | None, *, resume: bool, real: bool) -> Source:
    """Return what `kapelle train` should do; raises the errors of `recipe.load_recipe`."""
    files, settings = split_words(words)
    folder = Path(run_dir) if run_dir else None
    if resume and (not files or folder is None):
        place = Path(files[0]) if files else folder
        if place is None:
            raise ConfigError("Nothing to resume is named. Write `kapelle train --resume RUN`.")
        if real:
            raise ConfigError("--real is for a recipe; a run continues with the settings that it began with.")
        return _resumed(place, (*files[1:],), settings)
    recipe = read_recipe(words, real=real)
    return Source(files[0], recipe.config, recipe.origin, folder, resume, notes=recipe.notes)


def read_recipe(words: Sequence[str], *, real: bool) -> Recipe:
    """Return the recipe that words name, with its overlays and settings; ConfigError when none is named."""
    files, settings = split_words(words)
    if not files:
        raise ConfigError(
            "No recipe is named. Name one that comes with kapelle (`kapelle recipes ls` lists them), or a YAML file of yours."
        )
    return load_recipe(files[0], files[1:], settings, real=real)


def _resumed(place: Path, overlays: tuple[str, ...], settings: tuple[str, ...]) -> Source:
    read_config(place)  # raises when there is no run
    recipe = load_recipe(str(place / "config.yaml"), overlays, settings)
    # The run's own record states where values came from, except for those given now.
    try:
        before, notes = read_provenance(place), recipe.notes
    except RunDirectoryError as error:
        # Nothing depends on it: the run continues and writes what is known now.
        before, notes = {}, (*recipe.notes, str(error))
    config = str(place / "config.yaml")
    origin = {
        key: before.get(key, source) if source == config else source for key, source in recipe.origin.items()
    }
    return Source(recipe.config.name, recipe.config, origin, place, resume=True, notes=notes)
