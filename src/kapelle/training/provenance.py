"""Record what a run depends on besides its config, and report changes when the run is resumed.

Each start and each resume of the run adds a row under `starts` in `provenance.json`:

    {"at": "2026-11-24T10:00:00.000+00:00", "steps": 0,
     "data": {"data/train.jsonl": "3f…"},                    hash of the content
     "weights": {"past adapter 'second' (runs/…)": "9a…"},   adapters and a verifier that a run uses but does not train
     "began_from": {"first (runs/…)": "9a…"},                weights that training started from
     "versions": {"torch": "2.13.0", …},
     "machine": {"threads": 2, "processor": "…", …},
     "excluded": ["train: 1 of 9 tasks have …"]}            excluded tasks and rows, with the reason

A run whose dependencies have changed can still be resumed, because the tasks of a step depend only on its number and the size
of the data. The changes are reported.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from kapelle.algorithms.signals.verifier import VerifierScores
from kapelle.environment import Reads
from kapelle.errors import CheckpointError, ConfigError
from kapelle.models.checksums import listed_files
from kapelle.runs.lock import now
from kapelle.runs.reader import is_run, read_config, read_starts, saved_steps
from kapelle.runs.writer import RunDirectory
from kapelle.runtime.files import content_or_fault, folder_content
from kapelle.runtime.machine import versions_of
from kapelle.runtime.tensors import leaves
from kapelle.settings.base import FREE, MayChange, Settings
from kapelle.settings.overlays import parse_yaml
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import load_recipe, resolve, to_yaml
from kapelle.setup.team_builder import build_algorithm
from kapelle.setup.team_file import is_team, read_team
from kapelle.types import Json

if TYPE_CHECKING:
    from kapelle.team import Team
    from kapelle.training.observer import Observer


PACKAGES = ("kapelle", "torch", "transformers", "tokenizers", "safetensors", "numpy")
_VECTORS = ("avx", "fma", "sse4", "f16c", "amx", "neon", "asimd", "sve", "bf16", "i8mm")
"""The prefixes of processor features that determine which kernels torch selects and therefore how results are rounded."""
_LOUD = ("data", "weights")
_NAMED = 4
"""The maximum number of changed files that are listed individually."""
_DIGITS = 12
_FOLLOWS = {
    "data": "from step {step} on, this run learns from changed data. Start a new run to train only on this data",
    "weights": "from step {step} on, it uses changed weights. Start a new run to use these weights from the beginning",
    "versions": "results may differ from those of a run that was never stopped",
    "machine": "results may differ from those of a run that was never stopped",
}


def note_start(
    run: RunDirectory,
    config: RunConfig,
    team: Team,
    steps: int,
    began_from: Mapping[str, Path],
    observer: Observer,
    excluded: Sequence[str] = (),
    *,
    warns: bool = False,
) -> None:
    """Record the dependencies of a run that starts or continues after `steps` steps. The observer receives a line for each change.

    The function reads all data files. If `warns` is true, changed data or weights also cause a Python warning.
    """
    start = {"at": now(), "steps": steps, **provenance_of(config, team, began_from)}
    start["excluded"] = list(excluded)
    if run.resumed:
        for kind, line in changes(read_starts(run.path), start):
            observer.phase("resume", line)
            if warns and kind in _LOUD:
                warnings.warn(line, stacklevel=3)
    run.record_start(start)


def provenance_of(config: RunConfig, team: Team, began_from: Mapping[str, Path]) -> dict[str, Any]:
    """Return the current dependencies of a run with the given settings, by kind and name."""
    weights = {
        f"past adapter '{policy.name}' ({policy.past})": _weights(Path(policy.past))
        for policy in team.every.values()
        if policy.past is not None
    }
    verifier = build_algorithm(config).need(VerifierScores)
    for folder in verifier.folders.values() if verifier else ():
        weights[f"verifier ({folder})"] = _weights(Path(folder))
    sections = (config.environment, config.workflow)
    return {
        "data": {name: content for section in sections for name, content in _contents(section)},
        "weights": weights,
        "began_from": {f"{name} ({folder})": _weights(folder) for name, folder in began_from.items()},
        "versions": versions(),
        "machine": machine(),
    }


def changes(starts: Sequence[Mapping[str, Any]], start: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the differences from the last start as pairs of a kind and a line with the old value, the new value and the consequence."""
    if not starts:
        lost = "provenance.json records no start of this run, so it is unknown whether data, weights, versions or machine changed"
        return [("unknown", lost)]
    found = []
    for kind, follows in _FOLLOWS.items():
        before, here = starts[-1].get(kind), start[kind]
        if not isinstance(before, Mapping):
            found.append((kind, f"provenance.json does not contain the {kind} of this run"))
            continue
        names = [name for name in dict.fromkeys([*before, *here]) if before.get(name) != here.get(name)]
        if kind == "data" and len(names) > _NAMED:
            more = f"{len(names)} files of the data, such as {names[0]}, have changed"
            found.append((kind, f"{more}: {follows.format(step=start['steps'] + 1)}"))
            continue
        for name in names:
            then, this = _shown(kind, before.get(name)), _shown(kind, here.get(name))
            found.append((kind, f"{name} was {then}, is {this}: {follows.format(step=start['steps'] + 1)}"))
    return found


def _shown(kind: str, value: object) -> str:
    if value is None:
        return "not there"
    return f"content {str(value)[:_DIGITS]}" if kind in ("data", "weights") else str(value)


def _contents(value: object) -> Iterator[tuple[str, str]]:
    """Yield every file that the settings name or declare as an input, with a hash of its content."""
    if isinstance(value, BaseModel):
        if isinstance(value, Reads):
            yield from value.contents().items()
        for _, each in value:
            if isinstance(each, str) and not isinstance(value, Reads):
                yield from _file(each)
            else:
                yield from () if isinstance(each, str) else _contents(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _contents(each)
    elif isinstance(value, str):
        yield from _file(value)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _contents(each)


def _file(text: str) -> Iterator[tuple[str, str]]:
    """Yield the file that a string setting names, if there is one. The form `path/file.py:Class` is supported."""
    file, colon, _ = text.rpartition(":")
    named = file if colon and file.endswith(".py") else text
    try:
        path = Path(named).expanduser()
        if path.is_file():
            yield named, content_or_fault(path)
    except (OSError, ValueError, RuntimeError):
        return


def _weights(folder: Path) -> str:
    """Return a hash of a folder of weights.

    The hash is computed from the folder's list of file hashes or, if there is no list, from its files.
    """
    listed = listed_files(folder)
    if listed is None:
        return folder_content(folder)
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, Json]:
    """Return the versions of the packages on which results depend, and the CUDA version if there is a CUDA device."""
    import torch

    return {**versions_of(PACKAGES), "cuda": torch.version.cuda if torch.cuda.is_available() else None}


def machine() -> dict[str, Json]:
    """Return the properties of the machine and the process on which results depend, such as threads, processor and device."""
    import torch

    device = "cpu"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    model, features = _processor()
    return {
        "threads": torch.get_num_threads(),
        "processor": model,
        "processor features": f"{torch.backends.cpu.get_cpu_capability()}: {features}",
        "device": device,
        "system": f"{sys.platform} {platform.machine()}",
    }


def _processor() -> tuple[str, str]:
    """Return the name of the processor and its features that affect arithmetic."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine(), "not known"
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", fields.get("Features", "")).split()
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, " ".join(sorted(flag for flag in flags if flag.startswith(_VECTORS)))


# -------- Settings that may change when a run is resumed: those marked by `settings.base.FREE` and `FROM_HERE_ON`


def changed_settings(old: str, new: str, allowed: Sequence[MayChange] = (FREE,)) -> list[str]:
    """Return descriptions of the changes from `old` to `new` (both YAML strings) that are not allowed when a run is resumed."""
    config = resolve(parse_yaml(new))
    may = [key for key, mark in changeable(config) if mark in allowed]
    return [
        f"{key} was {before!r} and is {now!r}"
        for key, before, now in _changes(old, new)
        if not _within(key, may)
    ]


def changeable(settings: Settings, at: str = "") -> Iterator[tuple[str, MayChange]]:
    """Yield the dotted key of every setting that may change on resume. A section that may change as a whole is yielded by its own key.

    The argument `at` is the prefix of all keys: the key of `settings` followed by a dot.
    """
    for name, field in type(settings).model_fields.items():
        mark = next((each for each in field.metadata if isinstance(each, MayChange)), None)
        if mark is not None:
            yield f"{at}{name}", mark
        else:
            for place, value in leaves(getattr(settings, name), f"{at}{name}"):
                if isinstance(value, Settings):
                    yield from changeable(value, f"{place}.")


def config_of_run(folder: Path, settings: Sequence[str] = ()) -> RunConfig:
    """Return the settings of a run directory or an exported team, with overrides. Raises CheckpointError for any other folder."""
    if is_team(folder):
        return read_team(folder, settings).config
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"{folder} is not a run directory: it has no config.yaml.")
    return load_recipe(str(folder / "config.yaml"), (), settings).config


def open_run(
    path: Path, config: RunConfig, origin: Mapping[str, str], say: Callable[[str], None], *, resume: bool
) -> RunDirectory:
    """Open a run directory as `RunDirectory.create` does. The function `say` receives a line for each changed setting.

    The recorded origin of a changed setting contains the step of the change and the previous value.
    """
    kept = dict(origin)
    marks = dict(changeable(config))
    if resume and is_run(path):
        step = saved_steps(path)
        for key, before, now in _changes(read_config(path), to_yaml(config)):
            if _within(key, [k for k, mark in marks.items() if mark is not FREE]):
                kept[key] = f"{origin.get(key, 'resumed')} from step {step} on; {before!r} before"
                say(f"{key} was {before!r} and is {now!r} from step {step} on")
    return RunDirectory.create(
        path,
        config=to_yaml(config),
        provenance=kept,
        resume=resume,
        differences=lambda old, new: changed_settings(old, new, tuple(MayChange)),
    )


def _within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _changes(old: str, new: str) -> list[tuple[str, Any, Any]]:
    """Return every key whose value differs, with the old and the new value."""
    before, after = _flat(_whole(old)), _flat(_whole(new))
    return [
        (key, before.get(key), after.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def _whole(text: str) -> dict[str, Any]:
    """Return the settings of a run, including defaults."""
    try:
        values: dict[str, Any] = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"The run's config.yaml is not YAML: {error}. Restore it from a copy.") from None
    try:
        return resolve(values).model_dump(mode="json")
    except ConfigError:  # a plug-in has changed
        return values


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None:
        return {at: value}
    return {k: v for key, item in items for k, v in _flat(item, f"{at}.{key}" if at else str(key)).items()}
