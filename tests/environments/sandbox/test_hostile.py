"""Hostile programs are contained: none gets what it tries, none outlives its run, none leaves anything."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.environments.sandbox.hostile.channels import CHANNELS
from tests.environments.sandbox.hostile.files import FILES
from tests.environments.sandbox.hostile.kernel import KERNEL
from tests.environments.sandbox.hostile.machine import MACHINE
from tests.environments.sandbox.hostile.processes import PROCESSES
from tests.environments.sandbox.hostile.program import Hostile
from tests.environments.sandbox.hostile.resources import RESOURCES
from tests.environments.sandbox.hostile.unseen import UNSEEN
from tests.environments.sandbox.hostile.whole import WHOLE

from kapelle.environments.sandbox.bubblewrap import SHARED_MEMORY, Bubblewrap
from kapelle.environments.sandbox.contract import Result
from kapelle.environments.sandbox.session import run

PROGRAMS = {**RESOURCES, **PROCESSES, **FILES, **KERNEL, **WHOLE, **MACHINE, **CHANNELS, **UNSEEN}
SAMPLE = {
    "fork bomb",
    "memory bomb",
    "infinite standard output",
    "CPU loop that ignores signals",
    "a million empty files",
    "daemon that holds the result pipe open",
    "ptrace",
    "a namespace in the namespace",
    "home and tokens",
    "environment",
    "/proc of the parent",
    "inherited descriptors",
    "writes outside the work directory",
    "message to a parallel run",
    "loopback to a service of the host",
    "abstract unix socket",
    "vsock, netlink and raw sockets",
    "32-bit system calls",
    "huge pages held by pipes",
    "shared memory of which a page is kept",
    "connections that nobody accepts",
    "children that nobody waits for",
    "locks and watches on what all runs share",
    "rules of a security module",
    "filters of its own",
    "the disks of the host",
    "signals that wait",
    "leases, notifications and hints on files",
    "what the page cache holds",
    "record locks without end",
    "record locks on files of the host",
    "times of devices",
    "programs that may not be read",
    "takes over process 1",
}


@dataclass(frozen=True)
class Host:
    """What the host has that no program may reach."""

    secret: Path
    port: int
    socket: str


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("KAPELLE_TEST_SECRET", "token")
    secret = tmp_path / "secret"
    secret.write_text("token")
    secret.chmod(0o666)
    name = f"kapelle-{secrets.token_hex(4)}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{name}")
        unix.listen()
        yield Host(secret, tcp.getsockname()[1], name)
    assert secret.read_text() == "token"


def attack(sandbox: Bubblewrap, hostile: Hostile, host: Host, marker: str) -> Result:
    text = hostile.source
    for key, value in (("secret", host.secret), ("port", host.port), ("socket", host.socket)):
        text = text.replace(b"{%s}" % key.encode(), str(value).encode())
    return run(sandbox, {"program.py": text}, [sandbox.python, "program.py", marker], limits=hostile.limits)


def survivors(marker: str) -> list[str]:
    """Return the processes of a run that live on; what was killed may take a while to be taken apart."""
    until = time.monotonic() + 5.0
    while (found := alive(marker)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def alive(marker: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found


def assert_contained(hostile: Hostile, result: Result) -> None:
    said = result.stdout + result.stderr
    assert b"ESCAPED" not in result.stdout, said[-2000:].decode(errors="replace")
    end = result.limit or "end"
    assert end in hostile.ends, (end, said[-2000:].decode(errors="replace"))
    assert result.wall_s <= hostile.limits.wall_s + 0.5
    assert len(said) <= hostile.limits.output_bytes
    if hostile.ends == {"end"}:
        assert result.stdout.rstrip().endswith(b"DONE"), said[-2000:].decode(errors="replace")
    for name, most in hostile.counts.items():
        reports = [line.split() for line in result.stdout.splitlines() if line.startswith(name.encode())]
        assert reports, f"the program never reported `{name}`"
        assert all(0 < int(report[1]) <= most for report in reports)


def everything_of_this_process() -> tuple[Counter[str], str, list[str]]:
    """Return the open descriptors by what they are, the mounts, and files where none may be."""
    mounts = Path("/proc/self/mountinfo").read_text()
    left = [
        str(path)
        for folder in (tempfile.gettempdir(), SHARED_MEMORY, "/", ".")
        for path in Path(folder).glob("kapelle-hos*")
    ]
    return descriptors(), mounts, left


def assert_as_before(before: tuple[Counter[str], str, list[str]]) -> None:
    """Assert that nothing is left; other threads, which make sandboxes ready for instance, are waited for."""
    until = time.monotonic() + 5.0
    while everything_of_this_process() != before and time.monotonic() < until:
        time.sleep(0.05)
    assert everything_of_this_process() == before


def descriptors() -> Counter[str]:
    """Count this process's descriptors by what they are, without the numbers that differ from one to the next."""
    found = Counter[str]()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, the one that lists them for instance
            found[re.sub("[0-9]+", "#", str(one.readlink()))] += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.sandbox_full]) for name in PROGRAMS],
)
def test_a_hostile_program_is_contained_and_leaves_nothing(
    sandbox: Bubblewrap, host: Host, name: str
) -> None:
    hostile, marker = PROGRAMS[name], f"hostile-{secrets.token_hex(8)}"
    before = everything_of_this_process()
    started = time.monotonic()
    if hostile.twice:
        with ThreadPoolExecutor(2) as threads:
            runs = [threads.submit(attack, sandbox, hostile, host, marker) for _ in range(2)]
            results = [one.result() for one in runs]
    else:
        results = [attack(sandbox, hostile, host, marker) for _ in range(2 if hostile.again else 1)]
    assert survivors(marker) == []
    assert_as_before(before)
    for result in results:
        assert_contained(hostile, result)
    assert time.monotonic() - started < 45.0, "programs that wait do so for a minute"
