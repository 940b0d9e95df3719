"""Reads settings under the names that other libraries use; for example, TRL's `learning_rate` is read as `optimizer.lr`.

The file `aliases.toml` lists the names from other libraries and the corresponding names of kapelle. The function
`read_aliases` replaces these names in the merged settings of a recipe, the command line or a call in Python. The names
are replaced after merging, because the conversions need other settings. For example, TRL's
`per_device_train_batch_size` counts completions and is converted to a number of tasks. The page
docs/coming_from/names.md is generated from `aliases.toml`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kapelle.errors import EACH, ConfigError, did_you_mean
from kapelle.settings import alias_conversions
from kapelle.settings.alias_conversions import NOTHING, PartialRun
from kapelle.settings.base import Settings
from kapelle.settings.overlays import COMMAND_LINE, PLUGGED, forget_origin, leaves, merge
from kapelle.settings.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Alias:
    """The name of a setting in another library; the fields are described in `aliases.toml`."""

    name: str
    ours: tuple[str, ...]
    library: str
    says: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)
    unsupported: str | None = None
    optional: bool | Collection[str] = ()
    convert: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, value: Any, run: PartialRun) -> Mapping[str, Any]:
        """Convert a value to settings under kapelle's names. Raises ValueError if the value has no counterpart in kapelle."""
        word, absent = _word(value), bool(self.ours) and run.lacks(*self.ours)
        optional = self.optional if isinstance(self.optional, bool) else word in self.optional
        if absent and (optional or value is None):
            return {}
        if word in self.words:
            found = self.words[word]
            found = found if isinstance(found, Mapping) else {run.first(*self.ours): found}
            return {path: _copied(each, run) for path, each in found.items()}
        if self.unsupported is not None:
            if set(self.words) == {"null"}:
                raise ValueError(self.unsupported)
            reason = f". {self.unsupported}" if self.unsupported else ""
            raise ValueError(f"{value!r} is not supported; supported: {', '.join(self.words)}{reason}")
        if value is None and not (self.ours and run.takes_null(run.first(*self.ours))):
            return {}
        if self.convert:
            found = getattr(alias_conversions, self.convert)(value, run, self.name, **self.options)
            return dict(found)
        return {run.first(*self.ours): value} if self.ours else {}


def _word(value: Any) -> str:
    """Return a value as it is written in the field `words` of `aliases.toml`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        return f"{float(value):g}"  # YAML reads `1e-5` as a string
    except (TypeError, ValueError):
        return str(value).lower()


def _copied(value: Any, run: PartialRun) -> Any:
    if isinstance(value, str) and value.startswith("="):
        return run.value(value[1:])
    return None if value == "null" else value


def _read_table() -> Iterator[Alias]:
    """Yield all rows of the table in order. The conversion of a row uses values that earlier rows have set."""
    for library, kinds in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items():
        for name, ours in _flat(kinds.get("same", {})):
            path, *unset = [ours] if isinstance(ours, str) else ours
            yield Alias(name, (path,), library, optional=[*map(_word, unset)])
        for row in kinds.get("converted", ()):
            fields = {"ours": (), "library": library, **row}
            fields["says"] = fields.pop("how", "")
            fields["optional"] = row.get("optional") is True or [*map(_word, row.get("optional", ()))]
            for name in fields.pop("names", None) or [row["name"]]:
                yield Alias(**{**fields, "name": name})
        for reason, names in kinds.get("ignored", {}).items():
            yield from (Alias(name, (), library, reason) for name in names)
        for reason, names in kinds.get("unsupported", {}).items():
            for name, values in names.items():
                words: dict[str, dict[str, Any]] = {**{_word(each): {} for each in values}, "null": {}}
                note = f"{', '.join(f'`{each}`' for each in words)} only: {reason}"
                yield Alias(name, (), library, note, words, reason)


def _flat(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


TABLE: tuple[Alias, ...] = tuple(_read_table())
"""All supported names from other libraries."""
ARGUMENTS = {
    "train_dataset": "dataset",
    "dataset_name": "dataset",
    "reward_funcs": "reward",
    "reward_fn": "reward",
    "output_dir": "run_dir",
    "num_agents": "agents",
}
"""Mapping from arguments of TRL's trainers to the arguments of `kapelle.train` that are not settings."""
ROOTS = frozenset(alias.name.partition(".")[0] for alias in TABLE) - RunConfig.model_fields.keys()
"""The first parts of the names from other libraries that are not sections of a run."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A description of how the names from other libraries were interpreted."""

    notes: tuple[str, ...] = ()
    """A one-line note about the names from other libraries; empty if there are no such names."""
    by: Mapping[str, str] = field(default_factory=dict)
    """Mapping from kapelle's name of a setting to the name under which the setting was given."""
    faults: tuple[ConfigError, ...] = ()
    """The errors for names from other libraries that cannot be interpreted."""

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Return a context manager that makes errors about a setting mention the name under which the setting was given."""
        try:
            yield
        except ConfigError as error:
            message = EACH.join(map(self._with_names, str(error).split(EACH)))
            if message == str(error):
                raise
            raise ConfigError(message) from None

    def _with_names(self, message: str) -> str:
        given = [f"`{name}` is read as `{path}`" for path, name in self.by.items() if re.search(rf"[`']{re.escape(path)}\b", message) and name not in message]  # fmt: skip
        return f"{message} ({'; '.join(given)}.)" if given else message


NOTHING_READ = Reading()
"""The result for settings that use only kapelle's names."""


def read_aliases(
    values: dict[str, Any],
    origin: dict[str, str],
    order: Sequence[str],
    kinds: Mapping[str, Callable[[str], type]],
) -> Reading:
    """Replace names from other libraries by kapelle's names in the merged values, in place, and return how they were interpreted.

    The argument `origin` contains the source of each value, and `order` contains the sources from the first to the
    last. The argument `kinds` contains the functions that find the class of a section by its `name`. If one source uses
    another library's name for a setting and another source uses kapelle's name, the later source takes precedence.
    Errors are returned rather than raised, and the values that caused the errors are removed.
    """
    run, by = PartialRun(values, origin, order, kinds), dict[str, str]()
    notes, faults = list[str](), list[ConfigError]()
    # Rows that set the class of a section come first, because the class determines which other names are ours.
    naming = [alias for alias in TABLE if any(path.endswith(".name") for path in alias.ours)]
    for rows in (naming, [alias for alias in TABLE if alias not in naming]):
        for alias in rows:
            _collect(alias, run)
        for alias in rows:
            if alias.name in run.theirs:
                try:
                    notes.append(_read(alias, run, by))
                except ConfigError as error:
                    faults.append(error)
    notes += _adapters(run)
    for root in ROOTS.intersection(values):
        for key in leaves(values[root], root):
            hint = did_you_mean(key, [alias.name for alias in TABLE if alias.name.startswith(f"{root}.")])
            hint = hint if "mean" in hint else " docs/coming_from/names.md lists all names."
            faults.append(ConfigError(f"Unknown key '{key}'{_set_in(run.source_of(key))}.{hint}"))
        del values[root]
    return Reading((", ".join(notes),) if notes else (), by, tuple(faults))


def _adapters(run: PartialRun) -> list[str]:
    """Return a note if settings come from TRL or verl, which train all weights by default, and do not specify the trained weights."""
    chosen = run.set("team.sharing"), run.set("team.lora")
    whole = {"TRL": "`peft_config`", "verl": "`lora_rank`"}
    theirs = [whole[each.library] for each in TABLE if each.name in run.theirs and each.library in whole]
    if not theirs or chosen != (NOTHING, NOTHING) or "weights" in str(run.set("team.agents")):
        return []
    return [f"adapters train by default (without {theirs[0]} it is all weights there: `team.sharing: shared`)"]  # fmt: skip


def _collect(alias: Alias, run: PartialRun) -> None:
    """Move a value under another library's name from `run.values` to `run.theirs`, unless the name is also a setting of kapelle."""
    keys = [alias.name] if alias.name in run.values else alias.name.split(".")
    if len(keys) > 1 and keys[0] in RunConfig.model_fields and run.has(alias.name, unknown=False):
        return
    value, path = _pop(run.values, keys), ".".join(keys)
    if value is not NOTHING:
        run.theirs[alias.name], run.sources[alias.name] = value, run.source_of(path)
        forget_origin(run.origin, path)


def _pop(values: Any, keys: Sequence[str]) -> Any:
    """Remove a nested value, and the mappings that become empty, and return the value, or `NOTHING` if there is no such value."""
    if not isinstance(values, dict) or keys[0] not in values:
        return NOTHING
    if len(keys) == 1:
        return values.pop(keys[0])
    found = _pop(values[keys[0]], keys[1:])
    if found is not NOTHING and not values[keys[0]]:
        del values[keys[0]]
    return found


def _read(alias: Alias, run: PartialRun, by: dict[str, str]) -> str:
    """Set the settings that correspond to an alias, and return how the alias was interpreted."""
    value, source = run.theirs[alias.name], run.sources[alias.name]
    try:
        found = alias.settings(value, run)
        if "algorithm.name" not in found:
            found = {run.first(path) if path.startswith("algorithm.") else path: each for path, each in found.items()}  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"`{alias.name}` ({alias.library}{_set_in(source)}) cannot be read: {error}.") from None  # fmt: skip
    read = []
    for path, wanted in found.items():
        current, holder = run.set(path), run.source_of(path)
        if current is not NOTHING and run.rank(holder) > run.rank(source):
            continue
        if current is not NOTHING and run.rank(holder) == run.rank(source) and _word(current) != _word(wanted):  # fmt: skip
            other = f"`{by[path]}` reads as {current}" if path in by else f"`{path}` is {current}"
            raise ConfigError(f"`{alias.name}: {value}` is read as `{path}: {wanted}`, and {other}{_set_in(source, ', both')}. Remove one.")  # fmt: skip
        _put(path, wanted, source, run)
        by[path] = alias.name
        read.append(path if _word(value) == _word(wanted) else f"{path}={wanted!s:.60}")
    if read:
        return f"{alias.name} is read as {' and '.join(read)}"
    return f"{alias.name} is ignored ({alias.says or 'nothing to set'})"


def _put(path: str, value: Any, source: str, run: PartialRun) -> None:
    """Set a value. A different `name` for a section removes the values that earlier sources set in that section."""
    section, *inner = path.split(".")
    held = run.values.get(section, {})
    if isinstance(held, Settings):
        changed = held.model_dump(exclude_unset=True)
        merge(changed, _nested(inner, value), "", {})
        run.values[section] = type(held).model_validate(changed)
        return
    if inner and not isinstance(held, Mapping):
        return  # a value instead of a section has its own error
    if inner == ["name"] and section in PLUGGED and isinstance(held, dict) and held.get("name") != value:
        for key in [*held]:
            at = f"{section}.{key}"
            if key == "name" or run.rank(run.source_of(at)) < run.rank(source):
                del held[key]
                forget_origin(run.origin, at)
        if held:
            held["name"] = value  # the settings that are merged below belong to the same class
    merge(run.values, {section: _nested(inner, value)}, source, run.origin)


def _nested(keys: Sequence[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def _set_in(source: str, prefix: str = "") -> str:
    return f"{prefix}, {'on the' if source == COMMAND_LINE else 'in'} {source}" if source else ""
