"""Determines which checkpoints of a run are complete and which may be deleted. The module `checkpoint` writes and reads their content.

A checkpoint is complete if its manifest has the format that `checkpoint.save` writes and contains its own step, and if
every listed file has the recorded size and SHA-256. The change of any single bit is detected, also in the manifest.

For this check, a resume reads the whole checkpoint (`verify`). Pruning must be fast, because the ranks of a run wait
for it. Pruning only compares the inode, size and times of each file with the values from when the content of the file
was last hashed (at a save or a load).
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
"""The format of a checkpoint that several processes have written together."""

_Stamp = tuple[int, int, int, int, int]
_hashed: dict[Path, dict[str, _Stamp]] = {}
"""The file stamps of the checkpoints that this process has hashed, by folder."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A checkpoint that cannot be used, and the reason."""

    folder: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest complete checkpoint, and the newer checkpoints that are damaged."""

    folder: Path | None
    """The folder of the newest complete checkpoint, or None if there is none."""
    rejected: tuple[Rejected, ...]


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the folders of all checkpoints, oldest first, without checking them."""
    if not checkpoints.is_dir():
        return []
    found = [(match, path) for path in checkpoints.iterdir() if (match := FOLDER.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2] or 1)))]


def newest_valid(checkpoints: Path, check: Callable[[Path], None] | None = None) -> Newest:
    """Find the newest complete checkpoint, and the reasons why newer checkpoints cannot be used.

    The function `check` raises CheckpointError for a checkpoint whose files are intact but whose content cannot be
    used.
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
    """Return the newest checkpoint that has a valid manifest and files of the listed sizes.

    The function is fast, because no content is read.
    """
    for folder in reversed(list_checkpoints(checkpoints)):
        try:
            read_manifest(folder)
        except CheckpointError:
            continue
        return folder
    return None


def verify(folder: Path) -> int:
    """Compare every file of a checkpoint with the manifest and return the step. Raises CheckpointError if a file differs."""
    # Taken before the files are read, so that the next call detects a change that happens while they are read.
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
    """Remember that this process or its ranks have just written a checkpoint, so that pruning does not need to read it."""
    with suppress(CheckpointError):
        _hashed[folder.absolute()] = _stamps(folder, read_manifest(folder))


def _stamps(folder: Path, manifest: Mapping[str, Any]) -> dict[str, _Stamp]:
    """Return the device, inode, size and times of each file of a checkpoint, including the manifest."""
    found: dict[str, _Stamp] = {}
    for name in ("manifest.json", *manifest["files"]):
        try:
            about = (folder / name).stat()
        except OSError as error:
            raise CheckpointError(f"Checkpoint {folder} cannot be read: {name}: {error.strerror}.") from error
        found[name] = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
    return found


def prune(checkpoints: Path, keep: int, newest: Path | None = None, best: Path | None = None) -> list[Path]:
    """Delete all checkpoints older than the newest `keep` complete checkpoints, except `best`, and return the deleted folders.

    Only complete checkpoints are counted, so that a complete checkpoint is never deleted in favour of a damaged one. A
    checkpoint is read only if this process has not hashed it or if one of its files has changed since. The checkpoint
    `newest` has just been saved by the run. Checkpoints after `newest` are kept and not counted, because the run could
    not be resumed from them.
    """
    assert keep >= 1, "the newest checkpoint must be kept"
    folders = list_checkpoints(checkpoints)
    if len(folders) <= keep:
        return []
    kept = 0
    deleted: list[Path] = []
    with explained(f"delete old checkpoints in {checkpoints}"):
        if newest in folders:
            folders = folders[: folders.index(newest) + 1]
        for folder in reversed(folders):
            if kept < keep:
                kept += is_whole(folder)
                continue
            if folder == best:
                continue
            # The folder is renamed first, so that readers never find a half-deleted checkpoint.
            hidden = folder.rename(folder.with_name(f".{folder.name}{PARTIAL}"))
            shutil.rmtree(hidden)
            _hashed.pop(folder.absolute(), None)
            deleted.append(folder)
    return deleted


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raises CheckpointError if the manifest is damaged or a file has a different size."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint at {folder}.")
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes(), object_pairs_hook=unique_keys)
        form = manifest["format"]
        if type(form) is int and form not in (FORMAT, SHARED_FORMAT):
            raise CheckpointError(
                f"Checkpoint {folder} has format {form}; this version of kapelle reads {FORMAT} and {SHARED_FORMAT}. Use the "
                "version that wrote it."
            )
        step = step_of(folder)
        files = manifest["files"]
        known = manifest.keys() == {"format", "step", "files"} and type(manifest["step"]) is int
        if not known or step not in (None, manifest["step"]) or "state.json" not in files:
            raise ValueError("its format is unknown, or its step differs from the folder's name")
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
            f"Checkpoint {folder} is damaged: manifest.json is missing or damaged."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"Checkpoint {folder} cannot be read: manifest.json: {error.strerror}."
        ) from error
    return dict(manifest)


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Convert errors of the disk and of safetensors inside the block to a CheckpointError that names the action."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        # safetensors gives the error number only in its message: "... (os error 28)".
        number = re.search(r"os error (\d+)", str(error))
        reason = explain(OSError(int(number[1]), str(error))) if number else str(error)
        raise CheckpointError(f"Cannot {doing}: {reason}") from error
    except OSError as error:
        raise CheckpointError(f"Cannot {doing}: {explain(error)}") from error


def is_whole(folder: Path) -> bool:
    """Return whether a checkpoint passes `verify`, or has passed it before and has not changed since."""
    try:
        known = _hashed.get(folder.absolute())
        if known is None or known != _stamps(folder, read_manifest(folder)):
            verify(folder)
    except CheckpointError:
        return False
    return True
