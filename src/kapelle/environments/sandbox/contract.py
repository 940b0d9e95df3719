"""The contract of sandboxes: a run has limits, and its result consists of bytes and facts.

Sizes are in bytes, times in seconds. A result records what happened and is never a verdict, because the exit code and
everything that was printed are claims of the program that ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kapelle.errors import SandboxError

LimitName = Literal["wall", "cpu", "memory", "output", "files"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run. They apply to all processes of the run together, unless stated otherwise."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * 1024**2
    """Memory of all processes and the work directory together; also the address space of each process, unless `address_bytes` is set."""
    address_bytes: int | None = None
    """Address space of each process, for programs such as Node and Go that reserve more than they use; None means
    `memory_bytes`."""
    processes: int = 32
    """Number of processes and threads that may be alive at the same time."""
    output_bytes: int = 1024**2
    """Size of standard output and standard error together."""
    file_bytes: int = 32 * 1024**2
    """Size of a single file, and of the entire work directory."""
    files: int = 2048
    """Number of files and directories that may exist at the same time."""
    patience: float = 0.0
    """Maximum extra time, as a multiple of `wall_s`, that compensates for the time in which a program waits for a core. With 0, only
    the clock counts, so that a busy machine ends programs that would finish on an idle machine."""
    unexplained_bytes: int = 256 * 1024**2
    """Maximum amount of memory that the machine may lose to its kernel while the run is in the kernel, if no cgroup limits the
    run. It is far above the variation caused by other work."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None and name == "address_bytes":
                continue
            if not (value > 0 or (name == "patience" and value == 0)):
                raise SandboxError(f"The sandbox limit `{name}` is {value}; it must be greater than 0.")


@dataclass(frozen=True, slots=True)
class Result:
    """The record of one run."""

    stdout: bytes
    stderr: bytes
    exit_code: int | None
    """None if a signal or a limit ended the program."""
    signal: int | None
    """Number of the signal that ended the program, if no limit did; a program can imitate a signal by exiting
    with 128 + its number."""
    limit: LimitName | None
    """The limit at which the run was killed; None if it ended by itself."""
    wall_s: float
    cpu_s: float
    """User and system time of all processes that the run started."""
    peak_memory_bytes: int
    """Largest memory use of all processes and the work directory together, sampled every 20 ms; 0 if the run was
    shorter than that or if the backend cannot sample."""

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit code 0. This is never a verdict on what the program computed."""
        return self.limit is None and self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of protection, and whether this machine provides it."""

    name: str
    required: bool
    present: bool
    detail: str
    """The effect of the layer, or why the layer is missing and how to get it."""


def check_files(files: Mapping[str, bytes], limits: Limits) -> None:
    """Raise SandboxError if the files do not fit into a work directory with these limits."""
    for path in files:
        parts = path.split("/")
        if not path or "\0" in path or any(part in {"", ".", ".."} for part in parts):
            raise SandboxError(
                f"The file name {path!r} is invalid. Use a relative path without empty parts, `.`, `..` or NUL characters."
            )
    size = sum(len(content) + 4096 for content in files.values())
    if size > limits.file_bytes or len(files) > limits.files:
        raise SandboxError(
            f"{len(files)} files with a total of {size:,} bytes do not fit into the work directory "
            f"(limits: {limits.files} files, {limits.file_bytes:,} bytes). Raise `files` or `file_bytes`."
        )
