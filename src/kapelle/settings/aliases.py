"""Settings by the names that other libraries have for them: `learning_rate` of TRL is read as `optimizer.lr`.

`TABLE` has every such name, with what it is called here. `read_aliases` replaces them in the settings of a run, in a recipe, on the
command line and in Python alike, when everything that was said is known: a name whose unit differs is converted by what the other
settings say, so that TRL's `per_device_train_batch_size`, which counts completions, becomes the number of tasks that have as many.
What cannot be said here is refused with the reason. docs/coming_from/names.md is made of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kapelle.errors import ConfigError, did_you_mean
from kapelle.runtime.ranks import launched_rank
from kapelle.settings.base import Settings, models_in
from kapelle.settings.overlays import COMMAND_LINE, PLUGGED, merge, replace_origin
from kapelle.settings.schema import RunConfig

Convert = Callable[[Any, "Names"], Mapping[str, Any]]
"""A value under the other library's name, and everything else that was said → values by our names. ValueError says why it cannot be."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A setting's name in another library."""

    name: str
    """Theirs, dotted where they nest it."""
    ours: tuple[str, ...]
    """What it may become here, dotted; empty where it has no counterpart."""
    library: str
    """Whose name it is."""
    convert: Convert
    says: str = ""
    """How a value is converted, or why it is refused or left out."""


DEFAULTS = {"engine": "local", "train_engine": "torch"}
"""Sections that a recipe may leave out, and the `name` that they then get."""


class Names:
    """What was said of a run, by our names and by others, while aliases are read."""

    def __init__(
        self,
        values: dict[str, Any],
        origin: dict[str, str],
        order: Sequence[str],
        kinds: Mapping[str, Callable[[str], type]],
    ) -> None:
        """Take merged values and the source of each, sources in their order, and how the class of a section is found."""
        self.values, self.origin, self._kinds = values, origin, kinds
        self._order = {source: place for place, source in enumerate([*order, COMMAND_LINE])}
        self.theirs: dict[str, Any] = {}
        """Values by names of other libraries."""
        self.sources: dict[str, str] = {}
        """Where each of these was set; empty in Python."""

    def rank(self, source: str) -> int:
        """Return how late a source is laid over the others."""
        return self._order.get(source, 0)

    def source_of(self, path: str) -> str:
        """Return which source set a setting, the last one where several did; empty where none is recorded."""
        found = [by for key, by in self.origin.items() if key == path or key.startswith(f"{path}.")]
        return max(found, key=self.rank, default="")

    def set(self, path: str) -> Any:
        """Return what was set by our name; `NOTHING` where a default holds."""
        at: Any = self.values
        for part in path.split("."):
            if isinstance(at, Settings) and part in at.model_fields_set:
                at = getattr(at, part)
            elif isinstance(at, Mapping) and part in at:
                at = at[part]
            else:
                return NOTHING
        return at

    def value(self, path: str) -> Any:
        """Return a setting of ours as it will hold: what was set, or the default of its class."""
        found = self.set(path)
        if found is not NOTHING:
            return found
        kinds = self._classes(path)
        key = path.rpartition(".")[2]
        return next(
            (each.model_fields[key].get_default() for each in kinds if key in each.model_fields), None
        )

    def has(self, path: str, *, unknown: bool = True) -> bool:
        """Return whether the class of a section has a setting; `unknown` where no class is named."""
        kinds, key = self._classes(path), path.rpartition(".")[2]
        return any(key in each.model_fields for each in kinds) if kinds else unknown

    def first(self, *paths: str) -> str:
        """Return the first of our settings that this run has; ValueError where it has none."""
        for path in paths:
            if self.has(path):
                return path
        section = paths[0].partition(".")[0]
        raise ValueError(
            f"`{section}.name: {self.set(f'{section}.name')}` has no {' and no '.join(f'`{p}`' for p in paths)}"
        )

    def number(self, name: str, default: float = 1) -> float:
        """Return a number by another library's name."""
        return number(self.theirs.get(name, default), name)

    def _classes(self, path: str) -> list[type[Settings]]:
        """Return the classes of settings that hold a path's last part; none where a section's `name` is missing."""
        section, *inner = path.split(".")
        if not inner:
            return [RunConfig]
        if section in self._kinds:
            given = self.values.get(section)
            name = self.set(f"{section}.name")
            name = DEFAULTS.get(section) if name is NOTHING else name
            if isinstance(given, Settings):
                kinds = [type(given)]
            elif isinstance(name, str):
                found = self._kinds[section](name)
                kinds = [found] if issubclass(found, Settings) else []
            else:
                return []
        else:
            kinds = models_in(RunConfig.model_fields[section].annotation)
        for part in inner[:-1]:
            fields = [each.model_fields[part].annotation for each in kinds if part in each.model_fields]
            kinds = [model for annotation in fields for model in models_in(annotation)]
            if not kinds:
                return [Settings]
        return kinds


NOTHING: Any = object()


def number(value: Any, name: str) -> float:
    """Return a number that YAML may have read as text (`1e-5`); ValueError for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` cannot be {value!r}: write a number") from None


# -------- Conversions


def _is(*paths: str) -> Convert:
    """The same value, under the first of these names that the run's algorithm, environment or workflow has."""
    return lambda value, names: {names.first(*paths): value}


def _one_of(path: str, words: Mapping[Any, Any], instead: str = "") -> Convert:
    """Another word for the same thing."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        key = value.lower() if isinstance(value, str) else value
        if not isinstance(key, str | bool | int | None) or key not in words:
            listed = ", ".join(str(each) for each in words)
            raise ValueError(f"{value!r} has no counterpart here; of theirs these have: {listed}{instead}")
        found = words[key]
        if isinstance(found, Mapping):
            return found
        return {names.first(path): found}

    return convert


def _unless(path: str, *nothing: Any, becomes: Any = NOTHING) -> Convert:
    """The same value; those that mean "not set" there are left out, or become something."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        if any(value is each or (each is not None and value == each) for each in nothing):
            return {} if becomes is NOTHING else {names.first(path): becomes}
        return {names.first(path): value}

    return convert


def _left_out(value: Any, names: Names) -> Mapping[str, Any]:
    return {}


def _refused(why: str) -> Convert:
    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        raise ValueError(why)

    return convert


def _updates(names: Names) -> float:
    """Return the optimiser steps in one step of ours."""
    epochs, parts = names.value("algorithm.epochs"), names.value("algorithm.minibatches")
    return number(epochs or 1, "algorithm.epochs") * number(parts or 1, "algorithm.minibatches")


def _group(names: Names) -> float:
    """Return the completions of one task that a library counts one by one: a pair of DPO and a row of SFT count once."""
    if names.value("algorithm.name") in ("dpo", "sft"):
        return 1
    return number(names.value("algorithm.group_size") or 1, "algorithm.group_size")


def _whole(count: float, of: str, by: str) -> int:
    if count != int(count) or count < 1:
        raise ValueError(f"{of} are {count:g} {by}; give numbers that make it whole")
    return int(count)


def _completions(value: Any, names: Names) -> Mapping[str, Any]:
    """Return the tasks of a step, from completions per device, devices and accumulated batches."""
    started = launched_rank()
    ranks = 1 if started is None else started.size
    accumulated = names.number("gradient_accumulation_steps")
    batches = names.number("steps_per_generation", accumulated)
    count = number(value, "per_device_train_batch_size") * ranks * batches
    group = _group(names)
    said = f"{count:g} completions of a step ({value} per device × {batches:g} batches × {ranks} processes), {group:g} of each task,"
    tasks = _whole(count / group, said, "tasks")
    return {"training.tasks_per_step": tasks, **_parts(batches / accumulated)}


def _parts(parts: float) -> Mapping[str, Any]:
    return (
        {}
        if parts == 1
        else {"algorithm.minibatches": _whole(parts, "the updates of one generation", "minibatches")}
    )


def _accumulated(value: Any, names: Names) -> Mapping[str, Any]:
    number(value, "gradient_accumulation_steps")
    if "per_device_train_batch_size" in names.theirs:
        return {}  # multiplied there
    raise ValueError(
        "alone it says nothing here, as results do not depend on how a batch is split. Set `training.tasks_per_step`, or "
        "`per_device_train_batch_size` too; `training.microbatch_tokens` bounds memory"
    )


def _generated(value: Any, names: Names) -> Mapping[str, Any]:
    if "per_device_train_batch_size" in names.theirs:
        raise ValueError("`per_device_train_batch_size` says the same; leave one out")
    group = _group(names)
    return {"training.tasks_per_step": _whole(number(value, "generation_batch_size") / group, f"{value} completions, {group:g} of each task,", "tasks")}  # fmt: skip


def _steps(name: str) -> Convert:
    """Optimiser steps → steps of ours, of which each may take several; -1 goes by epochs."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        count, each = number(value, name), _updates(names)
        if count == -1:
            return {}
        if each == 1:
            return {"training.steps": value, **_by_steps(names)}
        said = f"{value} optimiser steps, {each:g} in each step,"
        return {"training.steps": _whole(count / each, said, "steps"), **_by_steps(names)}

    return convert


def _by_steps(names: Names) -> Mapping[str, Any]:
    """Return what lets the number of steps count where a recipe goes by epochs; there too it comes first."""
    return {} if names.set("training.epochs") in (NOTHING, None) else {"training.epochs": None}


def _warmup(name: str) -> Convert:
    """A share of all optimiser steps → their number."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        share = number(value, name)
        if not 0 <= share < 1:
            raise ValueError(f"`{name}` cannot be {value}: it is a share of all steps, from 0 to below 1")
        if share and names.value("training.epochs") is not None:
            raise ValueError(
                "it is a share of all steps, and how many `training.epochs` makes is known when the data is read. Set `optimizer.warmup_steps`"
            )
        steps = number(names.value("training.steps"), "training.steps") * _updates(names)
        return {"optimizer.warmup_steps": math.ceil(share * steps)}

    return convert


def _betas(place: int) -> Convert:
    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        first, second = names.value("optimizer.betas")
        first = names.theirs.get("adam_beta1", first)
        return {"optimizer.betas": [first, names.theirs.get("adam_beta2", second)]}

    return convert


def _clip(name: str, upper: str) -> Convert:
    """One bound for both sides, unless the upper one has its own."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        low, high = names.first("algorithm.loss.clip_low"), names.first("algorithm.loss.clip_high")
        return {low: value} if names.theirs.get(upper) is not None else {low: value, high: value}

    return convert


def _trackers(silent: Sequence[str]) -> Convert:
    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        known = ("tensorboard", "wandb", "mlflow", "trackio")
        asked = [value] if isinstance(value, str) else list(value or ())
        kept = [each for each in asked if each not in silent]
        for each in kept:
            if each not in known:
                raise ValueError(f"{each!r} is no tracker of kapelle.{did_you_mean(str(each), known)}")
        project = names.theirs.get("trainer.project_name")
        more = {} if project is None else {"project": project}
        return {"trackers": [{"name": each, **more} for each in kept]}

    return convert


def _loss_type(value: Any, names: Names) -> Mapping[str, Any]:
    if names.value("algorithm.name") == "dpo":
        return _one_of("algorithm.kind", {"sigmoid": "dpo", "ipo": "ipo"})(value, names)
    at = "algorithm.loss"
    kinds: dict[Any, Any] = {
        "dapo": {f"{at}.aggregation": "token_mean"},
        "bnpo": {f"{at}.aggregation": "token_mean"},
        "grpo": {f"{at}.aggregation": "sequence_mean"},
        "cispo": {f"{at}.kind": "cispo"},
        "sapo": {f"{at}.kind": "sapo", f"{at}.aggregation": "sequence_mean"},
    }
    if value == "dr_grpo":
        length = names.value("team.sampling.max_tokens")
        kinds["dr_grpo"] = {f"{at}.aggregation": "sequence_sum", f"{at}.constant": length}
    names.first(f"{at}.aggregation")
    return _one_of(f"{at}.aggregation", kinds)(value, names)


def _kl(coefficient: str, switch: str, default: float) -> Convert:
    """A coefficient that counts only where a switch is on."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        path = names.first("algorithm.loss.kl_coefficient")
        if not names.theirs.get(switch, False):
            return {path: 0.0}
        return {path: names.theirs.get(coefficient, default)}

    return convert


def _kl_in_reward(value: Any, names: Names) -> Mapping[str, Any]:
    path = names.first("algorithm.gae.kl_in_reward", "algorithm.kl_in_reward")
    if not names.theirs.get("algorithm.use_kl_in_reward", False):
        return {path: 0.0}
    return {path: names.theirs.get("algorithm.kl_ctrl.kl_coef", 0.001)}


def _minibatches(value: Any, names: Names) -> Mapping[str, Any]:
    tasks, size = (
        number(names.value("training.tasks_per_step"), "data.train_batch_size"),
        number(value, "ppo_mini_batch_size"),
    )
    if size < 1:
        raise ValueError(f"`ppo_mini_batch_size` cannot be {value}: it is a number of prompts from 1")
    return {"algorithm.minibatches": _whole(tasks / size, f"{tasks:g} tasks of a step in parts of {size:g}", "parts")}  # fmt: skip


def _truth(path: str, yes: Any, no: Any = NOTHING) -> Convert:
    """True becomes a value; false another one, or what holds anyway."""

    def convert(value: Any, names: Names) -> Mapping[str, Any]:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")  # noqa: TRY004 (said to the user as what is wrong with a value)
        chosen = yes if value else no
        return {} if chosen is NOTHING else {names.first(path): chosen}

    return convert


def _vllm_size(value: Any, names: Names) -> Mapping[str, Any]:
    if number(value, "tensor_parallel_size") == 1:
        return {}
    if names.value("engine.name") != "vllm":
        raise ValueError("it is for vLLM: set `engine.name: vllm` too")
    options = names.set("engine.options")
    return {"engine.options": {**({} if options is NOTHING else options), "tensor_parallel_size": int(value)}}


def _lora_rank(value: Any, names: Names) -> Mapping[str, Any]:
    if number(value, "lora_rank") == 0:
        return {"team.sharing": "shared"}
    return {"team.lora.rank": value}


# -------- The table. Rows are read in this order: a conversion sees what the rows above it have set.

_NO_TOP_K = ("no top-k is 0 here", -1, None)
_OURS_ONLY = "processes are started by `--launch torchrun --processes N`, and a recipe does not name them; leave it out"


def _same(library: str, *pairs: tuple[str, str]) -> Iterator[Alias]:
    for name, path in pairs:
        yield Alias(name, (path,), library, _is(path))


def _trl() -> Iterator[Alias]:
    """Names of TRL, and of the transformers arguments that it inherits."""
    yield from _same(
        "TRL",
        ("learning_rate", "optimizer.lr"),
        ("num_generations", "algorithm.group_size"),
        ("max_completion_length", "team.sampling.max_tokens"),
        ("temperature", "team.sampling.temperature"),
        ("top_p", "team.sampling.top_p"),
    )
    yield Alias(
        "beta",
        ("algorithm.loss.kl_coefficient", "algorithm.beta"),
        "TRL",
        _is("algorithm.beta", "algorithm.loss.kl_coefficient"),
        "the penalty's coefficient; of `dpo` its β",
    )


TABLE: tuple[Alias, ...] = (*_trl(),)
"""Every name of another library that is read."""
ROOTS = frozenset(alias.name.partition(".")[0] for alias in TABLE) - RunConfig.model_fields.keys()
"""Keys beside the sections of a run, below which theirs stand."""


# -------- Reading them


def read_aliases(
    values: dict[str, Any],
    origin: dict[str, str],
    order: Sequence[str],
    kinds: Mapping[str, Callable[[str], type]],
) -> tuple[str, ...]:
    """Replace names of other libraries in merged values by ours, in place, and return a line that says so; none without any.

    `origin` has the source of each value, `order` the sources from the first to the last, `kinds` how the class of a section is
    found by its `name`. Of a name and ours the later source counts; ConfigError where one source gives both and they disagree, for
    a value without a counterpart, and for a name below one of theirs that is not known.
    """
    names, by = Names(values, origin, order, kinds), dict[str, str]()
    said = []
    # What names a section's class comes first: by it the others are known to be ours or theirs.
    naming = [alias for alias in TABLE if any(path.endswith(".name") for path in alias.ours)]
    for rows in (naming, [alias for alias in TABLE if alias not in naming]):
        for alias in rows:
            _collect(alias, names)
        said += [_read(alias, names, by) for alias in rows if alias.name in names.theirs]
    return (", ".join(said),) if said else ()


def _collect(alias: Alias, names: Names) -> None:
    """Take a name out of the values, where it stands for a setting of theirs and for none of ours."""
    *above, key = alias.name.split(".")
    at: Any = names.values
    if alias.name in at:
        above, key = [], alias.name
    elif above and above[0] in RunConfig.model_fields and names.has(alias.name, unknown=False):
        return
    passed = []
    for part in above:
        if not isinstance(at, dict) or part not in at:
            return
        passed.append((at, part))
        at = at[part]
    if not isinstance(at, dict) or key not in at:
        return
    path = ".".join([*above, key])
    names.theirs[alias.name], names.sources[alias.name] = at.pop(key), names.source_of(path)
    for place in [each for each in names.origin if each == path or each.startswith(f"{path}.")]:
        del names.origin[place]
    for outer, part in reversed(passed):
        if not outer[part]:
            del outer[part]


def _read(alias: Alias, names: Names, by: dict[str, str]) -> str:
    """Set what an alias stands for; return how it was read."""
    value, source = names.theirs[alias.name], names.sources[alias.name]
    try:
        found = alias.convert(value, names)
    except ValueError as error:
        raise ConfigError(
            f"`{alias.name}` ({alias.library}{_set_in(source)}) cannot be read: {error}."
        ) from None
    read = []
    for path, wanted in found.items():
        current, holder = names.set(path), names.source_of(path)
        if current is not NOTHING and names.rank(holder) > names.rank(source):
            continue  # laid over it later
        same_place = names.rank(holder) == names.rank(source)
        if current is not NOTHING and same_place and not _equal(current, wanted):
            other = f"`{by[path]}` reads as {current}" if path in by else f"`{path}` is {current}"
            raise ConfigError(f"`{alias.name}: {value}` is read as `{path}: {wanted}`, and {other}{_set_in(source, ', both')}. Leave one out.")  # fmt: skip
        _put(path, wanted, source, names)
        by[path] = alias.name
        read.append(path if _equal(value, wanted) else f"{path}={_short(wanted)}")
    return (
        f"{alias.name} is read as {' and '.join(read)}"
        if read
        else f"{alias.name} is left out ({alias.says or 'nothing to set'})"
    )


def _put(path: str, value: Any, source: str, names: Names) -> None:
    """Lay a value over the others; another `name` of a section leaves out what earlier sources said of it."""
    section, *inner = path.split(".")
    held = names.values.get(section)
    if isinstance(held, Settings):
        names.values[section] = _changed(held, inner, value)
        return
    nested: Any = value
    for part in reversed(inner):
        nested = {part: nested}
    if inner == ["name"] and section in PLUGGED and isinstance(held, dict) and held.get("name") != value:
        later = {key: each for key, each in held.items() if key != "name" and names.rank(names.source_of(f"{section}.{key}")) >= names.rank(source)}  # fmt: skip
        sources = {key: names.source_of(f"{section}.{key}") for key in later}
        merge(names.values, {section: nested}, source, names.origin)
        for key, each in later.items():
            names.values[section][key] = each
            replace_origin(names.origin, f"{section}.{key}", each, sources[key])
        return
    if not isinstance(names.values.get(section, {}), Mapping):
        return  # no section: its own message says so
    merge(names.values, {section: nested}, source, names.origin)


def _changed(settings: Settings, inner: Sequence[str], value: Any) -> Settings:
    """Return settings with one of them replaced, however deep."""
    values = settings.model_dump(exclude_unset=True)
    at = values
    for part in inner[:-1]:
        at = at.setdefault(part, {})
    at[inner[-1]] = value
    return type(settings).model_validate(values)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same setting; YAML reads `1e-5` as text."""
    try:
        return bool(one == other) or float(one) == float(other)
    except (TypeError, ValueError):
        return False


def _set_in(source: str, prefix: str = "") -> str:
    return f"{prefix}, {'on the' if source == COMMAND_LINE else 'in'} {source}" if source else ""


def _short(value: Any) -> str:
    return str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}…"
