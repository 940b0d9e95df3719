"""Checkpoints that are either complete or absent: safetensors and JSON in a folder with a manifest.

    checkpoints/00000012/
      manifest.json            format, step, and size and sha256 of every other file
      state.json               everything but tensors; a tensor is {"$tensor": "<part>/<name>"}
      <part>.safetensors       the tensors of one top-level key of the state
      <part>/                  in its place where several processes have written the part, see `checkpoint_shares`
      …                        what `extra` wrote, such as PEFT folders

A checkpoint is written under a hidden name, flushed to the disk and renamed, so that a reader sees all
of it or nothing. A step that is saved again (after a return to an older checkpoint, because a newer one was
damaged) becomes `00000012-2`: the last good checkpoint is never replaced. Nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.errors import CheckpointError, DataError
from kapelle.models.finite import learned, poisoned
from kapelle.runs.checkpoint_folder import (
    FORMAT,
    SHARED_FORMAT,
    Newest,
    Rejected,
    explained,
    list_checkpoints,
    newest_valid,
    prune,
    read_manifest,
    remember,
    verify,
)
from kapelle.runs.checkpoint_shares import SHARE, described, read_shares
from kapelle.runs.checkpoint_state import Contents
from kapelle.runs.exact_json import decode
from kapelle.runtime.files import PARTIAL, explain, flush, sha256, write_new
from kapelle.runtime.ranks import ALONE, Peers, broadcast
from kapelle.runtime.tensors import load_tensors
from kapelle.types import Json

if TYPE_CHECKING:
    import torch

__all__ = [
    "FORMAT",
    "Contents",
    "Newest",
    "Rejected",
    "Room",
    "list_checkpoints",
    "load",
    "newest_valid",
    "poison_in",
    "prune",
    "read",
    "save",
    "verify",
    "whole",
]

Room = Callable[[str, "torch.Tensor"], "torch.Tensor | None"]
"""Takes a tensor's name and its shape and type (a tensor on `meta`), and returns the tensor that it is to be read into."""


def save(
    checkpoints: Path,
    step: int,
    state: Mapping[str, object] | Contents,
    extra: Callable[[Path], None] | None = None,
    may_write: Callable[[], None] = lambda: None,
    ranks: Peers = ALONE,
) -> Path:
    """Save the state after `step` updates and return the checkpoint's folder.

    `state` maps names of parts to trees of mappings, lists, tuples, tensors and JSON values; `load` returns them
    equal in value, type and dtype, with tensors on the CPU. `extra` may write further files into the folder that it
    is given. Only one process at a time saves into `checkpoints`: `may_write` is called before the first file is
    written and before the folder gets its name, and raises when another process has taken over.

    Several `ranks` save together: each gives its `Contents`, of whose shares it writes its own; everything else is that of rank 0.

    Raises CheckpointError, in every rank, when the disk refuses or a value cannot be stored; earlier checkpoints stay intact.
    """
    doing = f"write the checkpoint of step {step} in {checkpoints}"
    contents = state if isinstance(state, Contents) else Contents(state)
    shared = contents.shares.keys()

    def begun() -> str:
        may_write()
        with explained(doing):
            return str(_begin(checkpoints, step, shared).absolute())

    final = Path(broadcast(ranks, "checkpoint", begun))
    beside = _beside(final)

    def written() -> bytes:
        with explained(doing), _ours(may_write):
            files = _write_state(beside, contents)
            if extra is not None:
                extra(beside)
            if ranks.rank == 0:
                files += [path for path in _files(beside) if path.relative_to(beside).parts[0] not in shared]
            return json.dumps(_listed(beside, files)).encode()

    def sealed(listings: Sequence[bytes]) -> None:
        with explained(doing), _ours(may_write):
            _seal(beside, step, [json.loads(listing) for listing in listings])
            may_write()
            beside.rename(final)
            flush(checkpoints)
        remember(final)

    try:
        listings = ranks.all_gather("checkpoint parts", written)
        broadcast(ranks, "checkpoint seal", lambda: sealed(listings))
    finally:
        if ranks.rank == 0:
            # After a failure, the next attempt needs its space.
            shutil.rmtree(beside, ignore_errors=True)
    return checkpoints / final.name


@contextmanager
def _ours(may_write: Callable[[], None]) -> Iterator[None]:
    """Where the disk refuses inside the block, give the reason if the run is no longer ours."""
    try:
        yield
    except OSError:
        may_write()
        raise


def _begin(checkpoints: Path, step: int, shared: Collection[str]) -> Path:
    checkpoints.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(checkpoints)
    final = _free_name(checkpoints, step)
    _beside(final).mkdir()
    for part in shared:
        (_beside(final) / part).mkdir()
    return final


def _beside(final: Path) -> Path:
    return final.with_name(f".{final.name}{PARTIAL}")


def whole(_name: str, _saved: torch.Tensor) -> None:
    """Have a tensor read whole: the `room` of who holds everything."""


def read(folder: Path, room: Room = whole) -> dict[str, Any]:
    """Return the state of a checkpoint that has just passed `verify` or `newest_valid`.

    What several ranks have written is read into the tensor that `room` returns for a part's name and place and the whole tensor
    without its content; None for a whole one on the CPU. Raises CheckpointError when the disk refuses to read it.
    """
    tensors: dict[str, torch.Tensor] = {}
    with _readable(folder):
        state = json.loads((folder / "state.json").read_bytes())
        listed = read_manifest(folder)["files"]
        for part in state:
            found: Mapping[str, torch.Tensor] = {}
            if (file := f"{part}.safetensors") in listed:
                found = load_tensors(folder / file)
            elif any(name.startswith(f"{part}/") for name in listed):
                found = _read_shared(folder / part, room)
            tensors |= {f"{part}/{name}": tensor for name, tensor in found.items()}

    def tensor(tag: str, name: Json) -> object:
        assert tag == "$tensor", f"a tag of another kapelle: {tag}"
        return tensors[name]

    return {part: decode(tree, tensor) for part, tree in state.items()}


def poison_in(folder: Path) -> str | None:
    """Return why training cannot continue from the numbers of a checkpoint, None when it can; see `models.finite`.

    Reads one file after another. Raises CheckpointError when the disk refuses to read it.
    """
    with _readable(folder):
        for name in read_manifest(folder)["files"]:
            part, _, inner = name.removesuffix(".safetensors").partition("/")
            if name.endswith(".safetensors") and (not inner or SHARE.fullmatch(inner)):
                wrong = poisoned(learned({part: load_tensors(folder / name)}))
                if wrong is not None:
                    return wrong
    return None


def load(folder: Path, room: Room = whole) -> dict[str, Any]:
    """Verify a checkpoint and return its state as `read` does; CheckpointError when it is missing or damaged."""
    verify(folder)
    return read(folder, room)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, DataError) as error:
        reason = explain(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"Checkpoint {folder} cannot be read: {reason}") from error


def _read_shared(folder: Path, room: Room) -> dict[str, torch.Tensor]:
    import torch

    into = {}
    for name, saved in described(folder).items():
        own = room(name, saved)
        into[name] = torch.empty_like(saved, device="cpu") if own is None else own
    read_shares(folder, into)
    return into


def _write_state(folder: Path, contents: Contents) -> list[Path]:
    """Write a rank's part of a state; return its files among those that several ranks write."""
    from safetensors.torch import save_file

    files: list[Path] = []
    for part, tensors in contents.tensors.items():
        if part in contents.shares:
            files += contents.shares[part].write(folder / part)
        elif tensors:
            save_file(dict(tensors), folder / f"{part}.safetensors")
    if contents.first:
        write_new(folder / "state.json", json.dumps(contents.trees, allow_nan=False).encode("ascii"))
    return files


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _listed(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Flush files to the disk and return what a manifest says of them."""
    for path in files:
        flush(path)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in files
    }


def _seal(folder: Path, step: int, listings: Sequence[Mapping[str, Any]]) -> None:
    """Write the manifest of what all ranks have written."""
    listed = {name: entry for listing in listings for name, entry in listing.items()}
    form = FORMAT if len(listings) == 1 else SHARED_FORMAT
    manifest = {"format": form, "step": step, "files": listed}
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
