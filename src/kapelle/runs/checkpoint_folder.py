"""Which checkpoints of a run are whole, and which may be deleted; `checkpoint` writes and reads their content.

A checkpoint is whole when its manifest has the form that `checkpoint.save` gives it and names its own step, and when
every file that it lists has the recorded size and SHA-256. A change of any single bit, also in the manifest, is noticed.

Whoever continues from a checkpoint reads all of it for that (`verify`). Pruning, at which a run's ranks wait, asks only whether a
file is still the one whose content was hashed, when it was saved or loaded: the same inode, size and times.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kapelle.errors import CheckpointError
from kapelle.runtime.files import FOLDER, PARTIAL, check_listed, explain, sha256, step_of, unique_keys

FORMAT = 1
SHARED_FORMAT = 2
"""The form of what several processes have written, each a share of the tensors."""


_Stamp = tuple[int, int, int, int, int]
_hashed: dict[Path, dict[str, _Stamp]] = {}
"""What the files of checkpoints were like when this process last knew their content, by the checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A checkpoint that was passed over, and why."""

    folder: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest whole checkpoint, and the newer ones that are not whole."""

    folder: Path | None
    """None when there is no whole checkpoint."""
    rejected: tuple[Rejected, ...]


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the folders of checkpoints, oldest first, without checking whether they are whole."""
    if not checkpoints.is_dir():
        return []
    found = [(match, path) for path in checkpoints.iterdir() if (match := FOLDER.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2] or 1)))]


def newest_valid(checkpoints: Path, check: Callable[[Path], None] | None = None) -> Newest:
    """Find the newest whole checkpoint; newer ones that are damaged are returned with the reason.

    `check` raises CheckpointError for one whose files are intact but whose content cannot be used.
    """
    rejected: list[Rejected] = []
    for folder in reversed(list_checkpoints(checkpoints)):
        try:
            verify(folder)
            if check is not None:
                check(folder)
        except CheckpointError as error:
            rejected.append(Rejected(folder, str(error)))
        else:
            return Newest(folder, tuple(rejected))
    return Newest(None, tuple(rejected))


def newest_listed(checkpoints: Path) -> Path | None:
    """Return the newest checkpoint whose manifest and sizes are right; quick, because no content is read."""
    for folder in reversed(list_checkpoints(checkpoints)):
        try:
            read_manifest(folder)
        except CheckpointError:
            continue
        return folder
    return None


def verify(folder: Path) -> int:
    """Check every file against the manifest and return the step; raises CheckpointError."""
    # Taken before anything is read, so that a change during the reading is noticed by the next call.
    manifest = read_manifest(folder)
    stamps = _stamps(folder, manifest)
    for name, expected in manifest["files"].items():
        try:
            found = sha256(folder / name)
        except OSError as error:
            raise CheckpointError(f"Checkpoint {folder} cannot be read: {name}: {error.strerror}.") from error
        if found != expected["sha256"]:
            raise CheckpointError(f"Checkpoint {folder} is damaged: the content of {name} has changed.")
    _hashed[folder.absolute()] = stamps
    return int(manifest["step"])


def remember(folder: Path) -> None:
    """Take note that a checkpoint was just written, by this process or its ranks, and holds what its manifest says."""
    with suppress(CheckpointError):  # the next call reads it then
        _hashed[folder.absolute()] = _stamps(folder, read_manifest(folder))


def _stamps(folder: Path, manifest: Mapping[str, Any]) -> dict[str, _Stamp]:
    """Return what tells each file of a checkpoint, its manifest included, from every other one and from itself after a change."""
    found: dict[str, _Stamp] = {}
    for name in ("manifest.json", *manifest["files"]):
        try:
            about = (folder / name).stat()
        except OSError as error:
            raise CheckpointError(f"Checkpoint {folder} cannot be read: {name}: {error.strerror}.") from error
        found[name] = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
    return found


def prune(checkpoints: Path, keep: int, newest: Path | None = None, best: Path | None = None) -> list[Path]:
    """Delete all checkpoints older than the newest `keep` that are whole, but the `best`, and return what was deleted.

    Only whole checkpoints count among those kept, so that a whole one is never deleted in favour of a damaged one. A
    checkpoint is read for that only where this process has not yet hashed it or a file has been touched since. Checkpoints
    after `newest`, which the run has just saved, neither count nor are deleted: the run has passed over them.
    """
    assert keep >= 1, "at least the newest checkpoint is kept"
    folders = list_checkpoints(checkpoints)
    if len(folders) <= keep:
        return []
    kept = 0
    deleted: list[Path] = []
    with explained(f"delete old checkpoints in {checkpoints}"):
        passed_over = newest is not None
        for folder in reversed(folders):
            passed_over = passed_over and folder != newest
            if passed_over:
                continue
            if kept < keep:
                kept += is_whole(folder)
                continue
            if folder == best:
                continue
            # Renamed first, so that no reader finds a half-deleted checkpoint.
            hidden = folder.rename(folder.with_name(f".{folder.name}{PARTIAL}"))
            shutil.rmtree(hidden)
            _hashed.pop(folder.absolute(), None)
            deleted.append(folder)
    return deleted


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest; CheckpointError when it is broken or a file's size differs from its list."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint at {folder}.")
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes(), object_pairs_hook=unique_keys)
        form = manifest["format"]
        if type(form) is int and form not in (FORMAT, SHARED_FORMAT):
            raise CheckpointError(
                f"Checkpoint {folder} has format {form}; this version of kapelle reads {FORMAT} and {SHARED_FORMAT}. Use the "
                "one that wrote it."
            )
        step = step_of(folder)
        files = manifest["files"]
        known = manifest.keys() == {"format", "step", "files"} and type(manifest["step"]) is int
        if not known or step not in (None, manifest["step"]) or "state.json" not in files:
            raise ValueError("an unknown form, or another step than in the folder's name")
        check_listed(files)
        for name, expected in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"Checkpoint {folder} is damaged: {name} is missing.")
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(
                    f"Checkpoint {folder} is damaged: {name} has {size} bytes instead of {expected['bytes']}."
                )
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"Checkpoint {folder} is damaged: manifest.json is missing or broken."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"Checkpoint {folder} cannot be read: manifest.json: {error.strerror}."
        ) from error
    return dict(manifest)


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn errors of the disk or of safetensors inside the block into a CheckpointError that names the action."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        # safetensors gives the disk's reason only in its text: "... (os error 28)".
        number = re.search(r"os error (\d+)", str(error))
        reason = explain(OSError(int(number[1]), str(error))) if number else str(error)
        raise CheckpointError(f"Cannot {doing}: {reason}") from error
    except OSError as error:
        raise CheckpointError(f"Cannot {doing}: {explain(error)}") from error


def is_whole(folder: Path) -> bool:
    """Return whether a checkpoint passes `verify`, or has passed it and none of its files was touched since."""
    try:
        known = _hashed.get(folder.absolute())
        if known is None or known != _stamps(folder, read_manifest(folder)):
            verify(folder)
    except CheckpointError:
        return False
    return True
