"""Checkpoints that are either complete or absent: safetensors and JSON in a folder with a manifest.

    checkpoints/00000012/
      manifest.json            format, step, and size and sha256 of every other file
      state.json               everything but tensors; a tensor is {"$tensor": "<part>/<name>"}
      <part>.safetensors       the tensors of one top-level key of the state
      <part>/                  in its place where several processes have written the part, see `Share`
      …                        what `extra` wrote, such as PEFT folders

A checkpoint is written under a hidden name, flushed to the disk and renamed, so that a reader sees all
of it or nothing. A step that is saved again (after a return to an older checkpoint, because a newer one was
damaged) becomes `00000012-2`: the last good checkpoint is never replaced. Nothing is pickled.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
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
from kapelle.runtime.files import PARTIAL, explain, flush, sha256, write_new
from kapelle.runtime.ranks import ALONE, Peers, broadcast
from kapelle.runtime.tensors import load_tensors
from kapelle.runtime.wire.exact_json import decode, encode
from kapelle.types import Json

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex


# -------- Shares: what several processes learn, as files that each writes its share of, by `torch.distributed.checkpoint`.
#
#     train/shard-00001-model-00001-of-00001.safetensors    written by rank 0
#     train/shard-00002-model-00001-of-00001.safetensors    written by rank 1
#     …
#
# They have the form of torch's HuggingFaceStorageWriter: a file's header says at which offsets of the whole tensors its
# tensors begin (`DCP_SHARDING_INFO`). Any number of processes reads them, each the parts that it needs. Planners and storage
# of the library are used without its collectives, which exchange pickles: every rank knows the plans of all.

SHARE = re.compile(r"shard-\d+-model-\d+-of-\d+")
"""The name of a file of one rank, without its suffix."""
LARGEST = 1 << 31
"""Bytes of a file, at about which the next one begins: the library holds a file in memory twice while it is written."""


def is_parted(tensor: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`: a part of a whole one that several ranks hold."""
    library = sys.modules.get("torch.distributed.tensor")  # whoever has made one has imported it
    return library is not None and isinstance(tensor, library.DTensor)


class Share:
    """What one of `size` ranks writes of tensors that all hold.

    Of a `DTensor` each rank writes the part that it holds. Other tensors are the same in all ranks; each is written by one of
    them, so that all write about as many bytes.
    """

    def __init__(self, tensors: Mapping[str, Tensor], rank: int, size: int, *, copied: bool = False) -> None:
        """Plan this rank's share; `copied` takes copies of it, in the machine's memory, that training does not change."""
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
        """What this rank writes, by name, on the CPU."""

    def write(self, folder: Path) -> list[Path]:
        """Write this rank's files into a folder that rank 0 has made, and return them."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        if not folder.is_dir():
            raise CheckpointError(
                f"Rank {self._rank} does not see {folder}, which rank 0 has made. Name a --run-dir on a disk that all machines "
                "share."
            )
        own = self.tensors

        class Planner(DefaultSavePlanner):
            def lookup_object(self, index: MetadataIndex) -> Tensor:
                return own[index.fqn]

        planner = Planner(flatten_state_dict=False)
        # The number of the file, from 1, that each tensor of a share is written to.
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
    """Return a tensor on the CPU in one piece; a copy if it is to be `copied` or was elsewhere."""
    import torch

    own = tensor.detach()
    if copied:
        return torch.empty_like(own, device="cpu", memory_format=torch.contiguous_format).copy_(own)
    return own.cpu().contiguous()


def described(folder: Path) -> dict[str, Tensor]:
    """Return the whole tensors of a folder by name, without their content (on the device `meta`)."""
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        name: torch.empty(found.size, dtype=found.properties.dtype, device="meta")
        for name, found in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }


def read_shares(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Read tensors, by name, into these of the same shapes; of a `DTensor` only the part that this rank holds."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader, planner = HuggingFaceStorageReader(str(folder)), DefaultLoadPlanner(flatten_state_dict=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(into), metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()


# -------- A state taken apart for a checkpoint: trees of JSON, and the tensors in them by name.

_PART = re.compile(r"[A-Za-z0-9_-]+")


class Contents:
    """What one rank has to write of a state."""

    def __init__(
        self,
        state: Mapping[str, object],
        ranks: Peers = ALONE,
        shared: Collection[str] = (),
        *,
        copied: bool = False,
    ) -> None:
        """Take a state apart; of several `ranks` each writes a share of the parts that are `shared`.

        `copied` takes copies, which training does not change any more. Raises CheckpointError for a value that has no form.
        """
        shared = shared if ranks.size > 1 else ()
        self.first = ranks.rank == 0
        """Whether this rank writes the trees."""
        self.trees: dict[str, Json] = {}
        """By part; a tensor is {"$tensor": "<part>/<name>"}."""
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        """What this rank writes, by part and name."""
        self.shares: dict[str, Share] = {}
        """By part, where several ranks write it."""
        for part, tree in state.items():
            assert _PART.fullmatch(part), f"'{part}' names a file"
            self.trees[part], tensors = _split(part, tree, whole=part in shared, copied=copied)
            if part in shared:
                self.shares[part] = Share(tensors, ranks.rank, ranks.size, copied=copied)
                tensors = self.shares[part].tensors
            # Every tensor gets memory of its own: the format does not store that tied weights and views share theirs.
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
        # Places can repeat when keys contain dots; names must not.
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
                every = sorted(path for path in beside.rglob("*") if path.is_file())
                files += [path for path in every if path.relative_to(beside).parts[0] not in shared]
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
    for leftover in checkpoints.glob(f".*{PARTIAL}"):
        shutil.rmtree(leftover, ignore_errors=True)
    final = checkpoints / f"{step:08d}"
    attempt = 2
    while final.exists():
        final = checkpoints / f"{step:08d}-{attempt}"
        attempt += 1
    _beside(final).mkdir()
    for part in shared:
        (_beside(final) / part).mkdir()
    return final


def _beside(final: Path) -> Path:
    return final.with_name(f".{final.name}{PARTIAL}")


def read(folder: Path, room: Destination | None = None) -> dict[str, Any]:
    """Return the state of a checkpoint that has just passed `verify` or `newest_valid`.

    What several ranks have written is read into the tensor that `room` returns for a part's name and place and the whole tensor
    without its content; without a room, or where it returns None, into a whole one on the CPU. Raises CheckpointError when the
    disk refuses to read it.
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


def load(folder: Path, room: Destination | None = None) -> dict[str, Any]:
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
