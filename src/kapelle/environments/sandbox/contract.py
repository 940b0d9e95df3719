"""The data types of sandboxes: the limits of a run and its result.

Sizes are in bytes and times are in seconds. A result records what happened and is never a verdict, because the exit code and
the output are claims of the program that ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kapelle.errors import SandboxError

LimitName = Literal["wall", "cpu", "memory", "output", "files"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run, which apply to all processes of the run together unless stated otherwise."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * 1024**2
    """Maximum memory in bytes of all processes and the work directory together. Unless `address_bytes` is set, this is also the
    maximum address space of each process."""
    address_bytes: int | None = None
    """Maximum address space in bytes of each process. Set this limit for programs such as Node and Go, which reserve more
    memory than they use. With None, `memory_bytes` is the limit."""
    processes: int = 32
    """Maximum number of processes and threads that may exist at the same time."""
    output_bytes: int = 1024**2
    """Maximum size in bytes of standard output and standard error together."""
    file_bytes: int = 32 * 1024**2
    """Maximum size in bytes of a single file and of the entire work directory."""
    files: int = 2048
    """Maximum number of files and directories that may exist at the same time."""
    patience: float = 0.0
    """Maximum extra time, as a multiple of `wall_s`, that compensates for the time in which a program waits for a CPU core.
    With 0, there is no compensation, so a busy machine may stop programs that would finish on an idle machine."""
    unexplained_bytes: int = 256 * 1024**2
    """Maximum memory in bytes that the machine may lose to its kernel while the run executes in the kernel. This limit applies
    only if no cgroup limits the run. The default is far above the variation caused by other work."""

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
    """The exit code of the program, or None if a signal or a limit ended the program."""
    signal: int | None
    """Number of the signal that ended the program, or None if no signal or a limit ended it. A program can imitate a signal by
    exiting with code 128 plus the number of the signal."""
    limit: LimitName | None
    """Name of the limit at which the run was killed, or None if no limit was reached."""
    wall_s: float
    cpu_s: float
    """User and system CPU time in seconds of all processes that the run started."""
    peak_memory_bytes: int
    """Maximum memory in bytes of all processes and the work directory together, sampled every 20 ms. The value is 0 if the run
    was shorter than one sampling interval or if the backend cannot measure memory."""

    @property
    def ok(self) -> bool:
        """Whether the program exited with code 0 and no limit was reached. This is never a verdict on what the program computed."""
        return self.limit is None and self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of protection, and whether this machine provides it."""

    name: str
    required: bool
    present: bool
    detail: str
    """The effect of the layer, or the reason why the layer is missing and how to provide it."""


def check_files(files: Mapping[str, bytes], limits: Limits) -> None:
    """Raise SandboxError if the files have invalid names or do not fit into a work directory with the given limits."""
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
