"""Which settings may change when a run is resumed, and how changes are reported and recorded.

Settings are marked where they are declared (`settings.base.FREE` and `FROM_HERE_ON`). All others define the run and
must stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kapelle.errors import CheckpointError, ConfigError
from kapelle.runs.writer import RunDirectory, is_run, read_config, saved_steps
from kapelle.runtime.trees import leaves
from kapelle.settings.base import FREE, MayChange, Settings
from kapelle.settings.overlays import parse_yaml
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import load_recipe, resolve, to_yaml


def changed_settings(old: str, new: str, allowed: Sequence[MayChange] = (FREE,)) -> list[str]:
    """Return, in words, the changes that make `new` another run than `old` (both YAML)."""
    config = resolve(parse_yaml(new))
    may = [key for key, mark in changeable(config) if mark in allowed]
    return [_change(*change) for change in _changes(old, new) if not _within(change[0], may)]


def changeable(config: RunConfig) -> Iterator[tuple[str, MayChange]]:
    """Yield the dotted key of every setting that may change on resume; a whole section by its own key."""
    yield from _marked(config, "")


def config_of_run(folder: Path, settings: Sequence[str] = ()) -> RunConfig:
    """Return the settings of a run directory with overrides; CheckpointError if it is none."""
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"{folder} is no run directory: it has no config.yaml.")
    return load_recipe(str(folder / "config.yaml"), (), settings).config


def open_run(
    path: Path, config: RunConfig, origin: Mapping[str, str], say: Callable[[str], None], *, resume: bool
) -> RunDirectory:
    """Open a run directory as `RunDirectory.create` does; `say` gets a line for each change.

    The run records it: the origin of a changed value names the step and the value before.
    """
    kept = dict(origin)
    marks = dict(changeable(config))
    if resume and is_run(path):
        step = saved_steps(path)
        for key, before, now in _changes(read_config(path), to_yaml(config)):
            if _within(key, [k for k, mark in marks.items() if mark is not FREE]):
                kept[key] = f"{origin.get(key, 'resumed')} from step {step} on; {before!r} before"
                say(f"{_change(key, before, now)} from step {step} on")
    return RunDirectory.create(
        path,
        config=to_yaml(config),
        provenance=kept,
        resume=resume,
        differences=lambda old, new: changed_settings(old, new, tuple(MayChange)),
    )


def _marked(settings: Settings, at: str) -> Iterator[tuple[str, MayChange]]:
    for name, field in type(settings).model_fields.items():
        mark = next((each for each in field.metadata if isinstance(each, MayChange)), None)
        if mark is not None:
            yield f"{at}{name}", mark
        else:
            for place, value in leaves(getattr(settings, name), f"{at}{name}"):
                if isinstance(value, Settings):
                    yield from _marked(value, f"{place}.")


def _within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _changes(old: str, new: str) -> list[tuple[str, Any, Any]]:
    """Return each key that differs, with the old value and the new one."""
    before, after = _flat(_whole(old)), _flat(_whole(new))
    return [
        (key, before.get(key), after.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def _whole(text: str) -> dict[str, Any]:
    """Return a run's settings completed by defaults: a setting may be newer than the run."""
    try:
        values: dict[str, Any] = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"The run's config.yaml is not YAML: {error}. Put it back from a copy.") from None
    try:
        return resolve(values).model_dump(mode="json")
    except ConfigError:  # of another version of kapelle, or of a plug-in that has changed
        return values


def _change(key: str, before: Any, now: Any) -> str:
    return f"{key} was {before!r} and is {now!r}"


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None:
        return {at: value}
    return {k: v for key, item in items for k, v in _flat(item, f"{at}.{key}" if at else str(key)).items()}
