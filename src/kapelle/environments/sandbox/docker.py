"""Run programs in Docker containers, for machines without user namespaces, or with gVisor as the runtime.

A container takes tenths of a second to start, so use this backend only on machines where bubblewrap does not work. The image
must contain `sh`, `tar`, `head` and Python 3.11 or newer. The image must already be present on the machine, because no image is
pulled.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import shutil
import subprocess

from kapelle.environments.sandbox.bubblewrap import SHARED_MEMORY, TEMPORARY, UNPACK, WORK, PreparedShell
from kapelle.environments.sandbox.contract import Layer, Limits
from kapelle.environments.sandbox.session import ProcessGroup
from kapelle.errors import SandboxError

_ANSWERS_WITHIN_S = 20.0


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
        name = f"kapelle-{secrets.token_hex(8)}"
        disk = f"rw,nosuid,nodev,size={limits.file_bytes},nr_inodes={limits.files},mode=1777"
        process = subprocess.Popen(
            [
                *(_docker(), "run", "--rm", "--interactive", "--init", "--pull=never", "--name", name),
                *(() if self._runtime is None else ("--runtime", self._runtime)),
                *("--network=none", "--ipc=private", "--read-only", "--workdir", WORK, "--hostname=kapelle"),
                *("--user=65533:65533", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
                *(f"--memory={limits.memory_bytes}", f"--memory-swap={limits.memory_bytes}"),
                *(f"--pids-limit={limits.processes + 4}", "--cpus=1", "--log-driver=none"),
                *(f"--tmpfs={WORK}:{disk},exec", f"--tmpfs={TEMPORARY}:{disk}"),
                f"--tmpfs={SHARED_MEMORY}:{disk}",
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [_docker(), "rm", "--force", self._name],
                capture_output=True,
                check=False,
                timeout=_ANSWERS_WITHIN_S,
            )
        self._process.kill()


@functools.cache
def engine_problem() -> str | None:
    """Return why no Docker engine can be used on this machine, or None if an engine responds."""
    try:
        asked = subprocess.run(
            [_docker(), "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_ANSWERS_WITHIN_S,
        )
    except SandboxError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return "the Docker engine does not respond; see `docker version`."
    return (
        None
        if asked.returncode == 0
        else f"{asked.stderr.strip()[:200]} Start the engine, or use `bubblewrap`."
    )


def _docker() -> str:
    path = shutil.which("docker")
    if path is None:
        raise SandboxError(
            "the program `docker` is not installed; see https://docs.docker.com/engine/install"
        )
    return path
