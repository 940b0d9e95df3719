"""Writes and reads checkpoints, which are folders of safetensors and JSON files with a manifest and are either complete or absent.

    checkpoints/00000012/
      manifest.json            format, step, and the size and SHA-256 of every other file
      state.json               everything except tensors; a tensor is represented by {"$tensor": "<part>/<name>"}
      <part>.safetensors       the tensors of one top-level key of the state
      <part>/                  replaces the file above if several processes have written the part, see `Share`
      …                        files that `extra` wrote, such as PEFT folders

A checkpoint is written under a hidden name, flushed to the disk and then renamed, so that a reader sees either the
complete checkpoint or none. A step may be saved twice if a run is resumed from an older checkpoint because a newer one
was damaged. The second checkpoint of step 12 is named `00000012-2`, so that the last valid checkpoint is never
replaced. Checkpoints do not contain pickled objects.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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
from kapelle.runtime.files import PARTIAL, explain, flush, sha256, write_new
from kapelle.runtime.ranks import ALONE, Peers, broadcast
from kapelle.runtime.tensors import load_tensors
from kapelle.runtime.wire.exact_json import decode, encode
from kapelle.types import Json

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex


# -------- Shares: several processes each write a part of the tensors, with `torch.distributed.checkpoint`.
#
#     train/shard-00001-model-00001-of-00001.safetensors    written by rank 0
#     train/shard-00002-model-00001-of-00001.safetensors    written by rank 1
#     …
#
# The files have the format of torch's HuggingFaceStorageWriter: a file's header has the offsets of its parts in the
# whole tensors (`DCP_SHARDING_INFO`). Any number of processes can read them, and each reads only the parts that it
# needs. The library's planners and storage are used without its collectives, which exchange pickles: every rank
# computes the plans of all ranks.

SHARE = re.compile(r"shard-\d+-model-\d+-of-\d+")
"""A regular expression for the name of the file of one rank, without the suffix."""
LARGEST = 1 << 31
"""The approximate maximum size of a file in bytes. The size is limited because the library holds a file in memory twice while
writing it."""


def is_parted(tensor: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`, which is split across several ranks."""
    library = sys.modules.get("torch.distributed.tensor")  # this module is imported if there is a DTensor
    return library is not None and isinstance(tensor, library.DTensor)


class Share:
    """The part of the shared tensors that one of `size` ranks writes.

    Each rank writes its own part of a `DTensor`. All other tensors are the same on all ranks. Each of these tensors is
    written by a single rank, which is chosen so that all ranks write about the same number of bytes.
    """

    def __init__(self, tensors: Mapping[str, Tensor], rank: int, size: int, *, copied: bool = False) -> None:
        """Plan the share of this rank. If `copied` is true, the share is copied to the CPU, so that training does not change it."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.planner import SavePlan

        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(tensors))
        items = planner.create_local_plan().items
        parts = [item for item in items if is_parted(tensors[item.index.fqn])]
        common = [item for item in items if not is_parted(tensors[item.index.fqn])]
        shared, _ = planner.create_global_plan([SavePlan(common)] * size)
        self._rank, self._plans = rank, [SavePlan([])] * size
        self._plans[rank] = SavePlan([*shared[rank].items, *parts])
        self.tensors = {
            item.index.fqn: held(planner.lookup_object(item.index), copied=copied)
            for item in self._plans[rank].items
        }
        """The tensors that this rank writes, by name, on the CPU."""

    def write(self, folder: Path) -> list[Path]:
        """Write the files of this rank into a folder that rank 0 has created, and return their paths."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        if not folder.is_dir():
            raise CheckpointError(
                f"Rank {self._rank} cannot find {folder}, which rank 0 created. Choose a --run-dir on "
                "a disk that is shared by all machines."
            )
        own = self.tensors

        class Planner(DefaultSavePlanner):
            def lookup_object(self, index: MetadataIndex) -> Tensor:
                return own[index.fqn]

        planner = Planner(flatten_state_dict=False)
        # For each tensor, the number of its file, from 1.
        items = self._plans[self._rank].items
        numbers: dict[str, int] = {}
        number, held = 1, 0
        for item in items:
            size = item.tensor_storage_size() or 0
            if held and held + size > LARGEST:
                number, held = number + 1, 0
            numbers[item.index.fqn] = number
            held += size
        writer = HuggingFaceStorageWriter(str(folder), numbers, save_distributed=True)
        writer.set_up_storage_writer(self._rank == 0)
        plan = writer.prepare_global_plan(self._plans)[self._rank]
        written = writer.write_data(plan, planner).wait()
        return [folder / name for name in sorted({each.storage_data.relative_path for each in written})]


def held(tensor: Tensor, *, copied: bool = False) -> Tensor:
    """Return a contiguous tensor on the CPU. The tensor is copied if `copied` is true or if it is on another device."""
    import torch

    own = tensor.detach()
    if copied:
        return torch.empty_like(own, device="cpu", memory_format=torch.contiguous_format).copy_(own)
    return own.cpu().contiguous()


def described(folder: Path) -> dict[str, Tensor]:
    """Return the complete tensors of a folder by name, without their values (on the `meta` device)."""
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        name: torch.empty(found.size, dtype=found.properties.dtype, device="meta")
        for name, found in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }


def read_shares(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Read tensors by name into tensors of the same shapes. For a `DTensor`, only the part of this rank is read."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader, planner = HuggingFaceStorageReader(str(folder)), DefaultLoadPlanner(flatten_state_dict=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(into), metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()


# -------- The contents of a checkpoint: trees of JSON values, and the tensors in them by name.

_PART = re.compile(r"[A-Za-z0-9_-]+")


class Contents:
    """The part of a state that one rank writes."""

    def __init__(
        self,
        state: Mapping[str, object],
        ranks: Peers = ALONE,
        shared: Collection[str] = (),
        *,
        copied: bool = False,
    ) -> None:
        """Separate a state into trees and tensors. If there are several `ranks`, each rank writes a share of the parts named in `shared`.

        If `copied` is true, tensors are copied, so that training does not change them. Raises CheckpointError for a
        value that cannot be stored.
        """
        shared = shared if ranks.size > 1 else ()
        self.first = ranks.rank == 0
        """Whether this rank writes the trees."""
        self.trees: dict[str, Json] = {}
        """The tree of each part, in which a tensor is represented by {"$tensor": "<part>/<name>"}."""
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        """The tensors that this rank writes, by part and name."""
        self.shares: dict[str, Share] = {}
        """The parts that several ranks write together, by name."""
        for part, tree in state.items():
            assert _PART.fullmatch(part), f"'{part}' names a file"
            self.trees[part], tensors = _split(part, tree, whole=part in shared, copied=copied)
            if part in shared:
                self.shares[part] = Share(tensors, ranks.rank, ranks.size, copied=copied)
                tensors = self.shares[part].tensors
            # safetensors rejects tensors that share memory, such as tied weights and views, so they are copied.
            seen: set[int] = set()
            for name, value in tensors.items():
                storage = value.untyped_storage().data_ptr()
                if storage in seen:
                    tensors[name] = value.clone()
                seen.add(storage)
            self.tensors[part] = tensors


def _split(part: str, tree: object, *, whole: bool, copied: bool) -> tuple[Json, dict[str, torch.Tensor]]:
    import torch

    tensors: dict[str, torch.Tensor] = {}

    def tensor(value: object, place: str) -> Json | None:
        if not isinstance(value, torch.Tensor):
            return None
        # Two tensors can have the same path when keys contain dots, but their names must be unique.
        name = place.removeprefix(f"{part}.") if place != part else "value"
        while name in tensors:
            name += "'"
        tensors[name] = value.detach() if whole else held(value, copied=copied)
        return {"$tensor": f"{part}/{name}"}

    try:
        encoded = encode(tree, part, tensor)
    except TypeError as error:
        raise CheckpointError(f"Cannot write a checkpoint: {error}, and is not a tensor.") from error
    return encoded, tensors


__all__ = [
    "FORMAT",
    "Contents",
    "Destination",
    "Newest",
    "Rejected",
    "list_checkpoints",
    "load",
    "newest_valid",
    "poison_in",
    "prune",
    "read",
    "save",
    "verify",
]

Destination = Callable[[str, "torch.Tensor"], "torch.Tensor | None"]
"""A function that takes the name of a tensor and a tensor on `meta` with its shape and dtype, and returns the tensor to read into."""


def save(
    checkpoints: Path,
    step: int,
    state: Mapping[str, object] | Contents,
    extra: Callable[[Path], None] | None = None,
    may_write: Callable[[], None] = lambda: None,
    ranks: Peers = ALONE,
) -> Path:
    """Save the state after `step` updates and return the folder of the checkpoint.

    The argument `state` maps names of parts to trees of mappings, lists, tuples, tensors and JSON values. The function
    `load` returns these values with the same types and dtypes, with tensors on the CPU. The function `extra` may write
    additional files into the folder that is passed to it. Only one process at a time may save into `checkpoints`. The
    function `may_write` is called before the first file is written and before the folder is renamed, and raises an
    error if another process has taken over.

    If there are several `ranks`, they save the checkpoint together: each rank writes its share of its `Contents`, and
    rank 0 writes everything else.

    Raises CheckpointError on every rank if writing to the disk fails or a value cannot be stored. Earlier checkpoints
    are not affected.
    """
    contents = state if isinstance(state, Contents) else Contents(state)
    failures = partial(_disk_failures, f"write the checkpoint of step {step} in {checkpoints}", may_write)

    # Rank 0 creates a hidden folder, every rank writes its files into it, and rank 0 adds the manifest and renames the folder.
    # If one of these functions raises on any rank, `broadcast` and `all_gather` raise on every rank.
    def make_folder() -> str:
        may_write()
        with failures():
            return str(_make_folder(checkpoints, step, contents.shares.keys()).absolute())

    final = Path(broadcast(ranks, "checkpoint", make_folder))
    hidden = _hidden(final)

    def write_files() -> bytes:
        with failures():
            files = _write_state(hidden, contents)
            if extra is not None:
                extra(hidden)
            if ranks.rank == 0:  # lists all files except the shares of other ranks
                every = sorted(path for path in hidden.rglob("*") if path.is_file())
                files += [path for path in every if path.relative_to(hidden).parts[0] not in contents.shares]
            return json.dumps(_listed(hidden, files)).encode()

    def complete() -> None:
        with failures():
            _write_manifest(hidden, step, [json.loads(listing) for listing in listings])
            may_write()
            hidden.rename(final)
            flush(checkpoints)
        remember(final)

    try:
        listings = ranks.all_gather("checkpoint parts", write_files)
        broadcast(ranks, "checkpoint seal", complete)
    finally:
        if ranks.rank == 0:
            # After a failure, the next save needs the disk space.
            shutil.rmtree(hidden, ignore_errors=True)
    return checkpoints / final.name


@contextmanager
def _disk_failures(action: str, may_write: Callable[[], None]) -> Iterator[None]:
    """Raise CheckpointError if the disk fails inside the block.

    If another process has taken over the run, the error of `may_write` is raised instead.
    """
    with explained(action):
        try:
            yield
        except OSError:
            may_write()
            raise


def _make_folder(checkpoints: Path, step: int, shared: Collection[str]) -> Path:
    """Create the hidden folder of a new checkpoint, with a subfolder for each shared part, and return the path of the final folder."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    for leftover in checkpoints.glob(f".*{PARTIAL}"):
        shutil.rmtree(leftover, ignore_errors=True)
    names = (f"{step:08d}", *(f"{step:08d}-{number}" for number in range(2, 10_000)))
    final = next(path for name in names if not (path := checkpoints / name).exists())
    _hidden(final).mkdir()
    for part in shared:
        (_hidden(final) / part).mkdir()
    return final


def _hidden(final: Path) -> Path:
    return final.with_name(f".{final.name}{PARTIAL}")


def _write_state(folder: Path, contents: Contents) -> list[Path]:
    """Write the part of a state that belongs to this rank, and return the files that were written for the shared parts."""
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


def _listed(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Flush files to the disk and return their entries in the manifest."""
    for path in files:
        flush(path)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in files
    }


def _write_manifest(folder: Path, step: int, listings: Sequence[Mapping[str, Any]]) -> None:
    """Write the manifest for the files of all ranks, and flush the folders."""
    listed = {name: entry for listing in listings for name, entry in listing.items()}
    form = FORMAT if len(listings) == 1 else SHARED_FORMAT
    manifest = {"format": form, "step": step, "files": listed}
    write_new(folder / "manifest.json", json.dumps(manifest, indent=1).encode("ascii"))
    for inner in [path for path in folder.rglob("*") if path.is_dir()]:
        flush(inner)
    flush(folder)


def read(folder: Path, room: Destination | None = None) -> dict[str, Any]:
    """Return the state of a checkpoint that has just passed `verify` or `newest_valid`.

    The function `room` takes the name of a tensor that several ranks have written and the complete tensor on `meta`.
    The return value of `room` is the tensor to read into. If `room` is not given or returns None, the complete tensor
    is read to the CPU. Raises CheckpointError if reading from the disk fails.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    with _readable(folder):
        state = json.loads((folder / "state.json").read_bytes())
        listed = read_manifest(folder)["files"]
        for part in state:
            found: dict[str, torch.Tensor] = {}
            if (file := f"{part}.safetensors") in listed:
                found = load_tensors(folder / file)
            elif any(name.startswith(f"{part}/") for name in listed):
                for name, saved in described(folder / part).items():
                    own = None if room is None else room(name, saved)
                    found[name] = torch.empty_like(saved, device="cpu") if own is None else own
                read_shares(folder / part, found)
            tensors |= {f"{part}/{name}": tensor for name, tensor in found.items()}

    def tensor(tag: str, name: Json) -> object:
        assert tag == "$tensor", f"unknown tag: {tag}"
        return tensors[name]

    return {part: decode(tree, tensor) for part, tree in state.items()}


def poison_in(folder: Path) -> str | None:
    """Return the reason why training cannot continue from the numbers in a checkpoint, or None if it can (see `models.finite`).

    The files are read one after another. Raises CheckpointError if reading from the disk fails.
    """
    with _readable(folder):
        for name in read_manifest(folder)["files"]:
            part, _, inner = name.removesuffix(".safetensors").partition("/")
            if name.endswith(".safetensors") and (not inner or SHARE.fullmatch(inner)):
                wrong = poisoned(learned({part: load_tensors(folder / name)}))
                if wrong is not None:
                    return wrong
    return None


def load(folder: Path, room: Destination | None = None) -> dict[str, Any]:
    """Verify a checkpoint and return its state as `read` does. Raises CheckpointError if the checkpoint is missing or damaged."""
    verify(folder)
    return read(folder, room)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, DataError) as error:
        reason = explain(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"Checkpoint {folder} cannot be read: {reason}") from error
