"""Contains programs in Docker containers: for machines without user namespaces, or with gVisor as runtime.

A container costs tenths of a second to start, so this is the backend for what bubblewrap cannot do here, not
for speed. The image must hold `sh`, `tar`, `head` and a Python 3.11 or newer; it must be there
already, as nothing is pulled.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from kapelle.errors import SandboxError
from kapelle.sandbox import bubblewrap as boot
from kapelle.sandbox.bubblewrap import SHARED_MEMORY, TEMPORARY, WORK
from kapelle.sandbox.contract import Layer, Limits, check_files
from kapelle.sandbox.session import ProcessSession
from kapelle.sandbox.usage import Usage

_ANSWERS_WITHIN_S = 20.0


class Docker:
    """The backend `docker`."""

    name = "docker"

    def __init__(self, image: str = "python:3.11-slim", runtime: str | None = None) -> None:
        self._image = image
        self._runtime = runtime

    @property
    def python(self) -> str:
        """The image's interpreter."""
        return "python3"

    def layers(self) -> tuple[Layer, ...]:
        """Return whether there is an engine that answers; it gives all namespaces and cgroups."""
        problem = engine_problem()
        detail = problem or "by the engine"
        names = ("user", "mount", "pid", "network")
        return (
            Layer("engine", True, problem is None, detail),
            *(Layer(f"{name} namespace", name != "user", problem is None, detail) for name in names),
            Layer("cgroups", False, problem is None, detail),
            Layer(
                "seccomp", False, problem is None, "the engine's default profile" if not problem else detail
            ),
        )

    def prepare(self, limits: Limits) -> PreparedContainer:
        """Start a container that waits for its files and command. Raises SandboxError without an engine."""
        problem = engine_problem()
        if problem:
            raise SandboxError(f"The sandbox `docker` cannot be used here: {problem}")
        return PreparedContainer(limits, self._image, self._runtime)


class PreparedContainer:
    """A container without a program: its shell waits for an archive."""

    def __init__(self, limits: Limits, image: str, runtime: str | None) -> None:
        self._limits = limits
        self._used = False
        name = f"kapelle-{secrets.token_hex(8)}"
        self._process = subprocess.Popen(
            [*container_command(name, limits, image, runtime), "/bin/sh", "-c", boot.UNPACK],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._group = Container(self._process, name)

    def start(self, files: Mapping[str, bytes], command: Sequence[str]) -> ProcessSession:
        """Put the files into the work directory and start the command there; the clock runs from here."""
        assert not self._used, "a prepared sandbox is used once"
        check_files(files, self._limits)
        self._used = True
        return ProcessSession(
            self._process, self._group, self._limits, boot.opening(files, command, self._limits)
        )

    def discard(self) -> None:
        """Free it unused; does nothing after `start`."""
        if not self._used:
            self._used = True
            ProcessSession(self._process, self._group, self._limits).finish(kill=True)


class Container:
    """All processes of one container."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self._name = name

    def usage(self) -> Usage | None:
        """Return None: the engine's cgroups hold the sums."""
        return None

    def waited_s(self) -> float:
        """Return 0: the container's processes are not this one's."""
        return 0.0

    def kernel_s(self) -> tuple[float, float] | None:
        """Return None: the engine's cgroups count the kernel's memory too."""
        return None

    def kill(self, within_s: float) -> None:
        """Remove the container with everything in it, and the client that attaches to it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [_docker(), "rm", "--force", self._name],
                capture_output=True,
                check=False,
                timeout=_ANSWERS_WITHIN_S,
            )
        self._process.kill()

    def close(self) -> None:
        """Nothing else is held."""


def container_command(name: str, limits: Limits, image: str, runtime: str | None) -> list[str]:
    """Return the client's command for a container with these limits, without the program."""
    disk = f"rw,nosuid,nodev,size={limits.file_bytes},nr_inodes={limits.files},mode=1777"
    return [
        *(_docker(), "run", "--rm", "--interactive", "--init", "--pull=never", "--name", name),
        *(() if runtime is None else ("--runtime", runtime)),
        *("--network=none", "--ipc=private", "--read-only", "--workdir", WORK, "--hostname=kapelle"),
        *("--user=65533:65533", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *(f"--memory={limits.memory_bytes}", f"--memory-swap={limits.memory_bytes}"),
        *(f"--pids-limit={limits.processes + 4}", "--cpus=1", "--log-driver=none"),
        *(f"--tmpfs={WORK}:{disk},exec", f"--tmpfs={TEMPORARY}:{disk}", f"--tmpfs={SHARED_MEMORY}:{disk}"),
        *("--env=PYTHONHASHSEED=0", f"--env=HOME={WORK}"),
        image,
    ]


@functools.cache
def engine_problem() -> str | None:
    """Return why no Docker engine can be used here, None when one answers."""
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
        return "the Docker engine does not answer; see `docker version`."
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
