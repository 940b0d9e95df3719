"""What is wrong with the machines of a run, before it starts: facts of every rank, compared.

    examine     in every rank: gather facts of its machine, its GPU, its folders and its links to the others
    diagnose    from the facts of all ranks to what is wrong with them, worst first; without torch

Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kapelle.runs.rank_log import telling_variables
from kapelle.runtime.machine import HAS_LIMITS, versions_of
from kapelle.runtime.ranks import Ranks

GB = 10**9


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that a rank would use."""

    name: str
    identity: str
    """The same for two ranks on one GPU."""
    total: int
    free: int
    """Bytes that no process holds."""


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A folder that all machines have to share, as one rank sees it."""

    path: str
    problem: str = ""
    """Why it cannot be used; empty where it can."""
    seen: float | None = 0.0
    """Seconds until this rank saw what rank 0 wrote there; None if it did not."""
    free: int = 0
    kind: str = ""
    """Of its file system, as `ext4` or `nfs4`; empty where the system does not say."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank, and its machine."""

    rank: int
    local: int
    """Number of the rank on its machine."""
    host: str
    versions: Mapping[str, str | None]
    source: str
    """Digest of kapelle's source."""
    address: str
    """To which the machine's own name resolves; empty if to none."""
    interfaces: tuple[str, ...]
    variables: Mapping[str, str]
    """Environment variables on which communication depends, see `rank_log.telling_variables`."""
    cores: int
    threads: int
    """Of torch, in this process."""
    load: float
    """Processes of the machine that ran or waited, averaged over a minute."""
    memory: int
    """Bytes that this process may use, of the machine or of its container."""
    memory_free: int
    shared_memory: int
    """Free bytes in /dev/shm; -1 where there is none."""
    files: int
    """Files that this process may open, at most."""
    gpus: int
    """CUDA devices that this process sees."""
    gpu: Gpu | None = None
    clock: float = 0.0
    """By how much this machine's clock is ahead of that of rank 0."""
    latency: float | None = None
    """Seconds of an exchange with the next rank, there and back; None for a process that is alone."""
    bandwidth: float | None = None
    """Bytes a second to the next rank, through the processor's memory (gloo)."""
    reduction: float | None = None
    """Bytes a second of a sum over the GPUs of all ranks (NCCL); None unless every rank has one."""
    folders: tuple[SharedFolder, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RankFacts:
        """Return what `to_json` wrote."""
        gpu = None if row["gpu"] is None else Gpu(**row["gpu"])
        folders = tuple(SharedFolder(**each) for each in row["folders"])
        return cls(**{**row, "interfaces": tuple(row["interfaces"]), "gpu": gpu, "folders": folders})


# -------- RankFacts of this rank

PACKAGES = ("kapelle", "torch", "transformers", "tokenizers", "safetensors", "numpy", "ray", "vllm")
"""Packages of which all machines have to have the same version, or none."""
MESSAGE = 1 << 23
"""Bytes that are sent to measure a link."""
REDUCED = 1 << 28
"""Bytes that are summed over the GPUs."""
ROUNDS = 5


def examine(ranks: Ranks, folders: Sequence[Path], patience: float) -> list[RankFacts]:
    """Return the facts of all ranks; every rank calls it at the same time.

    A rank waits `patience` seconds for what rank 0 writes into each of the `folders`, which the machines have to share.
    """
    own = _facts(ranks)
    clock, (latency, bandwidth) = _clock(ranks), _link(ranks)
    every = [each == b"1" for each in ranks.all_gather("GPUs", lambda: b"1" if own.gpu else b"0")]
    seen = tuple(_folder(ranks, path, patience) for path in folders)
    row = own.to_json() | {
        "clock": clock,
        "latency": latency,
        "bandwidth": bandwidth,
        "reduction": _reduction(ranks, own.local) if all(every) and ranks.size > 1 else None,
        "folders": [asdict(each) for each in seen],
    }
    return [
        RankFacts.from_json(json.loads(each))
        for each in ranks.all_gather("facts", lambda: json.dumps(row).encode())
    ]


def _facts(ranks: Ranks) -> RankFacts:
    import torch

    gpu, local = None, int(os.environ.get("LOCAL_RANK", ranks.rank))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local < found:
        properties = torch.cuda.get_device_properties(local)
        free, total = torch.cuda.mem_get_info(local)
        identity = str(getattr(properties, "uuid", local))  # builds for other makers' cards have none
        gpu = Gpu(properties.name, f"{socket.gethostname()} {identity}", total, free)
    versions = versions_of(PACKAGES) | {"CUDA": torch.version.cuda, "driver": _driver()}
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
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        variables=telling_variables(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        memory=memory,
        memory_free=memory_free,
        shared_memory=_free("/dev/shm"),  # noqa: S108 - where NCCL and Ray put what processes share
        files=_files(),
        gpus=found,
        gpu=gpu,
    )


def _source() -> str:
    """Return a digest of kapelle's own files: the same version may be installed from different source."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None where there is none."""
    with suppress(OSError, subprocess.SubprocessError):
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603 - fixed words
        return answer.stdout.split("\n")[0].strip() or None
    return None


def _address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _memory() -> tuple[int, int]:
    """Return the bytes that this process may use, and those that are free: the machine's, or its container's if that is less."""
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


def _files() -> int:
    if not HAS_LIMITS:
        return 0
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 30 if most == resource.RLIM_INFINITY else most


def _clock(ranks: Ranks) -> float:
    """Return by how many seconds this machine's clock is ahead of rank 0's; exact to the time of an exchange."""
    ahead = []
    for _ in range(ROUNDS):
        # All ranks leave an exchange at about the same moment, and then read their clocks.
        ranks.all_gather("before the clock", bytes)
        every = [float(each) for each in ranks.all_gather("clock", lambda: repr(time.time()).encode())]
        ahead.append(every[ranks.rank] - every[0])
    return round(statistics.median(ahead), 4)


def _link(ranks: Ranks) -> tuple[float | None, float | None]:
    """Return the seconds of an exchange with the next rank, and bytes a second to it; one pair of ranks measures at a time."""
    if ranks.size == 1:
        return None, None
    import torch
    from torch import distributed

    small, large = torch.zeros(1, dtype=torch.uint8), torch.zeros(MESSAGE, dtype=torch.uint8)
    latency = bandwidth = None
    for first in range(ranks.size):
        second = (first + 1) % ranks.size
        ranks.all_gather("before a link", bytes)
        if ranks.rank not in (first, second):
            continue
        spent = {}
        for name, data in (("small", small), ("large", large)):
            times = []
            for _ in range(ROUNDS):
                begun = time.perf_counter()
                for sender, receiver in ((first, second), (second, first)):
                    if ranks.rank == sender:
                        distributed.send(data, receiver)
                    else:
                        distributed.recv(data, sender)
                times.append(time.perf_counter() - begun)
            spent[name] = min(times)
        if ranks.rank == first:
            latency = spent["small"]
            bandwidth = 2 * MESSAGE / max(spent["large"] - spent["small"], 1e-9)
    ranks.all_gather("after the links", bytes)
    return latency, bandwidth


def _reduction(ranks: Ranks, device: int) -> float:
    """Return the bytes a second of a sum over all ranks' GPUs, of the second of two: the first one connects them."""
    import torch

    data, spent = torch.zeros(REDUCED // 4, device=f"cuda:{device}"), 0.0
    for _ in range(2):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        ranks.add([data])
        torch.cuda.synchronize(device)
        spent = time.perf_counter() - begun
    return REDUCED / spent


def _folder(ranks: Ranks, path: Path, patience: float) -> SharedFolder:
    """Let rank 0 write a file into a folder, or into the nearest one that exists, and see when it appears here."""

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

    told = json.loads(ranks.all_gather("folder", lambda: begin() if ranks.rank == 0 else b"")[0])
    if told["problem"]:
        return SharedFolder(str(path), told["problem"], None)
    mark = [path.absolute(), *path.absolute().parents][told["levels"]] / told["mark"]
    begun, seen = time.monotonic(), None
    while seen is None and time.monotonic() - begun < patience:
        with suppress(OSError):
            os.listdir(mark.parent)  # noqa: PTH208 - a network's file system looks again
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
    return SharedFolder(str(path), problem, seen, _free(str(mark.parent)), _file_system(mark.parent))


def _file_system(path: Path) -> str:
    """Return the kind of a folder's file system."""
    found = ("", "")
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines():
            place, kind = line.split(" ")[1:3]
            if path.is_relative_to(place.encode().decode("unicode_escape")) and len(place) >= len(found[0]):
                found = place, kind
    return found[1]


# -------- What is wrong with them


@dataclass(frozen=True, slots=True)
class MachineFault:
    """Something that breaks a run (`wrong`), or may slow it down or surprise (otherwise)."""

    wrong: bool
    what: str
    mend: str


SKEW = 1.0
"""Seconds by which clocks may differ."""
LEAST_DISK = 5 * GB
LEAST_MEMORY = 2 * GB
LEAST_SHARED = 10**9
LEAST_FILES = 4096
_QUIET = ("NCCL_DEBUG", "CUDA_VISIBLE_DEVICES")
"""Beginnings of variables that may differ from rank to rank."""


def diagnose(every: Sequence[RankFacts]) -> list[MachineFault]:
    """Return what is wrong with the ranks, by their facts: first what breaks a run, then what may slow it down."""
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
        if package == "driver":
            continue  # machines of a cluster are updated one after another, and CUDA does not mind
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
            f"{_ranks(none)} see no GPU, {_ranks(some)} do",
            "Look at `nvidia-smi` and CUDA_VISIBLE_DEVICES there, and whether torch is a build for CUDA.",
        )
    for each in some:
        if each.gpu is None:
            yield MachineFault(
                True,
                f"rank {each.rank} is number {each.local} on {each.host}, which has {each.gpus} GPUs",
                "Start one process for each GPU (`--nproc-per-node`), or show more of them in CUDA_VISIBLE_DEVICES.",
            )
    shared: dict[str, list[RankFacts]] = {}
    for each in some:
        if each.gpu is not None:
            shared.setdefault(each.gpu.identity, []).append(each)
            held = each.gpu.total - each.gpu.free
            if held > max(2 * GB, each.gpu.total // 10):
                yield MachineFault(
                    False,
                    f"on rank {each.rank} ({each.host}) others hold {_size(held)} of the GPU's {_size(each.gpu.total)}",
                    "End them (`nvidia-smi` lists them), or expect less room.",
                )
    for together in shared.values():
        if len(together) > 1:
            yield MachineFault(
                True,
                f"{_ranks(together)} use the same GPU of {together[0].host}",
                "Give each rank its own: LOCAL_RANK counts the processes of a machine.",
            )


def _of_network(every: Sequence[RankFacts]) -> Iterator[MachineFault]:
    several = len({each.host for each in every}) > 1
    for each in _one_of_each_machine(every):
        if several and (not each.address or each.address.startswith("127.")):
            where = f"to {each.address}, itself" if each.address else "to nothing"
            yield MachineFault(
                "GLOO_SOCKET_IFNAME" not in each.variables,
                f"the name {each.host} resolves {where} on its own machine, so that others may be told a wrong address",
                "Mend /etc/hosts there, or name the network interface in GLOO_SOCKET_IFNAME.",
            )
    misnamed = set()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for each in every:
            missing = _missing_interfaces(each.variables.get(variable, ""), each.interfaces)
            if missing and (variable, each.host) not in misnamed:
                misnamed |= {variable, (variable, each.host)}
                yield MachineFault(
                    True,
                    f"{variable} names {missing} on rank {each.rank}, but {each.host} has {', '.join(each.interfaces)}",
                    "Name one of these, or leave the variable out.",
                )
    for each in every:
        if several and abs(each.clock) > SKEW:
            yield MachineFault(
                False,
                f"the clock of rank {each.rank} ({each.host}) is {abs(each.clock):.1f} s "
                f"{'ahead of' if each.clock > 0 else 'behind'} that of rank 0",
                "Let all machines keep their time by NTP; logs and files would be dated wrongly.",
            )
    for name in sorted({name for each in every for name in each.variables}):
        if not name.startswith(_QUIET) and name not in misnamed:
            differing = _by_value(every, lambda each, of=name: each.variables.get(of, "not set"))  # type: ignore[misc]
            if differing:
                yield MachineFault(
                    False, f"{name} differs: {differing}", "Export the same value on every machine."
                )
    speeds = [each.bandwidth for each in every if each.bandwidth is not None]
    if len(speeds) > 2:
        usual = statistics.median(speeds)
        for each in every:
            if each.bandwidth is not None and each.bandwidth < usual / 4:
                following = every[(each.rank + 1) % len(every)]
                yield MachineFault(
                    False,
                    f"the link from rank {each.rank} ({each.host}) to rank {following.rank} ({following.host}) carries "
                    f"{each.bandwidth / 1e6:.0f} MB/s, others {usual / 1e6:.0f}",
                    "Look which interface is used there (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and at the cable.",
                )


def _of_folders(every: Sequence[RankFacts]) -> Iterator[MachineFault]:
    for number, folder in enumerate(every[0].folders):
        unusable = [each for each in every if each.folders[number].problem]
        if folder.seen is None:
            yield MachineFault(
                True, f"{folder.path}: {folder.problem}", "Let this user write there, or name another folder."
            )
            continue
        for each in unusable:
            yield MachineFault(
                True,
                f"{folder.path}: on rank {each.rank} ({each.host}) {each.folders[number].problem}",
                "Let the same user write there from every machine.",
            )
        unseen = [each for each in every if each.folders[number].seen is None]
        if unseen:
            yield MachineFault(
                True,
                f"{folder.path} is another folder on {_ranks(unseen)}: what rank 0 wrote there did not appear in "
                f"{unseen[0].folders[number].path}",
                "Mount the same file system under the same path on every machine, or name a folder on one.",
            )
        if 0 <= folder.free < LEAST_DISK:
            yield MachineFault(
                False,
                f"{folder.path} has {_size(folder.free)} left",
                "Make room for checkpoints and episodes.",
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
                f"{each.host} has {_size(each.memory_free)} of {_size(each.memory)} of memory left for {len(here)} ranks",
                "End other programs, or raise the container's limit; `kapelle plan` says what a run needs.",
            )
        if 0 <= each.shared_memory < LEAST_SHARED and (len(here) > 1 or each.versions.get("ray")):
            yield MachineFault(
                each.gpus > 1 and len(here) > 1,
                f"the shared memory (/dev/shm) of {each.host} has {_size(each.shared_memory)} left, which ranks of one machine share data through",
                "Start the container with `--shm-size=8g` or `--ipc=host`.",
            )
        if 0 < each.files < LEAST_FILES:
            yield MachineFault(
                False,
                f"a process may open {each.files} files on {each.host}",
                "Raise the hard limit (`ulimit -Hn 65536`); episodes hold connections and pipes.",
            )


def _one_of_each_machine(every: Sequence[RankFacts]) -> list[RankFacts]:
    return list({each.host: each for each in reversed(every)}.values())[::-1]


def _by_value(every: Sequence[RankFacts], value: Callable[[RankFacts], str]) -> str:
    """Return which ranks have which value, in words; empty where all have the same."""
    ranks: dict[str, list[RankFacts]] = {}
    for each in every:
        ranks.setdefault(value(each), []).append(each)
    if len(ranks) < 2:
        return ""
    return "; ".join(f"{what} on {_ranks(those)}" for what, those in ranks.items())


def _ranks(those: Sequence[RankFacts]) -> str:
    """Return ranks in words: `rank 3 (node1)`, `ranks 0 to 3, 6`."""
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


def _missing_interfaces(named: str, there: Sequence[str]) -> str:
    """Return the names that match no interface: NCCL takes beginnings of names, `=` before whole names, `^` before those to avoid."""
    if not named or named.startswith("^"):
        return ""
    whole, names = named.startswith("="), named.removeprefix("=").split(",")
    missing = [
        name for name in names if not any(each == name if whole else each.startswith(name) for each in there)
    ]
    return ", ".join(missing) if len(missing) == len(names) else ""


def _size(count: int) -> str:
    return f"{count / GB:.1f} GB"
