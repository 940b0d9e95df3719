"""Find problems of a run's machines before the run starts, by comparing information about the machine of each rank.

    examine     Collect information about the machine, the GPU and the folders of a rank. It runs in every rank.
    diagnose    Return a list of problems, worst first, from the information of all ranks. It does not need torch.

Sizes are given in bytes, and times in seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kapelle.runs.rank_log import telling_variables
from kapelle.runtime.machine import versions_of
from kapelle.runtime.ranks import Ranks

GB = 10**9


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that a rank would use."""

    name: str
    identity: str
    """Identifier of the GPU. Two ranks that use the same GPU have the same identifier."""
    total: int
    free: int
    """Number of bytes of GPU memory that no process uses."""


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A folder that all machines must share, from the point of view of one rank."""

    path: str
    problem: str = ""
    """Reason why the rank cannot use the folder; empty if the rank can use it."""
    seen: float | None = 0.0
    """Time in seconds until the rank saw the file that rank 0 wrote to the folder, or None if the rank never saw it."""
    free: int = 0


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Information about one rank and its machine."""

    rank: int
    local: int
    """Index of the rank among the ranks on its machine."""
    host: str
    versions: Mapping[str, str | None]
    source: str
    """Hash of the source code of kapelle."""
    address: str
    """IP address to which the machine's own host name resolves; empty if the name does not resolve."""
    variables: Mapping[str, str]
    """Environment variables that affect the communication between ranks; see `rank_log.telling_variables`."""
    cores: int
    threads: int
    """Number of threads that torch uses in this process."""
    memory: int
    """Memory limit in bytes: the memory of the machine, or the limit of the container if it is smaller."""
    memory_free: int
    shared_memory: int
    """Number of free bytes in /dev/shm, or -1 if this folder does not exist."""
    gpus: int
    """Number of CUDA devices that this process can use."""
    gpu: Gpu | None = None
    folders: tuple[SharedFolder, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the information as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RankFacts:
        """Return the information from a JSON object that `to_json` wrote."""
        gpu = None if row["gpu"] is None else Gpu(**row["gpu"])
        folders = tuple(SharedFolder(**each) for each in row["folders"])
        return cls(**{**row, "gpu": gpu, "folders": folders})


# -------- Facts of this rank

PACKAGES = ("kapelle", "torch", "transformers", "tokenizers", "safetensors", "numpy", "ray", "vllm")
"""Packages that must have the same version on all machines."""


def examine(ranks: Ranks, folders: Sequence[Path], patience: float) -> list[RankFacts]:
    """Collect information about the machine of this rank, and return the information of all ranks.

    All ranks must call this function together.

    The machines must share `folders`. In each folder, every rank waits up to `patience` seconds for a file that rank 0 writes.
    """
    own = replace(_facts(ranks), folders=tuple(_folder(ranks, path, patience) for path in folders))
    return [
        RankFacts.from_json(json.loads(each))
        for each in ranks.all_gather("facts", lambda: json.dumps(own.to_json()).encode())
    ]


def _facts(ranks: Ranks) -> RankFacts:
    import torch

    gpu, local = None, int(os.environ.get("LOCAL_RANK", ranks.rank))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local < found:
        properties = torch.cuda.get_device_properties(local)
        free, total = torch.cuda.mem_get_info(local)
        identity = str(getattr(properties, "uuid", local))  # builds for GPUs of other vendors have none
        gpu = Gpu(properties.name, f"{socket.gethostname()} {identity}", total, free)
    versions = versions_of(PACKAGES) | {"CUDA": torch.version.cuda}
    if found and torch.distributed.is_nccl_available():
        versions["NCCL"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    memory, memory_free = _memory()
    return RankFacts(
        rank=ranks.rank,
        local=local,
        host=socket.gethostname(),
        versions=versions,
        source=_source(),
        address=_address(),
        variables=telling_variables(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory=memory,
        memory_free=memory_free,
        shared_memory=_free("/dev/shm"),  # noqa: S108 - where NCCL and Ray put shared data
        gpus=found,
        gpu=gpu,
    )


def _source() -> str:
    """Return a hash of the source files of kapelle, because two installations of the same version can have different source code."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def _address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _memory() -> tuple[int, int]:
    """Return the total and the free memory in bytes of the machine, or of the container if its memory is smaller."""
    total = free = 0
    with suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        known = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        total, free = known["MemTotal"], known["MemAvailable"]
    with suppress(OSError, ValueError):
        most = int(Path("/sys/fs/cgroup/memory.max").read_text("ascii"))  # "max" where there is no limit
        used = int(Path("/sys/fs/cgroup/memory.current").read_text("ascii"))
        if not total or most < total:
            total, free = most, min(free or most, max(0, most - used))
    return total, free


def _free(path: str) -> int:
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):
        return -1
    return found.f_bavail * found.f_frsize


def _folder(ranks: Ranks, path: Path, patience: float) -> SharedFolder:
    """Measure how long it takes until this rank sees a file that rank 0 writes to a folder (or to its nearest existing parent)."""

    def begin() -> bytes:
        levels, there = 0, path.absolute()
        while not there.is_dir() and there != there.parent:
            levels, there = levels + 1, there.parent
        mark = f".kapelle-{secrets.token_hex(8)}"
        try:
            (there / mark).write_text("0")
        except OSError as error:
            return json.dumps({"problem": f"rank 0 cannot write there: {error.strerror}"}).encode()
        return json.dumps({"problem": "", "mark": mark, "levels": levels}).encode()

    written = json.loads(ranks.all_gather("folder", lambda: begin() if ranks.rank == 0 else b"")[0])
    if written["problem"]:
        return SharedFolder(str(path), written["problem"], None)
    mark = [path.absolute(), *path.absolute().parents][written["levels"]] / written["mark"]
    begun, seen = time.monotonic(), None
    while seen is None and time.monotonic() - begun < patience:
        with suppress(OSError):
            os.listdir(mark.parent)  # noqa: PTH208 - listing makes a network file system refresh its cache
        if mark.exists():
            seen = round(time.monotonic() - begun, 3)
        else:
            time.sleep(0.05)
    problem = ""
    if seen is not None:
        try:
            own = mark.with_name(f"{mark.name}-{ranks.rank}")
            own.write_text(str(ranks.rank))
            own.unlink()
        except OSError as error:
            problem = f"it cannot be written: {error.strerror}"
    ranks.all_gather("folder seen", bytes)
    if ranks.rank == 0:
        mark.unlink(missing_ok=True)
    return SharedFolder(str(path), problem, seen, _free(str(mark.parent)))


# -------- Faults


@dataclass(frozen=True, slots=True)
class MachineFault:
    """A problem that makes a run fail (`wrong`), or that may slow a run down."""

    wrong: bool
    what: str
    fix: str


LEAST_DISK = 5 * GB
LEAST_MEMORY = 2 * GB
LEAST_SHARED = 10**9
_QUIET = ("NCCL_DEBUG", "CUDA_VISIBLE_DEVICES")
"""Prefixes of environment variables that may differ between ranks."""


def diagnose(every: Sequence[RankFacts]) -> list[MachineFault]:
    """Return the problems of the ranks. Problems that make a run fail come first."""
    found = [
        *_of_versions(every),
        *_of_gpus(every),
        *_of_network(every),
        *_of_folders(every),
        *_of_machines(every),
    ]
    return sorted(found, key=lambda each: not each.wrong)


def _of_versions(every: Sequence[RankFacts]) -> Iterator[MachineFault]:
    for package in dict.fromkeys(name for each in every for name in each.versions):
        differing = _by_value(every, lambda each, of=package: str(each.versions.get(of)))  # type: ignore[misc]
        if differing:
            yield MachineFault(
                True, f"{package} differs: {differing}", "Install the same version on every machine."
            )
    if differing := _by_value(every, lambda each: each.source):
        yield MachineFault(
            True, f"kapelle's source differs: {differing}", "Install the same commit on every machine."
        )


def _of_gpus(every: Sequence[RankFacts]) -> Iterator[MachineFault]:
    some, none = [each for each in every if each.gpus], [each for each in every if not each.gpus]
    if some and none:
        yield MachineFault(
            True,
            f"no GPU is visible to {_ranks(none)}, but one is visible to {_ranks(some)}",
            "Check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and whether torch was built for CUDA on these machines.",
        )
    for each in some:
        if each.gpu is None:
            yield MachineFault(
                True,
                f"rank {each.rank} has the local rank {each.local} on {each.host}, but it sees only {each.gpus} GPUs",
                "Start one process for each GPU (`--nproc-per-node`), or list more GPUs in CUDA_VISIBLE_DEVICES.",
            )
    shared: dict[str, list[RankFacts]] = {}
    for each in some:
        if each.gpu is not None:
            shared.setdefault(each.gpu.identity, []).append(each)
            held = each.gpu.total - each.gpu.free
            if held > max(2 * GB, each.gpu.total // 10):
                yield MachineFault(
                    False,
                    f"on rank {each.rank} ({each.host}) other processes hold {_size(held)} of the GPU's {_size(each.gpu.total)}",
                    "End those processes (`nvidia-smi` lists them), or plan with less memory.",
                )
    for together in shared.values():
        if len(together) > 1:
            yield MachineFault(
                True,
                f"{_ranks(together)} use the same GPU of {together[0].host}",
                "Give each rank its own GPU: LOCAL_RANK must number the processes of a machine from 0.",
            )


def _of_network(every: Sequence[RankFacts]) -> Iterator[MachineFault]:
    several = len({each.host for each in every}) > 1
    for each in _one_of_each_machine(every):
        if several and (not each.address or each.address.startswith("127.")):
            where = f"to {each.address}" if each.address else "to no address"
            yield MachineFault(
                "GLOO_SOCKET_IFNAME" not in each.variables,
                f"{each.host} resolves its own name {where}, so other machines may get an incorrect address",
                "Fix /etc/hosts there, or set GLOO_SOCKET_IFNAME to the network interface.",
            )
    for name in sorted({name for each in every for name in each.variables}):
        if not name.startswith(_QUIET):
            differing = _by_value(every, lambda each, of=name: each.variables.get(of, "not set"))  # type: ignore[misc]
            if differing:
                yield MachineFault(
                    False, f"{name} differs: {differing}", "Export the same value on every machine."
                )


def _of_folders(every: Sequence[RankFacts]) -> Iterator[MachineFault]:
    for number, folder in enumerate(every[0].folders):
        unusable = [each for each in every if each.folders[number].problem]
        if folder.seen is None:
            yield MachineFault(
                True,
                f"{folder.path}: {folder.problem}",
                "Give this user write permission, or choose another folder.",
            )
            continue
        for each in unusable:
            yield MachineFault(
                True,
                f"{folder.path}: on rank {each.rank} ({each.host}) {each.folders[number].problem}",
                "Give the same user write permission on every machine.",
            )
        unseen = [each for each in every if each.folders[number].seen is None]
        if unseen:
            yield MachineFault(
                True,
                f"{folder.path} is not shared with {_ranks(unseen)}: a file that rank 0 wrote there did not appear in "
                f"{unseen[0].folders[number].path}",
                "Mount a shared file system under the same path on every machine, or choose a folder on such a file system.",
            )
        if 0 <= folder.free < LEAST_DISK:
            yield MachineFault(
                False,
                f"{folder.path} has {_size(folder.free)} left",
                "Free disk space for checkpoints and episodes.",
            )


def _of_machines(every: Sequence[RankFacts]) -> Iterator[MachineFault]:
    for each in _one_of_each_machine(every):
        here = [other for other in every if other.host == each.host]
        threads = sum(other.threads for other in here)
        if threads > 2 * each.cores:
            yield MachineFault(
                False,
                f"{len(here)} ranks on {each.host} compute with {threads} threads on {each.cores} cores",
                f"Set OMP_NUM_THREADS={max(1, each.cores // len(here))} there.",
            )
        if each.memory and each.memory_free < LEAST_MEMORY * len(here):
            yield MachineFault(
                False,
                f"{each.host} has {_size(each.memory_free)} of {_size(each.memory)} memory left for {len(here)} ranks",
                "End other programs, or raise the container's limit; `kapelle plan` shows how much a run needs.",
            )
        if 0 <= each.shared_memory < LEAST_SHARED and (len(here) > 1 or each.versions.get("ray")):
            yield MachineFault(
                each.gpus > 1 and len(here) > 1,
                f"the shared memory (/dev/shm) of {each.host}, through which its ranks exchange data, has {_size(each.shared_memory)} left",
                "Start the container with `--shm-size=8g` or `--ipc=host`.",
            )


def _one_of_each_machine(every: Sequence[RankFacts]) -> list[RankFacts]:
    return list({each.host: each for each in reversed(every)}.values())[::-1]


def _by_value(every: Sequence[RankFacts], value: Callable[[RankFacts], str]) -> str:
    """Return a string that lists the ranks with each value. The string is empty if all values are equal."""
    ranks: dict[str, list[RankFacts]] = {}
    for each in every:
        ranks.setdefault(value(each), []).append(each)
    if len(ranks) < 2:
        return ""
    return "; ".join(f"{what} on {_ranks(those)}" for what, those in ranks.items())


def _ranks(those: Sequence[RankFacts]) -> str:
    """Return a string such as `rank 3 (node1)` or `ranks 0 to 3, 6`."""
    if len(those) == 1:
        return f"rank {those[0].rank} ({those[0].host})"
    runs: list[list[int]] = []
    for number in sorted(each.rank for each in those):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"ranks {', '.join(parts)}"


def _size(count: int) -> str:
    return f"{count / GB:.1f} GB"
