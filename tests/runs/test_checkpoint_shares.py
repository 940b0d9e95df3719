"""Each of several ranks writes its share of a checkpoint; any number of processes reads all of it, bitwise identical."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.support.ranks import run_ranks
from tests.support.tiny import same_bits
from torch import Tensor

from kapelle.errors import CheckpointError
from kapelle.runs import checkpoint
from kapelle.runs.checkpoint import Contents, Share, described, read_shares

NAN = float("nan")


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a.b'": torch.randn(64),
        "bytes": torch.arange(200, dtype=torch.uint8),
        "half": torch.randn(4, 4).bfloat16(),
        "none": torch.zeros(0, 3),
        "odd": torch.tensor([0.0, -0.0, NAN, float("inf"), 1e-45]),
        "step": torch.tensor(7.0),
        "wide": torch.randn(5, 3, dtype=torch.float64),
    }


def read_back(folder: Path) -> dict[str, Tensor]:
    found = {name: torch.empty_like(tensor, device="cpu") for name, tensor in described(folder).items()}
    read_shares(folder, found)
    return {name: found[name] for name in sorted(found)}


def bits(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8)) for name, t in tensors.items()}


def shares(folder: Path) -> list[list[str]]:
    """Return the names of the tensors in each file."""
    found = []
    for file in sorted(folder.iterdir()):
        with safe_open(file, framework="pt") as opened:
            found.append(sorted(opened.keys()))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_common_tensors_are_written_once_and_read_bitwise_identical(tmp_path: Path, ranks: int) -> None:
    listed = [Share(tensors(), rank, ranks).write(tmp_path) for rank in range(ranks)]
    assert sorted(path for paths in listed for path in paths) == sorted(tmp_path.iterdir())
    assert len(listed) == ranks
    assert all(listed)
    assert sorted(name for names in shares(tmp_path) for name in names) == sorted(tensors())
    assert same_bits(bits(read_back(tmp_path)), bits(tensors()))


def test_a_rank_that_cannot_find_the_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Rank 1"):
        Share(tensors(), 1, 2).write(tmp_path / "elsewhere")


def saved_in_parts(place: Path, rows: int) -> Any:
    """Save tensors of which each rank holds some rows, and others that all hold; read the rows back."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from kapelle.runtime.rank_group import ranks_here

    ranks = ranks_here(60.0)
    mesh = init_device_mesh("cpu", (ranks.size,))
    whole = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
    parted = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    train = {"w": {"rows": parted, "step": torch.tensor(2.0)}, "plain": 1}
    state: dict[str, Any] = {"train": train}
    if ranks.rank == 0:
        state["loop"] = {"step": 1, "random": torch.arange(3)}
    folder = checkpoint.save(place, 1, Contents(state, ranks, ["train"]), ranks=ranks)
    own = torch.empty_like(parted)
    read = checkpoint.load(folder, lambda name, saved: own if saved.shape == own.shape else None)
    held = torch.equal(read["train"]["w"]["rows"].to_local(), parted.to_local())
    poison = checkpoint.poison_in(folder)
    parted.to_local()[:1] = NAN  # of every rank that has rows
    state = {"train": {"w": {"rows": parted}}}
    return (
        held,
        poison,
        checkpoint.poison_in(checkpoint.save(place, 2, Contents(state, ranks, ["train"]), ranks=ranks)),
    )


@pytest.mark.long
@pytest.mark.slow
def test_ranks_save_their_rows_and_one_process_reads_all(tmp_path: Path) -> None:
    answers = run_ranks(3, saved_in_parts, tmp_path, 2)  # fewer rows than ranks
    assert [answer[:2] for answer in answers] == [(True, None)] * 3
    assert all("of train.w.rows are not finite" in answer[2] for answer in answers)
    folder = tmp_path / "00000001"
    assert json.loads((folder / "manifest.json").read_text())["format"] == 2
    state = checkpoint.load(folder)
    assert same_bits(
        state["train"]["w"], {"rows": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(2.0)}
    )
    assert (state["train"]["plain"], state["loop"]["step"]) == (1, 1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
