"""Checkpoints that are either complete or absent: safetensors and JSON in a folder with a manifest.

    checkpoints/00000012/
      manifest.json            format, step, and size and sha256 of every other file
      state.json               everything but tensors; a tensor is {"$tensor": "<part>/<name>"}
      <part>.safetensors       the tensors of one top-level key of the state
      …                        what `extra` wrote, such as PEFT folders

A checkpoint is written under a hidden name, flushed to the disk and renamed, so that a reader sees all
of it or nothing. A step that is saved again (after a return to an older checkpoint, because a newer one was
damaged) becomes `00000012-2`: the last good checkpoint is never replaced. Nothing is pickled.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.errors import CheckpointError, DataError
from kapelle.runs.checkpoint_folder import (
    FORMAT,
    Newest,
    Rejected,
    explained,
    list_checkpoints,
    newest_valid,
    prune,
    read_manifest,
    verify,
)
from kapelle.runs.exact_json import decode, encode
from kapelle.runtime.atomic_files import PARTIAL, explain, flush, write_new
from kapelle.runtime.manifest import sha256
from kapelle.runtime.tensor_files import load_tensors
from kapelle.types import Json

if TYPE_CHECKING:
    import torch

__all__ = [
    "FORMAT",
    "Newest",
    "Rejected",
    "list_checkpoints",
    "load",
    "newest_valid",
    "prune",
    "read",
    "save",
    "verify",
]

_PART = re.compile(r"[A-Za-z0-9_-]+")


def save(
    checkpoints: Path,
    step: int,
    state: Mapping[str, object],
    extra: Callable[[Path], None] | None = None,
    may_write: Callable[[], None] = lambda: None,
) -> Path:
    """Save the state after `step` updates and return the checkpoint's folder.

    `state` maps names of parts to trees of mappings, lists, tuples, tensors and JSON values; `load` returns them
    equal in value, type and dtype, with tensors on the CPU. `extra` may write further files into the folder that it
    is given. Only one process at a time saves into `checkpoints`: `may_write` is called before the first file is
    written and before the folder gets its name, and raises when another process has taken over.

    Raises CheckpointError when the disk refuses or a value cannot be stored; earlier checkpoints stay intact.
    """
    may_write()
    with explained(f"write the checkpoint of step {step} in {checkpoints}"):
        checkpoints.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(checkpoints)
        final = _free_name(checkpoints, step)
        beside = final.with_name(f".{final.name}{PARTIAL}")
        beside.mkdir()
        try:
            _write_state(beside, state)
            if extra is not None:
                extra(beside)
            _seal(beside, step)
            may_write()
            beside.rename(final)
        except OSError:
            may_write()  # gives the reason, if the run is no longer ours
            raise
        finally:
            # After a failure, the next attempt needs its space.
            shutil.rmtree(beside, ignore_errors=True)
        flush(checkpoints)
    return final


def load(folder: Path) -> dict[str, Any]:
    """Verify a checkpoint and return its state; raises CheckpointError when it is missing or damaged."""
    verify(folder)
    return read(folder)


def read(folder: Path) -> dict[str, Any]:
    """Return the state of a checkpoint that has just passed `verify` or `newest_valid`.

    Raises CheckpointError when the disk refuses to read it.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        state = json.loads((folder / "state.json").read_bytes())
        listed = read_manifest(folder)["files"]
        for part in state:
            if (file := f"{part}.safetensors") in listed:
                tensors |= {f"{part}/{name}": t for name, t in load_tensors(folder / file).items()}
    except (OSError, DataError) as error:
        reason = explain(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"Checkpoint {folder} cannot be read: {reason}") from error

    def tensor(tag: str, name: Json) -> object:
        assert tag == "$tensor", f"a tag of another kapelle: {tag}"
        return tensors[name]

    return {part: decode(tree, tensor) for part, tree in state.items()}


def _write_state(folder: Path, state: Mapping[str, object]) -> None:
    from safetensors.torch import save_file

    trees: dict[str, Json] = {}
    for part, value in state.items():
        assert _PART.fullmatch(part), f"'{part}' names a file"
        trees[part], tensors = _split(part, value)
        if tensors:
            save_file(tensors, folder / f"{part}.safetensors")
    write_new(folder / "state.json", json.dumps(trees, allow_nan=False).encode("ascii"))


def _split(part: str, tree: object) -> tuple[Json, dict[str, torch.Tensor]]:
    import torch

    tensors: dict[str, torch.Tensor] = {}

    def tensor(value: object, place: str) -> Json | None:
        if not isinstance(value, torch.Tensor):
            return None
        # Places can repeat when keys contain dots; names must not.
        name = place.removeprefix(f"{part}.") if place != part else "value"
        while name in tensors:
            name += "'"
        tensors[name] = value.detach().cpu().contiguous()
        return {"$tensor": f"{part}/{name}"}

    try:
        encoded = encode(tree, part, tensor)
    except TypeError as error:
        raise CheckpointError(f"Cannot write a checkpoint: {error}, and is not a tensor.") from error
    seen: set[int] = set()
    for name, value in tensors.items():
        storage = value.untyped_storage().data_ptr()
        # The format does not store shared memory: tied weights and views become copies.
        if storage in seen:
            tensors[name] = value.clone()
        seen.add(storage)
    return encoded, tensors


def _seal(folder: Path, step: int) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        flush(path)
    listed = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in files
    }
    manifest = {"format": FORMAT, "step": step, "files": listed}
    write_new(folder / "manifest.json", json.dumps(manifest, indent=1).encode("ascii"))
    for inner in [path for path in folder.rglob("*") if path.is_dir()]:
        flush(inner)
    flush(folder)


def _free_name(checkpoints: Path, step: int) -> Path:
    path = checkpoints / f"{step:08d}"
    attempt = 2
    while path.exists():
        path = checkpoints / f"{step:08d}-{attempt}"
        attempt += 1
    return path


def _remove_leftovers(checkpoints: Path) -> None:
    for leftover in checkpoints.glob(f".*{PARTIAL}"):
        shutil.rmtree(leftover, ignore_errors=True)
