"""Contains programs with bubblewrap: new namespaces, a read-only system, an unprivileged user, no network.

Every run goes through the same stations, each of which is gone when the next begins:

    prlimit → setpriv (root only: another uid) → bwrap (namespaces, filter) → sh (unpacks files, sets limits) → command

The shell that unpacks is process 1 of the new pid namespace. It waits for the command and reaps what that
leaves; when it ends, or is killed, the kernel kills everything else in the namespace.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kapelle.errors import SandboxError
from kapelle.sandbox.arguments import (
    DEVICES,
    ENVIRONMENT,
    SHARED_MEMORY,
    WORK,
    arguments,
    drop_privileges,
    lower_limits,
    require,
)
from kapelle.sandbox.boot import UNPACK, opening
from kapelle.sandbox.cgroups import strong_or_why_not
from kapelle.sandbox.contract import Layer, Limits, check_files
from kapelle.sandbox.huge_pages import without_huge_pages
from kapelle.sandbox.interpreter import Interpreter, reachable_interpreter
from kapelle.sandbox.namespaces import NamespaceGroup
from kapelle.sandbox.seccomp import filter_program
from kapelle.sandbox.session import BEGIN_WITHIN_S, ProcessSession
from kapelle.sandbox.task_clock import works_here as task_clock_works

_OLDEST = (0, 8, 0)
"""The first bubblewrap with `--disable-userns` and `--size`."""
_COUNTS_BY_NAMESPACE = (5, 14)
"""The first Linux that counts processes for each user namespace."""
_FIRST_TRY = Limits(wall_s=20.0, cpu_s=20.0)
_LOOK = "readlink /proc/self/ns/user /proc/self/ns/mnt /proc/self/ns/pid /proc/self/ns/net; id -u; env"


class Bubblewrap:
    """The backend `bubblewrap`: the default on Linux, as root and as an ordinary user."""

    name = "bubblewrap"

    @property
    def python(self) -> str:
        """Path of an interpreter that an unprivileged user can reach."""
        return reachable_interpreter().path

    def layers(self) -> tuple[Layer, ...]:
        """Return what this machine gives, found by trying it once."""
        return _layers()

    def prepare(self, limits: Limits) -> PreparedBubblewrap:
        """Start a sandbox that waits for its files and command.

        Raises SandboxError when bubblewrap or a required layer is missing.
        """
        missing = [layer for layer in self.layers() if layer.required and not layer.present]
        if missing:
            raise SandboxError(f"The sandbox needs its layer '{missing[0].name}': {missing[0].detail}")
        return PreparedBubblewrap(limits, reachable_interpreter())


class PreparedBubblewrap:
    """A sandbox without a program: its namespaces and mounts exist, its shell waits for an archive."""

    def __init__(self, limits: Limits, interpreter: Interpreter) -> None:
        self.limits = limits
        folder = strong_or_why_not()
        strong = folder if isinstance(folder, Path) else None
        program = filter_program(children_counted=strong is not None or task_clock_works())
        info_read, info_write = os.pipe()
        try:
            filter_fd = None if program is None else _memory_file(program)
        except BaseException:
            os.close(info_read)
            os.close(info_write)
            raise
        inherited = [info_write] if filter_fd is None else [info_write, filter_fd]
        try:
            with without_huge_pages():
                self._process = subprocess.Popen(
                    [
                        *lower_limits(),
                        *drop_privileges(),
                        require("bwrap", "bubblewrap"),
                        *arguments(limits, interpreter, info_write, filter_fd),
                        *("--", "/bin/sh", "-c", UNPACK),
                    ],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    cwd="/",
                    pass_fds=inherited,
                )
        except BaseException:
            os.close(info_read)
            raise
        finally:
            for fd in inherited:
                os.close(fd)
        self._group = NamespaceGroup(self._process, info_read, (WORK, SHARED_MEMORY), limits, strong)
        self._used = False

    def start(self, files: Mapping[str, bytes], command: Sequence[str]) -> ProcessSession:
        """Put the files into the work directory and start the command there; the clock runs from here."""
        assert not self._used, "a prepared sandbox is used once"
        check_files(files, self.limits)
        self._group.count(BEGIN_WITHIN_S)
        _wipe_times()
        self._used = True
        return ProcessSession(self._process, self._group, self.limits, opening(files, command, self.limits))

    def discard(self) -> None:
        """Free it unused; does nothing after `start`."""
        if not self._used:
            self._used = True
            ProcessSession(self._process, self._group, self.limits).finish(kill=True)


def _wipe_times() -> None:
    """Set the times of the devices, as every program can: what one has left there, no later one reads."""
    for name in DEVICES:
        with contextlib.suppress(OSError):
            os.utime(name)


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("kapelle", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


@functools.cache
def _layers() -> tuple[Layer, ...]:
    """Try one sandbox and compare what it sees with what this process sees."""
    try:
        _check_version()
        seen = _look_from_inside()
    except SandboxError as error:
        return (Layer("bubblewrap", required=True, present=False, detail=str(error)),)
    root = os.geteuid() == 0
    known = filter_program() is not None
    inner = seen[:4]
    outer = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("user", "mnt", "pid", "net")]
    own = [f"{name} namespace" for name in ("user", "mount", "pid", "network")]
    leaked = sorted({line.partition("=")[0] for line in seen[5:]} - _EXPECTED_VARIABLES)
    return (
        *(
            Layer(name, True, a != b, "its own" if a != b else "the sandbox shares this process's")
            for name, a, b in zip(own, inner, outer, strict=True)
        ),
        Layer("unprivileged user", True, seen[4] != "0", f"the program runs as user {seen[4]}"),
        Layer(
            "cleared environment",
            True,
            not leaked,
            f"leaked: {', '.join(leaked)}" if leaked else "nothing inherited",
        ),
        _process_limit(root),
        Layer("wall time, output bound, group kill", True, True, "by the supervisor, through a pidfd"),
        Layer(
            "seccomp",
            False,
            known,
            "refuses system calls that honest programs never need"
            if known
            else f"no table of system calls for {os.uname().machine}",
        ),
        Layer(
            "user id per run",
            False,
            root,
            "drawn for each run"
            if root
            else "every run has the id of the user who started it, mapped to 1000",
        ),
        *_mode(),
    )


def _mode() -> tuple[Layer, Layer]:
    """Return by what a run is bounded as a whole: `strong` by the kernel, `weak` by the supervisor's sums."""
    folder = strong_or_why_not()
    if isinstance(folder, Path):
        return (
            Layer("cgroups", False, True, f"one for each run, in {folder}"),
            Layer("mode", False, True, "strong: the kernel bounds memory and processes of a run as a whole"),
        )
    clock = (
        "with CPU counted by a clock"
        if task_clock_works()
        else "and nobody may change SIGCHLD (no perf_event_open)"
    )
    return (
        Layer("cgroups", False, False, folder),
        Layer("mode", False, True, f"weak: the supervisor sums what a run uses every 20 ms, {clock}"),
    )


def _process_limit(root: bool) -> Layer:
    release = tuple(map(int, re.findall(r"[0-9]+", os.uname().release)[:2]))
    if root or release >= _COUNTS_BY_NAMESPACE:
        return Layer("process limit", True, True, "counts the processes of one sandbox")
    wanted = ".".join(map(str, _COUNTS_BY_NAMESPACE))
    detail = f"before Linux {wanted} it counts all of an ordinary user's processes; run as root, or upgrade"
    return Layer("process limit", True, False, detail)


_EXPECTED_VARIABLES = {*ENVIRONMENT, "PWD", "OLDPWD", "SHLVL", "_"}


def _check_version() -> None:
    text = subprocess.run(
        [require("bwrap", "bubblewrap"), "--version"], capture_output=True, text=True, check=False
    ).stdout
    found = tuple(map(int, re.findall(r"[0-9]+", text)))
    if found < _OLDEST:
        wanted = ".".join(map(str, _OLDEST))
        raise SandboxError(f"{text.strip() or 'bubblewrap'} is too old. Install {wanted} or newer.")


def _look_from_inside() -> list[str]:
    session = PreparedBubblewrap(_FIRST_TRY, reachable_interpreter()).start({}, ["/bin/sh", "-c", _LOOK])
    result = session.finish()
    if not result.ok:
        raise SandboxError(
            f"bubblewrap cannot make a sandbox here: {result.stderr.decode(errors='replace').strip()[:400]} "
            "Unprivileged user namespaces must be allowed: see `sysctl kernel.unprivileged_userns_clone "
            "user.max_user_namespaces kernel.apparmor_restrict_unprivileged_userns`; a container needs "
            "--security-opt seccomp=unconfined or another profile that allows them."
        )
    return result.stdout.decode(errors="replace").splitlines()
