"""What several processes learn, as files that each writes its share of, by `torch.distributed.checkpoint`.

    train/shard-00001-model-00001-of-00001.safetensors    written by rank 0
    train/shard-00002-model-00001-of-00001.safetensors    written by rank 1
    …

They have the form of torch's HuggingFaceStorageWriter: a file's header says at which offsets of the whole tensors its
tensors begin (`DCP_SHARDING_INFO`). Any number of processes reads them, each the parts that it needs. Planners and storage
of the library are used without its collectives, which exchange pickles: every rank knows the plans of all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kapelle.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

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
        writer = HuggingFaceStorageWriter(
            str(folder), _files_of(self._plans[self._rank].items), save_distributed=True
        )
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


def _files_of(items: list[WriteItem]) -> dict[str, int]:
    """Return the number of the file, from 1, that each tensor of a share is written to."""
    numbers: dict[str, int] = {}
    number, held = 1, 0
    for item in items:
        size = item.tensor_storage_size() or 0
        if held and held + size > LARGEST:
            number, held = number + 1, 0
        numbers[item.index.fqn] = number
        held += size
    return numbers
