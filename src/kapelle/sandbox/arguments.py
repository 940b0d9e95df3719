"""What bubblewrap is asked for: one entry for each layer, the system's files, the limits' sizes."""

from __future__ import annotations

import functools
import os
import resource
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from kapelle.errors import SandboxError
from kapelle.sandbox.contract import Limits
from kapelle.sandbox.interpreter import Interpreter

WORK = "/box"
"""The work directory as contained programs see it; their temporary directory too."""
TEMPORARY = "/tmp"  # noqa: S108 (the sandbox's own, a link to the work directory)
SHARED_MEMORY = "/dev/shm"  # noqa: S108 (the sandbox's own, a tmpfs of its own size)
ENVIRONMENT = {
    "HOME": WORK,
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    # The same program on the same input answers the same in every run.
    "PYTHONHASHSEED": "0",
}
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_SIGNALS = 1024
"""Most that may wait for a run: each is kept by the kernel."""
_UID_MAP = Path("/proc/self/uid_map")
_PRESSURE = "/proc/pressure"
# There everyone may have the kernel watch the whole machine, by triggers; not every kernel has it.
_WITHOUT_PRESSURE = (
    ("--size", "4096", "--tmpfs", _PRESSURE, "--remount-ro", _PRESSURE) if Path(_PRESSURE).is_dir() else ()
)
# How the host was started and what it is made of: no program's business.
_OF_THE_HOST = tuple(
    f"/proc/{name}"
    for name in (
        "cmdline",
        "config.gz",
        "diskstats",
        "interrupts",
        "key-users",
        "keys",
        "modules",
        "partitions",
    )
    if Path(f"/proc/{name}").exists()
)
# Each layer of protection is one entry; the tests remove them in turn and see a hostile program get through.
LAYERS: Mapping[str, tuple[str, ...]] = {
    "user namespace": ("--unshare-user", "--uid", "1000", "--gid", "1000", "--disable-userns"),
    # Over process 1: a program has its user id, could write to its memory, and it is what dies with the supervisor.
    "pid namespace": (
        *("--unshare-pid", "--as-pid-1", "--proc", "/proc"),
        *("--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"),
        *_WITHOUT_PRESSURE,
        *(part for name in _OF_THE_HOST for part in ("--ro-bind", "/dev/null", name)),
    ),
    "network namespace": ("--unshare-net",),
    "ipc, uts and cgroup namespaces": (
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--hostname",
        "kapelle",
    ),
    "cleared environment": ("--clearenv",),
    "session": ("--new-session", "--die-with-parent"),
    "read-only system": ("--remount-ro", "/dev", "--remount-ro", "/"),
}


def arguments(limits: Limits, interpreter: Interpreter, info_fd: int, filter_fd: int | None) -> list[str]:
    """Return bubblewrap's arguments for these limits, without the command."""
    layers = dict(LAYERS)
    read_only = layers.pop("read-only system")
    size = str(limits.file_bytes)
    return [
        *(option for layer in layers.values() for option in layer),
        *(part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)),
        *_system(interpreter),
        *_devices(),
        *("--size", size, "--tmpfs", SHARED_MEMORY, "--size", size, "--tmpfs", WORK),
        *("--symlink", WORK.removeprefix("/"), TEMPORARY, "--dir", "/run", "--chdir", WORK),
        *read_only,
        *("--info-fd", str(info_fd)),
        *(() if filter_fd is None else ("--seccomp", str(filter_fd))),
    ]


def _devices() -> list[str]:
    """Return a /dev of harmless devices: no terminals to use up, and no /dev/zero, which maps as uncounted memory."""
    found = ["--size", "65536", "--tmpfs", "/dev"]
    for name in DEVICES:
        found += ["--dev-bind", name, name]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        found += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    return [*found, "--symlink", "/proc/self/fd", "/dev/fd"]


def _system(interpreter: Interpreter) -> list[str]:
    """Return the mounts of programs and libraries; nothing of /etc but what the linker needs."""
    found = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            found += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            found += ["--ro-bind", str(path), str(path)]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        found += ["--ro-bind-try", name, name]
    for needed in interpreter.needs:
        found += ["--ro-bind", needed, needed]
    return found


def lower_limits() -> list[str]:
    """Return the prefix that sets the limits of the kernel's for which a shell has no letter, or not small enough units."""
    # One byte: at 0 a crash still starts the host's handler, where cores go to one (core(5)).
    wanted = {"core": (resource.RLIMIT_CORE, 1), "sigpending": (resource.RLIMIT_SIGPENDING, _SIGNALS)}
    lowered = [
        f"--{name}={most}:{most}"
        for name, (kind, most) in wanted.items()
        if not 0 <= resource.getrlimit(kind)[1] < most
    ]
    return [require("prlimit", "util-linux"), *lowered, "--"] if lowered else []


def drop_privileges() -> list[str]:
    """Return the prefix that makes a root parent's run an unprivileged user's, another one for each run.

    Limits on processes do not bind root, and files would stay readable to it inside a user namespace.
    """
    if os.geteuid() != 0:
        return []
    spare = _spare_uids()
    if not spare:
        raise SandboxError(
            "This process is root in a user namespace that has no other user for programs to run as "
            "(/proc/self/uid_map). Give it a range of user ids (/etc/subuid, newuidmap), or run as an ordinary user."
        )
    uid = str(spare.start + secrets.randbelow(len(spare)))
    return [
        require("setpriv", "util-linux"),
        "--reuid",
        uid,
        "--regid",
        uid,
        "--clear-groups",
        "--no-new-privs",
    ]


@functools.cache
def _spare_uids() -> range:
    """Return user ids that exist here (a container may have few) and that no account is likely to have."""
    first, _, count = map(int, _UID_MAP.read_text().splitlines()[-1].split())
    end = min(first + count, 2_000_000_000)
    # 65534 is nobody and owns what has no owner.
    return range(max(end - 100_000, 66_000), end) if end > 66_000 else range(max(end - 4_000, 1), end - 2)


def require(program: str, package: str) -> str:
    """Return the path of a program. Raises SandboxError with the command that installs it."""
    path = shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin")
    if path is None:
        raise SandboxError(
            f"The sandbox needs the program `{program}`, which is not installed. On Debian and Ubuntu: "
            f"apt-get install {package}; on Fedora: dnf install {package}."
        )
    return path
