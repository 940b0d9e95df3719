"""The interface of the places where tasks run: sandboxes of this machine, containers, or a remote service.

    Provider.check → prepare(task) → start(task) → TaskSandbox: put files, run commands, take files, stop

To add a provider, write a class with the methods of `Provider` and add it to `attempt.PROVIDERS` and to the setting
`environment.sandbox`. All rules of grading stay in `attempt`, which treats everything that a sandbox returns as data of the
agent, with one exception: `take` after the tests of a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kapelle.environments.task_folders.forms import TaskFolder

SETUP_S = 30.0
"""Additional time in seconds for copying files, beyond the time limits of a task."""
LEAST_MB = 256
"""Minimum memory limit in mebibytes, which is needed to unpack the files of a task."""
MOST_FILES = 4096
"""Maximum number of files at the end of an episode."""
Entries = list[list[Any]]
"""Files as lists of path, kind, mode and content. The kinds are `file`, whose content is base64, `link`, whose content is the
target, and `folder`, whose content is empty."""


@dataclass(frozen=True, slots=True)
class Room:
    """The limits and contents of the sandboxes."""

    memory_mb: int
    """Maximum memory in mebibytes of all programs and files."""
    disk_mb: int
    """Maximum total size in mebibytes of the files in one folder."""
    left_mb: int
    """Maximum total size in mebibytes of the files at the end of an episode."""
    processes: int
    packages: tuple[str, ...]
    """Installed Python packages that are available in the sandboxes, together with their dependencies."""
    visible: tuple[str, ...] = ()
    """Additional files and folders of the host that the programs of the agent may read."""
    files: tuple[str, ...] = ()
    """Files of the programs of the agent, which are copied to `AGENT`."""
    socket: str | None = None
    """Path of a Unix socket of the host for calls to the policy."""
    address_mb: int | None = None
    """Maximum address space in mebibytes of each program. With None, the limit is `memory_mb`."""
    sandbox: str = "bubblewrap"
    """The name of the provider of the sandboxes."""

    def memory_bytes(self, task: TaskFolder) -> int:
        """Return the maximum memory in bytes of a sandbox for a task."""
        return max(min(task.memory_mb, self.memory_mb), LEAST_MB) << 20


class WorkspaceClosed(Exception):
    """Raised if the sandbox of the agent has stopped; the message gives the reason."""


class TaskSandbox(Protocol):
    """A started sandbox, which runs programs as an unprivileged user without network access.

    Every method except `stop` raises WorkspaceClosed if the programs have ended the sandbox or reached a limit of it, and
    SandboxError if the provider has failed.
    """

    def put(self, entries: Entries, *, fixed: bool = False) -> None:
        """Write files, folders and links, with the links last; with `fixed`, no program can change them."""
        ...

    def run(
        self, command: Sequence[str], cwd: str, env: Mapping[str, str], seconds: float, most: int
    ) -> tuple[int | None, str]:
        """Run a command; return its exit code (None if it exceeds `seconds`) and at most about `most` bytes of its output.

        Background processes of the command continue to run, and cannot make this method wait.
        """
        ...

    def take(self, folders: Sequence[str], most_bytes: int, most_files: int) -> Entries | str:
        """Kill all programs, check that none is left, and then return the entries below the folders.

        Returns the name of the exceeded limit (`bytes` or `files`) if there are too many bytes or entries.
        """
        ...

    def stop(self) -> None:
        """Stop the sandbox and free everything that belongs to it; repeated calls have no effect."""
        ...


class Provider(Protocol):
    """A place where tasks run."""

    def check(self, room: Room) -> None:
        """Raise ConfigError or SandboxError, with what to install or change, if this provider cannot be used."""
        ...

    def prepare(self, task: TaskFolder) -> TaskFolder:
        """Build or pull the image of a task, and return the task with its working directory, folders and image.

        Raises SandboxError with the provider's message if this fails.
        """
        ...

    def start(self, task: TaskFolder, room: Room, *, tests: bool) -> TaskSandbox:
        """Start a sandbox whose folders `task.folders` are empty and writable, for an agent or for the tests of a task.

        With `tests`, programs can also write to `VERIFIER`. Raises SandboxError if the sandbox cannot start.
        """
        ...
