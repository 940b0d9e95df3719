"""Run programs in containers of Docker, for machines without user namespaces, or with gVisor as the runtime.

A container takes tenths of a second to start, so use this backend only on machines where bubblewrap does not work. The image
must contain `sh`, `tar`, `head` and Python 3.11 or newer. The image must already be present on the machine, because no image is
pulled. The functions of this module also serve the containers of task folders, which Docker or podman runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kapelle.environments.sandbox.bubblewrap import SHARED_MEMORY, TEMPORARY, UNPACK, WORK, PreparedShell
from kapelle.environments.sandbox.contract import Layer, Limits
from kapelle.environments.sandbox.session import ProcessGroup
from kapelle.errors import SandboxError

EngineName = Literal["docker", "podman"]
LABEL = "kapelle.owner"
"""The label of every container; its value names the process that started the container."""
_ANSWERS_WITHIN_S = 20.0
_INSTALL: dict[EngineName, str] = {
    "docker": "see https://docs.docker.com/engine/install",
    "podman": "on Debian and Ubuntu: apt-get install podman; on Fedora: dnf install podman",
}


class Docker:
    """The sandbox backend `docker`."""

    name = "docker"

    def __init__(self, image: str = "python:3.11-slim", runtime: str | None = None) -> None:
        self._image = image
        self._runtime = runtime

    @property
    def python(self) -> str:
        """The Python interpreter of the image."""
        return "python3"

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers of protection, which are present if a Docker engine is available.

        The engine provides all namespaces and cgroups.
        """
        problem = engine_problem()
        detail = problem or "provided by the engine"
        names = ("user", "mount", "pid", "network")
        return (
            Layer("engine", True, problem is None, detail),
            *(Layer(f"{name} namespace", name != "user", problem is None, detail) for name in names),
            Layer("cgroups", False, problem is None, detail),
            Layer(
                "seccomp", False, problem is None, "the engine's default profile" if not problem else detail
            ),
        )

    def prepare(self, limits: Limits) -> PreparedShell:
        """Start a container that waits for its files and command; raise SandboxError if no engine is available."""
        problem = engine_problem()
        if problem:
            raise SandboxError(f"The sandbox `docker` cannot be used on this machine: {problem}")
        remove_left_behind("docker")
        name = f"kapelle-{secrets.token_hex(8)}"
        process = subprocess.Popen(
            [
                *confined("docker", name, limits, (WORK, TEMPORARY, SHARED_MEMORY)),
                *("--init", "--user=65533:65533", f"--workdir={WORK}", "--cpus=1"),
                *(() if self._runtime is None else ("--runtime", self._runtime)),
                *("--env=PYTHONHASHSEED=0", f"--env=HOME={WORK}"),
                *(self._image, "/bin/sh", "-c", UNPACK),
            ],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return PreparedShell(process, Container(process, name), limits)


class Container(ProcessGroup):
    """The processes of one container; the cgroups of the engine limit their total resources, including kernel memory."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        super().__init__(process)
        self._name = name

    def kill(self, within_s: float) -> None:
        """Remove the container with all its processes, and kill the Docker client that is attached to it."""
        remove("docker", self._name)
        self._process.kill()


def confined(engine: EngineName, name: str, limits: Limits, folders: Sequence[str]) -> list[str]:
    """Return the beginning of a command that runs a container, whose standard input is that of the command.

    The container has no network and no capabilities, and can write only to `folders`, which are stored in memory.
    """
    # podman does not know the first option (its limit on memory includes inodes) and would otherwise copy the image's files and
    # their owner.
    option = {"docker": f"nr_inodes={limits.files}", "podman": "notmpcopyup"}[engine]
    disk = f"rw,exec,nosuid,nodev,size={limits.file_bytes},mode=1777,{option}"
    return [
        *(engine_path(engine), "run", "--rm", "--interactive", "--pull=never", f"--name={name}"),
        *(f"--label={LABEL}={_owner()}", "--stop-signal=SIGKILL", "--log-driver=none", "--no-healthcheck"),
        *("--network=none", "--ipc=private", "--read-only", "--hostname=kapelle"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *(f"--memory={limits.memory_bytes}", f"--memory-swap={limits.memory_bytes}"),
        *(f"--pids-limit={limits.processes + 4}", "--ulimit=nofile=1024:1024", "--ulimit=core=0:0"),
        *(f"--tmpfs={folder}:{disk}" for folder in folders),
    ]


@functools.cache
def engine_problem(engine: EngineName = "docker") -> str | None:
    """Return why an engine cannot be used on this machine, or None if the engine responds."""
    asked = {"docker": "{{.Server.Version}}", "podman": "{{.Client.Version}}"}[engine]
    try:
        code, output = call(engine, "version", "--format", asked)
    except SandboxError as error:
        return str(error)
    return None if code == 0 else f"{output[:200]} Start the engine, or use `bubblewrap`."


def call(engine: EngineName, *arguments: str, within_s: float = _ANSWERS_WITHIN_S) -> tuple[int, str]:
    """Run a command of the engine; return its exit code and its output, or its error messages if it failed.

    Raises SandboxError if the engine is not installed or does not respond within `within_s` seconds.
    """
    try:
        done = subprocess.run(
            [engine_path(engine), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=within_s,
        )
    except subprocess.TimeoutExpired:
        raise SandboxError(
            f"`{engine} {arguments[0]}` did not end within {within_s:g} s; see `{engine} version`."
        ) from None
    output = done.stdout if done.returncode == 0 else done.stderr
    return done.returncode, output.decode(errors="replace").strip()


def remove(engine: EngineName, *names: str) -> None:
    """Kill and remove containers, as far as they exist."""
    with contextlib.suppress(SandboxError):
        call(engine, "rm", "--force", "--volumes", *names)


@functools.cache
def remove_left_behind(engine: EngineName) -> None:
    """Remove containers whose process on this machine has ended, once per process.

    Such containers exist only if the process and the client of the engine were killed at the same time.
    """
    code, ids = call(engine, "ps", "--all", "--quiet", f"--filter=label={LABEL}")
    for each in ids.split() if code == 0 else ():
        code, owner = call(engine, "inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', each)
        host, _, process = owner.partition(" ")
        # Other machines may use the same engine.
        if code == 0 and host == socket.gethostname() and _owner(int(process.split(" ")[0])) != owner:
            remove(engine, each)


def _owner(pid: int | None = None) -> str:
    """Return the host, the id and the start time of a process, or an empty string if there is no such process."""
    pid = os.getpid() if pid is None else pid
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
    return f"{socket.gethostname()} {pid} {started}"


def engine_path(engine: EngineName) -> str:
    """Return the path of the engine's program; raise SandboxError with how to install it."""
    path = shutil.which(engine)
    if path is None:
        raise SandboxError(f"the program `{engine}` is not installed; {_INSTALL[engine]}")
    return path
