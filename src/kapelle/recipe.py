"""Reading recipes: files, overlays and `key.path=value`, with the origin of every value.

Precedence: defaults < recipe < overlays in order < `key.path=value` in order. Errors name the key, the
file that set it and the closest known key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from kapelle.algorithm import algorithm_class
from kapelle.config import NAME, RunConfig
from kapelle.configured import Configured
from kapelle.engines.rollout import engine_class
from kapelle.environment import environment_class
from kapelle.errors import ConfigError, did_you_mean
from kapelle.workflow import workflow_class
from kapelle.workflows.dag_file import is_workflow_file, read_workflow
from kapelle.workflows.dag_paths import fitted
from kapelle.wrong_setting import explain

M = TypeVar("M", bound=Configured)

SECTIONS = {
    "environment": environment_class,
    "workflow": workflow_class,
    "algorithm": algorithm_class,
    "engine": engine_class,
}
"""Sections whose settings are those of a class found by `name`."""


NAMED = (*SECTIONS, "algorithm.order", "algorithm.base.order")
"""Where another `name` means other settings, so that those of the old one go."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A resolved run and where each of its values came from."""

    config: RunConfig
    origin: Mapping[str, str]
    """Dotted key → file name, `command line` or `default`."""

    def yaml(self) -> str:
        """Return the resolved settings; reading them again gives the same run."""
        return to_yaml(self.config)


def to_yaml(config: RunConfig) -> str:
    """Return all settings, defaults included, as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


MAY_CHANGE = ("training.steps", "description", "trackers", "checkpoint", "evaluation")
"""What a resumed run may say otherwise than before."""


def changed_settings(old: str, new: str) -> list[str]:
    """Return what keeps a run of the settings `old` from going on with `new` (both YAML), in words."""
    before, after = _flat(yaml.safe_load(old)), _flat(yaml.safe_load(new))
    return [
        f"{key} was {before.get(key)!r} and is {after.get(key)!r}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and not key.startswith(MAY_CHANGE)
    ]


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None:
        return {at: value}
    return {k: v for key, item in items for k, v in _flat(item, f"{at}.{key}" if at else str(key)).items()}


def builtin_recipes() -> dict[str, str]:
    """Return the recipes inside the package: name → YAML text."""
    folder = files("kapelle") / "recipes"
    texts = {p.name[:-5]: p.read_text("utf-8") for p in folder.iterdir() if p.name.endswith(".yaml")}
    return dict(sorted(texts.items()))


def load_recipe(name: str, overlays: Sequence[str] = (), settings: Sequence[str] = ()) -> Recipe:
    """Read a built-in recipe or a YAML file, lay overlays and settings over it and check every key.

    Raises ConfigError for a missing file, YAML that does not parse, and keys or values that mean nothing.
    """
    return lay_over([(source, _read(source)) for source in (name, *overlays)], settings)


def lay_over(layers: Sequence[tuple[str, Mapping[str, Any]]], settings: Sequence[str] = ()) -> Recipe:
    """Lay named mappings and then settings over one another and check every key; as `load_recipe`."""
    merged, origin = _layered(layers, settings)
    if "stages" in merged:
        raise ConfigError(
            f"Recipe '{layers[0][0]}' has stages, and this takes one run. Train it with `kapelle train`, then name one "
            "of the folders that it makes, such as RUN/01-NAME."
        )
    return _resolved(merged, origin)


def load_stages(
    name: str, overlays: Sequence[str] = (), settings: Sequence[str] = ()
) -> tuple[tuple[str, Recipe], ...]:
    """Read a recipe's `stages`, each the recipe with the stage's own sections laid over it; empty without any.

    Settings lie over every stage; `stages.0.key=value` is for one. Errors as of `load_recipe`.
    """
    merged, origin = _layered([(source, _read(source)) for source in (name, *overlays)], settings)
    stages = merged.pop("stages", None)
    if stages is None:
        return ()
    _check_stages(name, stages)
    origin = {key: source for key, source in origin.items() if not key.startswith("stages.")}
    found = []
    for stage in stages:
        own, own_origin = deepcopy(merged), dict(origin)
        _merge(own, {k: v for k, v in stage.items() if k != "name"}, f"stage '{stage['name']}'", own_origin)
        for setting in settings:
            if not setting.startswith("stages."):
                _merge(own, _parse_setting(setting), "command line", own_origin)
        found.append((stage["name"], _resolved(own, own_origin)))
    return tuple(found)


def _check_stages(recipe: str, stages: Any) -> None:
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, Mapping) for stage in stages):
        raise ConfigError(
            f"`stages` of recipe '{recipe}' is no list of stages. Write `stages: [{{name: …}}]`."
        )
    names = [stage.get("name") for stage in stages]
    for number, name in enumerate(names):
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise ConfigError(
                f"Stage {number} of recipe '{recipe}' is named {name!r}. Give it a `name` of letters, digits and _."
            )
        if name in names[:number]:
            raise ConfigError(f"Recipe '{recipe}' has two stages named '{name}'. Rename one.")


def _layered(
    layers: Sequence[tuple[str, Mapping[str, Any]]], settings: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, values in layers:
        _merge(merged, fitted(values, merged), source, origin)
    for setting in settings:
        _merge(merged, fitted(_parse_setting(setting), merged), "command line", origin)
    return merged, origin


def _resolved(merged: Mapping[str, Any], origin: dict[str, str]) -> Recipe:
    config = resolve(merged, origin)
    for key in _leaves(config.model_dump(mode="json")):
        origin.setdefault(key, "default")
    return Recipe(config, origin)


def resolve(values: Mapping[str, Any], origin: Mapping[str, str] | None = None) -> RunConfig:
    """Validate nested values as a run; ConfigError explains the first thing that is wrong."""
    engine = values.get("engine", {})
    if isinstance(engine, Mapping):
        values = {**values, "engine": {"name": "local", **engine}}
    built = {section: _section(section, values, origin or {}) for section in SECTIONS}
    return _validated(RunConfig, {**values, **built}, origin or {})


def _section(section: str, values: Mapping[str, Any], origin: Mapping[str, str]) -> Configured:
    given = values.get(section)
    if isinstance(given, Configured):
        return given
    if not isinstance(given, Mapping) or "name" not in given:
        raise ConfigError(f"The recipe says no `{section}.name`. Add `{section}: {{name: …}}`.")
    found = SECTIONS[section](str(given["name"]))
    if not issubclass(found, Configured):
        raise ConfigError(f"The {section} '{given['name']}' must be a subclass of kapelle.Configured.")
    return _validated(found, given, origin, section)


def _validated(model: type[M], values: Mapping[str, Any], origin: Mapping[str, str], at: str = "") -> M:
    try:
        return model.model_validate(dict(values))
    except pydantic.ValidationError as error:
        raise ConfigError(explain(model, values, error, origin, at)) from None


def _read(source: str) -> dict[str, Any]:
    path = Path(source)
    recipes = builtin_recipes()
    if source in recipes and not path.is_file():
        text = recipes[source]
    elif path.suffix in {".yaml", ".yml"} or path.is_file():
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"Recipe file {source} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"Recipe file {source} is no text in UTF-8: {error.reason}.") from None
    else:
        raise ConfigError(f"Unknown recipe '{source}'.{did_you_mean(source, recipes)}")
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"Recipe {source} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"Recipe {source} is not a mapping of sections but {type(values).__name__}.")
    return dict(read_workflow(values, source).sections) if is_workflow_file(values) else values


def _parse_setting(setting: str) -> dict[str, Any]:
    key, equals, raw = setting.partition("=")
    if not equals or not key:
        raise ConfigError(f"'{setting}' is no setting. Write key.path=value, for example training.steps=100.")
    try:
        value: Any = yaml.safe_load(raw)
    except yaml.YAMLError:
        raise ConfigError(f"The value of '{setting}' is not YAML. Quote it.") from None
    # YAML 1.1 reads 1e-3 as text; a setting that is a number takes such text.
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _merge(
    into: dict[str, Any], over: Mapping[str, Any], source: str, origin: dict[str, str], at: str = ""
) -> None:
    if at[:-1] in NAMED and over.get("name", into.get("name")) != into.get("name"):
        # Another class: the old one's settings mean nothing to it.
        for key in [k for k in origin if k.startswith(at)]:
            del origin[key]
        into.clear()
    for key, value in over.items():
        path = f"{at}{key}"
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value, source, origin, f"{path}.")
        elif (
            isinstance(into.get(key), list)
            and isinstance(value, Mapping)
            and all(str(k).isdigit() for k in value)
        ):
            _merge_items(into[key], value, source, origin, path)
        else:
            into[key] = _plain(value)
            for replaced in [k for k in origin if k == path or k.startswith(f"{path}.")]:
                del origin[replaced]
            for leaf in _leaves(into[key], path):
                origin[leaf] = source


def _merge_items(
    items: list[Any], over: Mapping[str, Any], source: str, origin: dict[str, str], path: str
) -> None:
    for index, value in over.items():
        if int(index) >= len(items):
            raise ConfigError(f"{path} has {len(items)} entries, from 0; there is no {path}.{index}.")
        if isinstance(value, Mapping) and isinstance(items[int(index)], dict):
            _merge(items[int(index)], value, source, origin, f"{path}.{index}.")
        else:
            items[int(index)] = value
            origin[f"{path}.{index}"] = source


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _leaves(value: Any, path: str = "") -> list[str]:
    if isinstance(value, Mapping) and value:
        return [
            leaf
            for key, item in value.items()
            for leaf in _leaves(item, f"{path}.{key}" if path else str(key))
        ]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [leaf for k, item in enumerate(value) for leaf in _leaves(item, f"{path}.{k}")]
    return [path]
