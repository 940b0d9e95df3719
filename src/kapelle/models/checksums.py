"""Checksums of folders of weights: `kapelle.json` lists what every file was, and is checked when they are read.

    {"base": "3f…", "files": {"adapter_model.safetensors": {"bytes": 4096, "sha256": "9a…"}, …}}

`base` is the hash of the weights that an adapter was trained on. Inside a checkpoint
the checkpoint's manifest lists them. A folder with neither was made by others, and is not checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kapelle.errors import ModelError
from kapelle.runtime.files import check_listed, sha256, step_of, unique_keys

CHECKSUMS = "kapelle.json"
"""The file that kapelle writes beside weights."""
WEIGHTS = ".safetensors"


def write_checksums(folder: Path, base: str | None = None) -> None:
    """Write size and hash of every file of a folder; `base` is the hash of the base weights under an adapter."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    listed = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in files
    }
    made_on = {} if base is None else {"base": base}
    (folder / CHECKSUMS).write_text(json.dumps({**made_on, "files": listed}) + "\n", "utf-8")


def base_of(folder: Path) -> str | None:
    """Return the hash of the base that a folder's adapter was trained on; None if it is not recorded."""
    base = _read_checksums(folder).get("base")
    return None if base is None else str(base)


def verify_folder(folder: Path, *, settings_only: bool = False) -> bool:
    """Check that a folder's files are as kapelle wrote them; False if nothing is recorded.

    `settings_only` skips the weights, so that it takes no time. Raises ModelError naming the first file that is missing
    or changed.
    """
    listed = listed_files(folder)
    if listed is None:
        return False
    for name, expected in listed.items():
        if settings_only and name.endswith(WEIGHTS):
            continue
        wrong, path = "has changed", folder / name
        try:
            if path.stat().st_size == expected["bytes"] and sha256(path) == expected["sha256"]:
                continue
        except FileNotFoundError:
            wrong = "is missing: it was removed"
        except OSError as error:
            wrong = f"cannot be read any more ({error.strerror}), or has changed"
        raise ModelError(
            f"'{folder}' is damaged: {name} {wrong} since kapelle wrote it. Take the folder from a copy. If you changed it "
            f"yourself, remove {CHECKSUMS} in it, which lists the files as they were."
        )
    return True


def listed_files(folder: Path) -> Mapping[str, Mapping[str, Any]] | None:
    """Return size and SHA-256 of every file as kapelle wrote it, by name; None if nothing is recorded.

    Raises ModelError for a list that is broken.
    """
    found = _read_checksums(folder)
    if "files" in found:
        return dict(found["files"])
    for checkpoint in list(folder.absolute().parents)[:2]:
        if step_of(checkpoint) is not None and (checkpoint / "manifest.json").is_file():
            within = f"{folder.absolute().relative_to(checkpoint).as_posix()}/"
            files = _read(checkpoint / "manifest.json").get("files", {})
            own = {name.removeprefix(within): each for name, each in files.items() if name.startswith(within)}
            return own or None
    return None


def _read_checksums(folder: Path) -> dict[str, Any]:
    """Return the content of `kapelle.json`; empty if there is none."""
    found = _read(folder / CHECKSUMS)
    if not found.keys() <= {"base", "files"} or not isinstance(found.get("base", ""), str):
        raise _broken(folder / CHECKSUMS, "it holds other keys than kapelle writes")
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes(), object_pairs_hook=unique_keys)
        check_listed(found.get("files", {}))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(file, repr(error)) from error
    return dict(found)


def _broken(file: Path, why: str) -> ModelError:
    return ModelError(
        f"'{file}' is damaged: {why}. Take the folder from a copy; without that file the weights cannot be checked."
    )
