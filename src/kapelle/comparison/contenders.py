"""Defines the contenders of a comparison (the recipe with each algorithm) and the runs of all seeds.

Settings that the recipe sets for its own algorithm, and always the group size, apply to every contender that has these
settings. These settings are shared because a shared reward or a penalty belongs to the task as well as to the
algorithm. For all other settings, the defaults of the contender apply. Only training settings may be set for a single
contender. The tasks, steps, sampling and model are the same for all contenders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.algorithm import Algorithm, algorithm_class
from kapelle.errors import ConfigError, KapelleError, RunDirectoryError, did_you_mean
from kapelle.runs.reader import is_run, planned_steps, read_config, read_status
from kapelle.settings.overlays import nested, parse_yaml
from kapelle.settings.weights import NAME
from kapelle.setup.preparation import prepare
from kapelle.setup.recipe import Recipe, lay_over
from kapelle.setup.team_builder import build_algorithm
from kapelle.training.provenance import changed_settings
from kapelle.training.stages import check_weights

if TYPE_CHECKING:
    from kapelle.settings.base import Settings

OWN = ("algorithm", "optimizer", "team.sharing", "team.lora", "team.critic_sharing", "team.critic_lora")
"""The settings that may be set for a single contender."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An algorithm with its settings, and its label in tables."""

    label: str
    recipe: Recipe

    @property
    def algorithm(self) -> str:
        """The name of the contender's algorithm."""
        return self.build().name

    def build(self) -> Algorithm:
        """Build the algorithm object of the contender."""
        return build_algorithm(self.recipe.config)


@dataclass(frozen=True, slots=True)
class Run:
    """A run of one contender with one seed."""

    label: str
    """The label of the contender in `--algorithms`."""
    recipe: Recipe
    """The recipe of the contender with the seed of this run."""
    path: Path
    """The run directory inside the folder of the comparison."""

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.recipe.config.seed

    @property
    def steps(self) -> int:
        """The number of training steps. If epochs are set, the number is the one that the run has computed."""
        return planned_steps(self.path, self.recipe.config)

    @property
    def error_file(self) -> Path:
        """The file that contains the reason for a failure."""
        return self.path.with_name(f"{self.path.name}.error.txt")

    @property
    def done(self) -> bool:
        """Whether the run has finished all steps and the evaluation."""
        if not is_run(self.path):
            return False
        status = read_status(self.path)
        return status.state == "finished" and status.step >= self.steps


def read_contenders(
    recipe: Recipe, algorithms: Sequence[str], own: Sequence[tuple[str, Mapping[str, Any]]] = ()
) -> tuple[Contender, ...]:
    """Return the contenders listed in `algorithms` as `NAME` or `LABEL=NAME`, and check that each contender can run.

    The argument `own` contains pairs of a label and nested settings for a single contender. Raises ConfigError with a
    message that names the contender.
    """
    named = [entry.partition("=")[::2] if "=" in entry else (entry, entry) for entry in algorithms]
    labels = [label for label, _ in named]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"'{label}' is listed twice. Write LABEL={label} to rename one of them.")
    for label, _ in own:
        if label not in labels:
            raise ConfigError(
                f"--set contains '{label}', which is not among the algorithms.{did_you_mean(label, labels)}"
            )
    if not recipe.config.evaluation.before_and_after:
        raise ConfigError(
            "A comparison needs the evaluation after training. Set `evaluation.before_and_after=true`."
        )
    found = tuple(
        _contender(recipe, label, name, [values for owner, values in own if owner == label])
        for label, name in named
    )
    for contender in found:
        try:
            _check(contender)
        except KapelleError as error:
            raise ConfigError(f"`{contender.label}` cannot be compared here: {error}") from None
    wanted = build_algorithm(recipe.config).attempts
    for contender in found:
        size = contender.build().attempts
        if size != wanted:
            raise ConfigError(
                f"`{contender.label}` has {size} episodes per task, but the recipe has {wanted}, and all "
                "algorithms must have the same number. Set `algorithm.group_size` for all of them."
            )
    return found


def plan(contenders: Sequence[Contender], seeds: int, folder: Path) -> tuple[Run, ...]:
    """Return all runs of a comparison. The first seed is the seed of the recipe.

    Raises RunDirectoryError if the folder holds other files, or a run with other settings.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "compare.json").is_file():
        raise RunDirectoryError(f"{folder} is not empty, but contains no comparison. Use another --run-dir.")
    runs = tuple(
        Run(c.label, c.recipe.with_seed(seed), folder / c.label / f"seed-{seed}")
        for c in contenders
        for seed in range(c.recipe.config.seed, c.recipe.config.seed + seeds)
    )
    for run in runs:
        if is_run(run.path):
            changed = changed_settings(read_config(run.path), run.recipe.yaml())
            if changed:
                raise RunDirectoryError(
                    f"{run.path} was trained with different settings: {changed[0]}. Use another --run-dir, or "
                    "delete this run."
                )
    return runs


def read_own(words: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the settings for single contenders from `LABEL:key.path=value` or a YAML file of the form `LABEL: {section: …}`.

    Raises ConfigError for any other form, and for settings that apply to all contenders.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for word in words:
        if word.endswith((".yaml", ".yml")):
            try:
                values = parse_yaml(Path(word).read_text("utf-8"))
            except (OSError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise ConfigError(f"The settings file {word} cannot be read: {reason}") from None
            if not isinstance(values, dict) or not all(isinstance(each, dict) for each in values.values()):
                raise ConfigError(
                    f"{word} is not a mapping of algorithms to settings. Write `qmix: {{algorithm: {{…}}}}`."
                )
            found += [(str(label), each) for label, each in values.items()]
            continue
        label, colon, setting = word.partition(":")
        key, equals, raw = setting.partition("=")
        if not (colon and equals and label and key):
            raise ConfigError(
                f"'{word}' is not a setting for one algorithm. Write --set NAME:key.path=value, for example --set qmix:algorithm.fit.lr=1e-3, "
                "or pass a YAML file."
            )
        found.append((label, nested(key, raw, word)))
    for label, values in found:
        for key in _paths(values):
            if not any(key == own or key.startswith(f"{own}.") for own in OWN):
                raise ConfigError(
                    f"`{key}` cannot be set for '{label}' alone, because all algorithms must have the same "
                    f"tasks and number of episodes. Set it for all, without '{label}:'. Only these settings "
                    f"can be set for a single algorithm: {', '.join(OWN)}."
                )
    return found


def _contender(recipe: Recipe, label: str, name: str, own: Sequence[Mapping[str, Any]]) -> Contender:
    if not re.fullmatch(NAME, label):
        raise ConfigError(f"'{label}' is not a valid label. Use letters, digits and _.")
    kind: type[Settings] = algorithm_class(name)
    base = recipe.config.model_dump(mode="json")
    section = {"name": name, **_carried(recipe, kind)}
    layers = [("recipe", base), (f"comparison, {label}", {"algorithm": section})]
    try:
        laid = lay_over([*layers, *((f"--set {label}", values) for values in own)])
    except ConfigError as error:
        raise ConfigError(
            f"`{label}` cannot be compared here: {error} The algorithm settings in the recipe also apply to "
            f"`{label}`: set `algorithm.…` for all algorithms, or use --set {label}:algorithm.key=value for "
            "this one."
        ) from None
    origin = {
        key: recipe.origin.get(key, "default") if source == "recipe" else source
        for key, source in laid.origin.items()
    }
    return Contender(label, Recipe(laid.config, origin))


def _carried(recipe: Recipe, kind: type[Settings]) -> dict[str, Any]:
    """Return the group size and the settings of the recipe's algorithm that another algorithm has too."""
    values = recipe.config.algorithm.model_dump(mode="json")
    if values["name"] == kind.model_fields["name"].default:
        return {key: value for key, value in values.items() if key != "name"}
    carried: dict[str, Any] = {}
    given = [key for key, source in recipe.origin.items() if source != "default"]
    for key in (*given, "algorithm.group_size"):
        section, *path = key.split(".")
        if section != "algorithm" or not path or path[0] == "name" or path[0] not in kind.model_fields:
            continue
        value: Any = values
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        into = carried
        for part in path[:-1]:
            into = into.setdefault(part, {})
        if value is not None:
            into[path[-1]] = value
    return carried


def _check(contender: Contender) -> None:
    algorithm = contender.build()
    if not algorithm.collects_episodes:
        raise ConfigError(
            f"it does not sample completions, so it cannot use the same number of tokens. "
            f"Use `kapelle train` with `algorithm.name={algorithm.name}`."
        )
    check_weights(prepare(contender.recipe.config))


def _paths(value: Any, at: str = "") -> list[str]:
    if isinstance(value, Mapping) and value:
        return [
            leaf for key, item in value.items() for leaf in _paths(item, f"{at}.{key}" if at else str(key))
        ]
    return [at]
