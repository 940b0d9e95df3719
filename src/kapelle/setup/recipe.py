"""Reads recipes from files, overlays and `key.path=value` settings, and records the origin of every value.

Values are taken from the following sources, where later sources take precedence: the defaults, the recipe, the section
`real` of the recipe (with `--real`), the overlays in order, and the `key.path=value` settings in order. Error messages
state the key, the file that set the key, and the closest known key.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kapelle.algorithm import Taught, algorithm_class
from kapelle.engines.rollout.protocol import EngineSettings, engine_class
from kapelle.engines.train.protocol import TrainEngineSettings, train_engine_class
from kapelle.environment import Environment, InMemory, environment_class
from kapelle.errors import ConfigError, did_you_mean, raise_all
from kapelle.runs.named_checkpoint import names_a_run, weights_of
from kapelle.runs.reader import is_run, tag_hint
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import catalogue, known_names
from kapelle.settings.alias_conversions import DEFAULTS
from kapelle.settings.aliases import NOTHING_READ, Reading, read_aliases
from kapelle.settings.base import AlgorithmSettings, Settings, parts_of
from kapelle.settings.messages import checked, in_python, settings_named, unknown_sections, without
from kapelle.settings.overlays import COMMAND_LINE, leaves, merge, parse_setting, parse_yaml, replace_origin
from kapelle.settings.schema import AgentConfig, RunConfig, timed
from kapelle.settings.weights import NAME, PastAdapter
from kapelle.setup.team_builder import build_algorithm, build_team
from kapelle.workflow import Workflow, workflow_class, workflow_files

# -------- The recipe's own warm-up
# Recipes train the embedded model from scratch in minutes, with a supervised warm-up of all its weights, learning rates
# of 1e-3, and completions of ten tokens. The section `real` of a recipe holds the values for a pretrained model;
# `--real` merges it over the recipe. Even without `--real`, setting another `model.path` removes the recipe's own
# warm-up.

REAL = "real"
"""The section of a recipe that `--real` merges over the other sections."""
LEFT_OUT = "excluded: the recipe's warm-up is for the embedded model"
"""The origin of a warm-up that is removed because another model is set."""


def without_own_warmup(
    values: dict[str, Any], origin: dict[str, str], own: frozenset[str]
) -> tuple[str, ...]:
    """Remove the warm-up, in place, if only the recipe itself sets it and the base model was changed. Returns notes for the user.

    The argument `own` contains the origins that count as the recipe itself.
    """
    path, warmup = _path(values), values.get("warmup")
    if path == "embedded" or not isinstance(warmup, Mapping):
        return ()
    set_by = {
        source for key, source in origin.items() if key.partition(".")[0] == "warmup" and source not in own
    }
    if set_by or not own:
        source = ", ".join(sorted(set_by)) or "the run's settings"
        details = ", ".join(f"{key} {value}" for key, value in warmup.items())
        return (f"warm-up: trains all weights of {path} ({details}), set by {source}.",)
    values["warmup"] = None
    replace_origin(origin, "warmup", None, LEFT_OUT)
    return (
        f"warm-up: excluded, because the recipe's warm-up is for the embedded model and would change all weights of {path}. To add one, set warmup.steps=N.",
    )


def _path(values: Mapping[str, Any]) -> str:
    model = values.get("model")
    path = model.get("path") if isinstance(model, Mapping) else None
    return "embedded" if path is None else str(path)


# -------- Names of recipes and classes

_CONTRACTS = {
    "environment": Environment,
    "workflow": Workflow,
    "algorithm": AlgorithmSettings,
    "engine": EngineSettings,
    "train_engine": TrainEngineSettings,
}
"""Mapping from a section to the protocol that the class of the section must implement."""


DATA_FILES = (".jsonl", ".parquet", ".csv", ".tsv", ".arrow", ".gz")
"""The suffixes of files that contain rows rather than a recipe."""


def names_environment(word: str) -> bool:
    """Return whether a word is the name of an environment, which is built in, installed, or written as `module:Class`.

    Raises ConfigError for a word that is neither an environment nor a recipe.
    """
    known, recipes, path = (
        known_names("environment", catalogue("kapelle.environments")),
        builtin_recipes(),
        Path(word),
    )
    if word in known or ":" in word:
        return True
    is_file = path.suffix in {".yaml", ".yml"} or (path.is_file() and path.suffix not in DATA_FILES)
    if word not in recipes and not is_file:
        raise no_recipe(word, recipes, known)
    return False


def no_recipe(word: str, recipes: Iterable[str], environments: Iterable[str] = ()) -> ConfigError:
    """Return the error for a word that is not the name of a recipe. The argument `environments` lists other names that are allowed."""
    path, quoted = Path(word), shlex.quote(word)
    if path.suffix in DATA_FILES:
        return ConfigError(
            f"'{word}' is a data file. Set it in a recipe (`environment.path={word}`), or train on it with "
            "`kapelle.train`."
        )
    if is_run(path):
        return ConfigError(f"'{word}' is a run. To continue it, use `kapelle train --resume {quoted}`.")
    if tag_hint(path):
        return ConfigError(
            f"'{word}' is a checkpoint of a run. To start another run from it, use `kapelle train RECIPE "
            f"--start-from {quoted}`."
        )
    if path.is_dir():
        return ConfigError(f"'{word}' is a folder. Give the YAML file of the recipe.")
    hint = did_you_mean(word, [*recipes, *environments])
    if not hint.startswith(" Did you mean"):
        key = word.rstrip(":")
        dotted = "." in key and key.partition(".")[0] in RunConfig.model_fields
        named = [key] if dotted else settings_named(word)
        hint = f" Did you mean the setting {named[0]}=VALUE?" if named else ""
        hint += " `kapelle recipes ls` lists recipes; your own recipe is a YAML file."
    return ConfigError(f"Unknown {'recipe or environment' if environments else 'recipe'} '{word}'.{hint}")


def check_class(section: str, name: str, found: type) -> None:
    """Raise ConfigError for a class that is not a subclass of Settings, or that lacks methods required by its section."""
    if not issubclass(found, Settings):
        raise ConfigError(f"The {section} '{name}' must be a subclass of kapelle.Settings.")
    parts = [part for part in vars(_CONTRACTS[section]) if not part.startswith("_")]
    missing = [part for part in parts if not hasattr(found, part) and part not in found.model_fields]
    if missing:
        raise ConfigError(
            f"The {section} '{name}' has no `{'`, no `'.join(missing)}`. Add this to the class {found.__name__}; see docs/make_your_own.md."
        )


M = TypeVar("M", bound=Settings)

SECTIONS = {
    "environment": environment_class,
    "workflow": workflow_class,
    "algorithm": algorithm_class,
    "engine": engine_class,
    "train_engine": train_engine_class,
}
"""The sections that hold the settings of a class, which is selected by the field `name`."""

RESOLVED = RunConfig.model_fields.keys()
"""The sections that are present in the resolved settings of every run."""


Layers = Sequence[tuple[str, Mapping[str, Any]]]
"""The sources with their values, in order; later sources take precedence."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A resolved run, with the origin of each of its values."""

    config: RunConfig
    origin: Mapping[str, str]
    """Mapping from a dotted key to its origin: a file name, `command line`, `argument NAME` (of a call in Python) or `default`."""
    notes: tuple[str, ...] = ()
    """Notes for the user, each of which is one sentence."""
    read: Reading = NOTHING_READ
    """A description of how names from other libraries were interpreted."""

    def yaml(self) -> str:
        """Return the resolved settings as YAML. If this YAML is used as a recipe, the run is the same."""
        return to_yaml(self.config)

    def with_seed(self, seed: int) -> Recipe:
        """Return the same run with another seed."""
        return replace(self, config=self.config.model_copy(update={"seed": seed}))


def to_yaml(config: RunConfig) -> str:
    """Return all settings as YAML, including defaults."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def builtin_recipes() -> dict[str, str]:
    """Return the recipes inside the package as a mapping from name to YAML content."""
    folder = files("kapelle") / "settings" / "recipes"
    texts = {p.name[:-5]: p.read_text("utf-8") for p in folder.iterdir() if p.name.endswith(".yaml")}
    return dict(sorted(texts.items()))


@in_python()
def load_recipe(
    name: str, overlays: Sequence[str] = (), settings: Sequence[str] = (), *, real: bool = False
) -> Recipe:
    """Read a built-in recipe or a YAML file, merge overlays and settings over it, and check every key.

    If `real` is true, the section `real` of the recipe, which has the values for a pretrained model, is merged directly
    over the recipe. Raises ConfigError for a missing file, invalid YAML, unknown keys and invalid values.
    """
    for keyword, given in (("overlays", overlays), ("settings", settings)):
        if isinstance(given, str):
            raise ConfigError(
                f"`{keyword}` is the string {given!r}. Pass a list of strings: {keyword}=[{given!r}]."
            )
    overlays, settings = _with_workflow(overlays, settings)
    layers, unused = _files(name, overlays, real)
    recipe = lay_over(layers, settings, unused_real=unused)
    for _, part in parts_of(recipe.config.environment):
        if isinstance(part, InMemory):  # `offers` may load packages that are not needed to read a recipe
            part.recall(Path(name).parent)
    return recipe


def _with_workflow(overlays: Sequence[str], settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overlays and the settings, where siiRL's setting `dag.workflow_path=FILE` is converted to an overlay."""
    theirs = "dag.workflow_path="
    files = [str(each).removeprefix(theirs) for each in settings if str(each).startswith(theirs)]
    return [*overlays, *files], [each for each in settings if not str(each).startswith(theirs)]


def _files(
    name: str, overlays: Sequence[str], real: bool
) -> tuple[list[tuple[str, Mapping[str, Any]]], bool]:
    """Return the values of the files as layers, and whether one of the files has unused values for a pretrained model."""
    layers: list[tuple[str, Mapping[str, Any]]] = []
    found = False
    for source in (name, *overlays):
        values = _read(source)
        pretrained = values.pop(REAL, None)
        layers.append((source, values))
        if pretrained is None:
            continue
        if not isinstance(pretrained, Mapping):
            raise ConfigError(f"`{REAL}` of recipe '{source}' is not a mapping of sections.")
        found = True
        if real:
            layers.append((f"{source} --{REAL}", pretrained))
    if real and not found:
        raise ConfigError(
            f"Recipe '{name}' has no section `{REAL}`, which --{REAL} needs. Add the section, or remove --{REAL}."
        )
    return layers, found and not real


def lay_over(
    layers: Layers,
    settings: Sequence[str] = (),
    *,
    unused_real: bool = False,
) -> Recipe:
    """Merge named mappings and then settings, and check every key, as in `load_recipe`.

    The argument `unused_real` states whether there are values for a pretrained model that are not among the layers.
    """
    merged, origin = _layered(layers, settings)
    if merged.get("stages") is not None:
        raise ConfigError(
            f"Recipe '{layers[0][0]}' has stages, but a single run is needed here. Train the recipe, then "
            "give the folder of a stage: RUN/01-NAME."
        )
    merged.pop("stages", None)
    return _resolved(merged, origin, layers, _own(layers[0], merged), unused_real)


def _own(first: tuple[str, Mapping[str, Any]], merged: Mapping[str, Any]) -> frozenset[str]:
    """Return the origins that belong to the recipe itself.

    The result is empty for the resolved settings of a run, which have every section.
    """
    source, values = first
    if values.keys() >= RESOLVED:
        return frozenset()
    names = [stage.get("name") for stage in merged.get("stages") or () if isinstance(stage, Mapping)]
    return frozenset({source, *(f"stage '{name}'" for name in names)})


def load_stages(
    name: str, overlays: Sequence[str] = (), settings: Sequence[str] = (), *, real: bool = False
) -> tuple[tuple[str, Recipe], ...]:
    """Return the `stages` of a recipe: for each stage, the recipe with the sections of the stage merged over it.

    The result is empty if the recipe has no stages.
    Settings apply to every stage, while `stages.0.key=value` or `stages.NAME.key=value` applies to a single stage. All
    other behaviour is the same as in `load_recipe`.
    """
    overlays, settings = _with_workflow(overlays, settings)
    layers, unused = _files(name, overlays, real)
    merged, origin = _layered(layers, settings)
    own = _own(layers[0], merged)
    stages = merged.pop("stages", None)
    if stages is None:
        return ()
    _check_stages(name, stages)
    given = {key: source for key, source in origin.items() if key.startswith("stages.")}
    origin = {key: source for key, source in origin.items() if key not in given}
    found = []
    for number, stage in enumerate(stages):
        own_values, own_origin = deepcopy(merged), dict(origin)
        stage_source = f"stage '{stage['name']}'"
        merge(own_values, {k: v for k, v in stage.items() if k != "name"}, stage_source, own_origin)
        for key, source in given.items():  # sources other than the recipe that set a value of this stage
            place = key.removeprefix(f"stages.{number}.")
            if source not in own and source != layers[0][0] and own_origin.get(place) == stage_source:
                own_origin[place] = source
        for setting in settings:
            if not setting.startswith("stages."):
                merge(own_values, parse_setting(setting), COMMAND_LINE, own_origin)
        resolved = stage.keys() >= RESOLVED
        by = frozenset[str]() if resolved else own
        found.append(
            (stage["name"], _resolved(own_values, own_origin, [*layers, (stage_source, stage)], by, unused))
        )
    return tuple(found)


def _check_stages(recipe: str, stages: Any) -> None:
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, Mapping) for stage in stages):
        raise ConfigError(
            f"`stages` of recipe '{recipe}' is not a list of stages. Write `stages: [{{name: …}}]`."
        )
    names = [stage.get("name") for stage in stages]
    for number, name in enumerate(names):
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise ConfigError(
                f"Stage {number} of recipe '{recipe}' is named {name!r}. Use letters, digits and _."
            )
        if name in names[:number]:
            raise ConfigError(f"Recipe '{recipe}' has two stages named '{name}'. Rename one of them.")


def _layered(layers: Layers, settings: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge the layers and then the settings, and return the result with a mapping from each dotted key to its origin."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    fitted = workflow_files().fitted
    for source, values in layers:
        merge(merged, fitted(values, merged), source, origin)
    for setting in settings:
        merge(merged, fitted(parse_setting(setting), merged), COMMAND_LINE, origin)
    return merged, origin


def _resolved(
    merged: dict[str, Any], origin: dict[str, str], layers: Layers, own: frozenset[str], unused_real: bool
) -> Recipe:
    """Return the recipe with the merged values. The argument `layers` contains the layers that were merged, in order."""
    reading = read_aliases(merged, origin, [source for source, _ in layers], SECTIONS)
    notes = reading.notes
    notes += without_own_warmup(merged, origin, own)
    path = _path(merged)
    if unused_real and path != "embedded":
        note = f"model: these learning rates and lengths are for the embedded model, not for {path}"
        notes += (f"{note}; add --{REAL} for this recipe's values for a pretrained one.",)
    with reading.explained():
        config = resolve(merged, origin, reading.faults)
    dump = config.model_dump(mode="json")
    # A teacher that is set once for all policies is resolved to a folder for each policy.
    teacher = origin.get("algorithm.teacher", "default")
    found = {
        key: origin.get(key, teacher if key.startswith("algorithm.teacher.") else "default")
        for key in leaves(dump)
    }
    # A null that resets a section to its defaults does not count as a value.
    for key in origin:
        if key in found and _value_at(merged, key) is None and _value_at(dump, key) is not None:
            found[key] = "default"
    return Recipe(config, found, notes, reading)


def _value_at(values: Any, key: str) -> Any:
    """Return the value at a dotted key, or None if there is no such value."""
    for part in key.split("."):
        if isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            values = values.get(part) if isinstance(values, Mapping) else None
    return values


def from_keywords(
    sections: dict[str, Any],
    unknown: Callable[[Iterable[str]], Mapping[str, ConfigError]],
    less: Collection[str] = (),
) -> Recipe:
    """Resolve sections that were given as keyword arguments of a call. The origin of every value in these sections is `argument NAME`.

    The function `unknown` returns errors about unknown keywords, after names from other libraries have been replaced in
    `sections`. Names from other libraries take precedence over the settings in `less`.
    """
    reading = read_aliases(sections, dict.fromkeys(less, DERIVED[0]), (DERIVED[0], ""), SECTIONS)
    faults = unknown(sections)
    with reading.explained():
        config = resolve(without(sections, faults), None, [*faults.values(), *reading.faults])
    theirs = {key: f"argument {name}" for key, name in reading.by.items()}
    return Recipe(config, laid_origin(given_origin(config, sections), theirs), reading.notes, reading)


DERIVED = ("default", "number of agents", "no eval_dataset")
"""The origins of settings that a call derives automatically."""


def derived(origin: Mapping[str, str]) -> list[str]:
    """Return the settings whose origin is one of `DERIVED`."""
    return [setting for setting, source in origin.items() if source in DERIVED]


def given_origin(
    config: RunConfig, given: Mapping[str, Any] | Settings, argument: str = ""
) -> dict[str, str]:
    """Return the origin of every value of `config`.

    The origin is the `argument` (by default, the section of the value) if `given` sets the value, and otherwise
    `default`.
    """
    found = {}
    for key in leaves(config.model_dump(mode="json")):
        parts = key.split(".")
        found[key] = f"argument {argument or parts[0]}" if _is_set(given, parts) else "default"
    return found


def laid_origin(origin: Mapping[str, str], over: Mapping[str, str]) -> dict[str, str]:
    """Return the origins, where `over` replaces the origins of its settings and of all settings below them, except defaults."""
    found = dict(origin)
    for setting, source in over.items():
        found |= {
            key: source
            for key, before in found.items()
            if before != "default" and (key == setting or key.startswith(f"{setting}."))
        }
    return found


def _is_set(given: Any, parts: Sequence[str]) -> bool:
    """Return whether values contain a setting, either as a key of a dictionary or as an argument that was passed to a `Settings` class."""
    for part in parts:
        if isinstance(given, Settings):
            if part != "name" and part not in given.model_fields_set:
                return False
            given = getattr(given, part, None)
        elif isinstance(given, Mapping):
            if part not in given:
                return False
            given = given[part]
        elif isinstance(given, list | tuple) and part.isdigit() and int(part) < len(given):
            given = given[int(part)]
        else:
            return True  # a short form, such as a number of agents
    return True


def resolve(
    values: Mapping[str, Any], origin: Mapping[str, str] | None = None, known: Collection[ConfigError] = ()
) -> RunConfig:
    """Validate nested values as a run. Raises one ConfigError with all errors, including the errors in `known`.

    If a mapping that cannot be null is set to null, it is reset to its defaults.
    """
    origin = origin or {}
    unknown = unknown_sections(values, origin)
    faults = [*known, *unknown.values()]
    values = without(values, unknown)
    for section, name in DEFAULTS.items():
        given = values.get(section) or {}
        if isinstance(given, Mapping):
            values = {**values, section: {"name": name, **given}}
    built: dict[str, Settings] = {}
    missing = [section for section in SECTIONS if _is_missing(values.get(section))]
    before = len(faults)
    for section in [section for section in SECTIONS if section not in missing]:
        try:
            made = _section(section, values, origin, faults)
        except ConfigError as error:
            faults.append(error)
        else:
            built |= {} if made is None else {section: made}
    meant = any(f"'{section}'" in str(each) for section in missing for each in faults[:before])
    if missing and not meant and len(faults) == before:
        faults.append(_without_sections(missing, origin))
    # Empty settings replace an invalid section, so that the other sections are checked too.
    sections = {section: built.get(section, Settings()) for section in SECTIONS}
    config = _validated(RunConfig, {**values, **sections}, origin, faults)
    raise_all(faults)
    assert config is not None, "if there are no faults, there are settings"
    return _with_folders(config)


def _is_missing(given: object) -> bool:
    """Return whether the section of a plug-in lacks the name of the plug-in's class."""
    return given is None or (isinstance(given, Mapping) and given.get("name") is None)


def _without_sections(missing: Sequence[str], origin: Mapping[str, str]) -> ConfigError:
    recipe = f"Recipe '{origin['name']}'" if "name" in origin else "The recipe"
    more = "".join(f" Add `{section}: {{name: …}}` too." for section in missing[1:])
    return ConfigError(f"{recipe} has no `{missing[0]}.name`. Add `{missing[0]}: {{name: …}}`.{more}")


def _with_folders(config: RunConfig) -> RunConfig:
    """Return the settings with runs replaced by folders where they specify past selves or teachers.

    A folder identifies a fixed checkpoint, whereas the newest checkpoint of a run may change.
    """
    team, algorithm = config.team, config.algorithm
    if isinstance(team.agents, tuple):
        agents = tuple(map(_with_folder, team.agents))
        if agents != team.agents:
            config = config.model_copy(update={"team": team.model_copy(update={"agents": agents})})
    if isinstance(algorithm, Taught):
        named = algorithm.teacher
        if isinstance(named, str) and names_a_run(named):
            named = dict.fromkeys(build_team(config, build_algorithm(config)).trained, named)
        if isinstance(named, dict):
            folders = {
                policy: str(weights_of(policy, source, "algorithm.teacher"))
                if names_a_run(source)
                else source
                for policy, source in named.items()
            }
            config = config.model_copy(
                update={"algorithm": config.algorithm.model_copy(update={"teacher": folders})}
            )
    return config


def _with_folder(agent: AgentConfig) -> AgentConfig:
    if not (isinstance(agent.weights, PastAdapter) and names_a_run(agent.weights.past)):
        return agent
    past = str(weights_of(agent.name, agent.weights.past, "weights.past"))
    return agent.model_copy(update={"weights": PastAdapter(past=past)})


def _section(
    section: str, values: Mapping[str, Any], origin: Mapping[str, str], faults: list[ConfigError]
) -> Settings | None:
    given = values.get(section)
    if isinstance(given, Settings):
        check_class(section, type(given).__name__, type(given))
        return given
    if isinstance(given, str):
        SECTIONS[section](given)  # raises an error for an unknown name
        raise ConfigError(
            f"`{section}` is a section, and '{given}' is a `name` in it. Write `{section}: {{name: "
            f"{given}}}`, or {section}.name={given}."
        )
    if isinstance(given, type):
        raise ConfigError(f"`{section}` is a class. Pass an instance: {section}={given.__name__}(…).")
    if not isinstance(given, Mapping):
        raise ConfigError(f"`{section}` is {given!r}, but must be a section. Write `{section}: {{name: …}}`.")
    found = SECTIONS[section](str(given["name"]))
    check_class(section, str(given["name"]), found)
    kind = timed(found, section) if section in ("environment", "engine") else found
    return _validated(kind, given, origin, faults, section)


def _validated(
    model: type[M],
    values: Mapping[str, Any],
    origin: Mapping[str, str],
    faults: list[ConfigError],
    at: str = "",
) -> M | None:
    """Return the settings created from values. If the values are invalid, the errors are added to `faults` and None is returned."""
    try:
        return checked(model, values, origin, faults, at)
    except Exception as error:
        if model.__module__.startswith("kapelle."):
            raise
        raise ConfigError(
            f"`{at}` cannot be created: {model.__name__} raises {reason(error)}. Remove its `__init__`, or "
            "pass the arguments on to the parent class."
        ) from error


def _read(source: str) -> dict[str, Any]:
    """Read the values of a built-in recipe or of a file."""
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"The recipe is {source!r:.40}. Give the name of a built-in recipe, or a YAML file."
        )
    path, source = Path(source), str(source)
    recipes = builtin_recipes()
    name = path.stem if source == f"recipes/{path.stem}.yaml" else source
    if name in recipes and not path.is_file():
        text = recipes[name]
    elif path.suffix in {".yaml", ".yml"} or (path.is_file() and path.suffix not in DATA_FILES):
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"Recipe file {source} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"Recipe file {source} is not UTF-8 text: {error.reason} at byte {error.start:,}."
            ) from None
    else:
        raise no_recipe(source, recipes)
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"Recipe {source} is not valid YAML: {error}") from None
    if values is None:
        raise ConfigError(
            f"Recipe {source} is empty. Copy another recipe: `kapelle recipes cp demo mine.yaml`."
        )
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else f"the plain value {str(values)[:60]!r}"
        raise ConfigError(
            f"Recipe {source} is not a mapping of sections (`training: {{steps: 9}}`) but {kind}."
        )
    reader = workflow_files()
    return dict(reader.read_workflow(values, source).sections) if reader.is_workflow_file(values) else values
