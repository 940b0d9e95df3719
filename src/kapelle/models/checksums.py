"""Write and verify checksums of folders of weights. The file `kapelle.json` lists the size and hash of every file in a folder.

    {"base": "3f…", "files": {"adapter_model.safetensors": {"bytes": 4096, "sha256": "9a…"}, …}}

The value of `base` is the hash of the weights on which an adapter was trained. A folder without `kapelle.json` was
written by another program and is not verified.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kapelle.errors import ModelError
from kapelle.runtime.files import check_listed, sha256, unique_keys

CHECKSUMS = "kapelle.json"
"""The name of the file that kapelle writes next to weights."""
WEIGHTS = ".safetensors"


def write_checksums(folder: Path, base: str | None = None) -> None:
    """Write the size and hash of every file in a folder. For an adapter, `base` is the hash of the base weights."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    listed = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in files
    }
    made_on = {} if base is None else {"base": base}
    (folder / CHECKSUMS).write_text(json.dumps({**made_on, "files": listed}) + "\n", "utf-8")


def base_of(folder: Path) -> str | None:
    """Return the hash of the base model on which the adapter in a folder was trained, or None if the hash is not recorded."""
    base = _read_checksums(folder).get("base")
    return None if base is None else str(base)


def verify_folder(folder: Path, *, settings_only: bool = False) -> bool:
    """Check that the files of a folder have not changed since kapelle wrote them. Returns False if there is no list of files.

    With `settings_only`, weights are skipped, which is fast. Raises ModelError with the name of the first missing or
    changed file.
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
            wrong = "was removed"
        except OSError as error:
            wrong = f"became unreadable ({error.strerror})"
        raise ModelError(
            f"'{folder}' is damaged: {name} {wrong} since kapelle wrote it. Restore the folder from a copy; if the "
            f"change was intended, remove its {CHECKSUMS}."
        )
    return True


def listed_files(folder: Path) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the size and SHA-256 of every file as kapelle wrote it, by name, or None if the folder has no list of files.

    Raises ModelError if the list is damaged.
    """
    found = _read_checksums(folder)
    return dict(found["files"]) if "files" in found else None


def _read_checksums(folder: Path) -> dict[str, Any]:
    """Return the content of `kapelle.json`, or an empty dict if the file does not exist."""
    found = _read(folder / CHECKSUMS)
    if not found.keys() <= {"base", "files"} or not isinstance(found.get("base", ""), str):
        raise _broken(folder / CHECKSUMS, "it contains keys that kapelle does not write")
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
        f"'{file}' is damaged: {why}. Restore the folder from a copy; without this file its weights cannot be verified."
    )
