"""Faults of machines, each put into the facts of four healthy ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kapelle.cluster.doctor import Gpu, RankFacts, SharedFolder, diagnose, examine
from kapelle.runtime.ranks import ALONE

GB = 10**9
VERSIONS = {
    "python": "3.12.3",
    "kapelle": "0.1.0",
    "torch": "2.13.0",
    "ray": None,
    "CUDA": "13.0",
}


def healthy(gpus: int = 2) -> list[RankFacts]:
    """Two machines, node0 and node1, with two ranks each."""
    return [
        RankFacts(
            rank=rank,
            local=rank % 2,
            host=f"node{rank // 2}",
            versions=VERSIONS,
            source="abc",
            address=f"10.0.0.{rank // 2}",
            variables={"NCCL_SOCKET_IFNAME": "eth", "NCCL_DEBUG": f"INFO{rank}"},
            cores=16,
            threads=8,
            memory=256 * GB,
            memory_free=200 * GB,
            shared_memory=64 * GB,
            gpus=gpus,
            gpu=Gpu("H100", f"node{rank // 2} {rank}", 80 * GB, 79 * GB) if gpus else None,
            folders=(
                SharedFolder("/shared/runs", "", 0.1 * rank, 900 * GB),
                SharedFolder("/shared/cache", "", 0.0, 900 * GB),
            ),
        )
        for rank in range(4)
    ]


@pytest.mark.parametrize("gpus", [0, 2])
def test_healthy_machines_have_no_finding(gpus: int) -> None:
    assert diagnose(healthy(gpus)) == []


def planted(rank: int, **changed: Any) -> list[RankFacts]:
    """The healthy ranks, one of them changed."""
    every = healthy()
    every[rank] = replace(every[rank], **changed)
    return every


def machine(host: str, **changed: Any) -> list[RankFacts]:
    """The healthy ranks, those of one machine changed."""
    return [replace(each, **changed) if each.host == host else each for each in healthy()]


def folder(rank: int, **changed: Any) -> list[RankFacts]:
    """The healthy ranks, one with other facts about the run directory."""
    every = healthy()
    first, *others = every[rank].folders
    every[rank] = replace(every[rank], folders=(replace(first, **changed), *others))
    return every


@pytest.mark.parametrize(
    ("every", "wrong", "what"),
    [
        (planted(3, versions={**VERSIONS, "torch": "2.12.1"}), True, "torch differs: 2.13.0 on ranks 0 to 2; 2.12.1 on rank 3 (node1)"),
        (planted(2, gpus=0, gpu=None), True, "no GPU is visible to rank 2 (node1)"),
        (planted(3, local=4, gpu=None), True, "rank 3 has the local rank 4 on node1, but it sees only 2 GPUs"),
        (planted(3, gpu=Gpu("H100", "node1 2", 80 * GB, 79 * GB)), True, "ranks 2, 3 use the same GPU of node1"),
        (planted(0, gpu=Gpu("H100", "node0 0", 80 * GB, 50 * GB)), False, "on rank 0 (node0) other processes hold 30.0 GB of the GPU's 80.0 GB"),
        (machine("node1", address="127.0.1.1"), True, "node1 resolves its own name to 127.0.1.1"),
        (planted(2, variables={}), False, "NCCL_SOCKET_IFNAME differs: eth on ranks 0, 1, 3; not set on rank 2 (node1)"),
        (folder(2, seen=None), True, "/shared/runs is not shared with rank 2 (node1)"),
        (folder(3, problem="it cannot be written: Permission denied"), True, "on rank 3 (node1) it cannot be written"),
        (folder(0, problem="rank 0 cannot write there: Read-only file system", seen=None), True, "/shared/runs: rank 0 cannot write there"),
        (folder(0, free=1 * GB), False, "/shared/runs has 1.0 GB left"),
        (machine("node0", threads=32), False, "2 ranks on node0 compute with 64 threads on 16 cores"),
        (machine("node1", memory_free=3 * GB), False, "node1 has 3.0 GB of 256.0 GB memory left for 2 ranks"),
        (machine("node0", shared_memory=64 << 20), True, "the shared memory (/dev/shm) of node0"),
    ],
)  # fmt: skip
def test_each_fault_is_found_and_named(every: Sequence[RankFacts], wrong: bool, what: str) -> None:
    found = diagnose(every)
    assert [(each.wrong, what in each.what) for each in found] == [(wrong, True)], found
    assert found[0].fix.endswith((".", ")"))


def test_severe_findings_come_first() -> None:
    found = diagnose(planted(2, variables={}, source="abd"))
    assert [each.wrong for each in found] == [True, False]


def test_this_machine_is_examined(tmp_path: Path) -> None:
    (found,) = examine(ALONE, [tmp_path / "not" / "there", tmp_path], 1.0)
    assert RankFacts.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.versions["torch"] is not None
    assert found.memory > found.memory_free > 0
    assert all(each.seen is not None and not each.problem and each.free > 0 for each in found.folders)
    assert list(tmp_path.iterdir()) == []
    assert not any(each.wrong for each in diagnose([found]))


def test_an_unwritable_folder_is_an_error() -> None:
    (found,) = examine(ALONE, [Path("/proc/runs")], 1.0)
    assert [each.what.split(":")[0] for each in diagnose([found]) if each.wrong] == ["/proc/runs"]
