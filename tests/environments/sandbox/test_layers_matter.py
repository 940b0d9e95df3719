"""Each layer of protection holds something: without it, a program gets what it must not get."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.environments.sandbox.hostile.program import Hostile, ends
from tests.environments.sandbox.test_hostile import PROGRAMS, Host, alive, assert_contained, attack, host

from kapelle.environments.sandbox import bubblewrap
from kapelle.environments.sandbox import bubblewrap as arguments
from kapelle.environments.sandbox import bubblewrap as boot
from kapelle.environments.sandbox.bubblewrap import Bubblewrap, NamespaceGroup
from kapelle.environments.sandbox.session import Session

__all__ = ["host"]

Change = Callable[[pytest.MonkeyPatch], None]

FORKS = Hostile("forked(40, 1)", counts={"made": 16})
NAMESPACE = Hostile("refused_call('unshare', 272, 0x10000000)")
NAMES = Hostile("if os.uname().nodename != 'kapelle': escaped('the host is', os.uname().nodename)")
MANY_FILES = Hostile("for n in range(4000): open(f'/box/{n}', 'w').close()\ntime.sleep(1)", ends("files"))
MUCH_OUTPUT = Hostile("print('x' * 200_000)", ends("output"))
BIG_ARRAY = Hostile("refused(bytearray, 300_000_000)")


def without(*names: str) -> Change:
    def change(patch: pytest.MonkeyPatch) -> None:
        assert set(names) <= set(arguments.LAYERS)
        kept = {name: () if name in names else options for name, options in arguments.LAYERS.items()}
        patch.setattr(arguments, "LAYERS", kept)

    return change


def without_filter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bubblewrap, "filter_program", lambda **_: None)


def without_pid_namespace(patch: pytest.MonkeyPatch) -> None:
    kept = {**arguments.LAYERS, "pid namespace": ("--ro-bind", "/proc", "/proc")}
    patch.setattr(arguments, "LAYERS", kept)


def without_cleared_environment(patch: pytest.MonkeyPatch) -> None:
    without("cleared environment")(patch)
    start = subprocess.Popen

    def inheriting(*args: Any, **options: Any) -> Any:
        return start(*args, **{**options, "env": {**os.environ, "KAPELLE_TEST_SECRET": "token"}})

    patch.setattr(subprocess, "Popen", inheriting)


def without_dropped_privileges(patch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only a root parent has another user to become")
    patch.setattr(bubblewrap, "drop_privileges", list)


def without_kernel_limit(name: str) -> Change:
    def change(patch: pytest.MonkeyPatch) -> None:
        given = boot.kernel_limits
        patch.setattr(
            boot, "kernel_limits", lambda limits: {k: v for k, v in given(limits).items() if k != name}
        )

    return change


def without_watch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NamespaceGroup, "usage", lambda self: None)


def without_wall_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "_deadline", property(lambda self: self._started + 2.7))


def without_output_bound(patch: pytest.MonkeyPatch) -> None:
    start = Session.__init__

    def unbounded(self: Session, process: Any, group: Any, limits: Any, opening: Any = None) -> None:
        start(self, process, group, replace(limits, output_bytes=10_000_000), opening)

    patch.setattr(Session, "__init__", unbounded)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """Leave everything in place."""


LAYERS: dict[str, tuple[Change, Change, Hostile]] = {
    # Layer: (what is already missing because another layer holds the same, what is removed, what gets through).
    "user namespace": (without_filter, without("user namespace"), NAMESPACE),
    "unprivileged user": (nothing, without_dropped_privileges, FORKS),
    "pid namespace": (nothing, without_pid_namespace, PROGRAMS["/proc of the parent"]),
    "network namespace: services": (
        without_filter,
        without("network namespace"),
        PROGRAMS["loopback to a service of the host"],
    ),
    "network namespace: sockets": (nothing, without("network namespace"), PROGRAMS["abstract unix socket"]),
    "ipc, uts and cgroup namespaces": (nothing, without("ipc, uts and cgroup namespaces"), NAMES),
    "cleared environment": (nothing, without_cleared_environment, PROGRAMS["environment"]),
    "read-only system": (
        nothing,
        without("read-only system"),
        PROGRAMS["writes outside the work directory"],
    ),
    "filter: io_uring": (nothing, without_filter, PROGRAMS["io_uring"]),
    "filter: keyrings": (nothing, without_filter, PROGRAMS["bpf, keyctl and userfaultfd"]),
    "filter: 32-bit calls": (nothing, without_filter, PROGRAMS["32-bit system calls"]),
    "filter: address families": (nothing, without_filter, PROGRAMS["vsock, netlink and raw sockets"]),
    "process limit": (nothing, without_kernel_limit("processes"), FORKS),
    "address space": (nothing, without_kernel_limit("address space"), BIG_ARRAY),
    "file size": (nothing, without_kernel_limit("file size"), PROGRAMS["sparse file of a terabyte"]),
    "descriptors": (nothing, without_kernel_limit("descriptors"), PROGRAMS["descriptor exhaustion"]),
    "watch: files": (nothing, without_watch, MANY_FILES),
    "watch: memory": (nothing, without_watch, PROGRAMS["memory bomb"]),
    "wall time": (nothing, without_wall_time, PROGRAMS["sleep past the time-out"]),
    "output bound": (nothing, without_output_bound, MUCH_OUTPUT),
}


@pytest.mark.sample(8)
@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_without_the_layer_a_program_gets_through(
    sandbox: Bubblewrap, host: Host, monkeypatch: pytest.MonkeyPatch, layer: str
) -> None:
    missing, remove, hostile = LAYERS[layer]
    missing(monkeypatch)
    assert_contained(hostile, attack(sandbox, hostile, host, "layer"))
    remove(monkeypatch)
    with pytest.raises(AssertionError):
        assert_contained(hostile, attack(sandbox, hostile, host, "layer"))


@pytest.mark.slow
def test_a_run_without_its_clock_is_still_measured(
    sandbox: Bubblewrap, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_filter(monkeypatch)
    hostile = PROGRAMS["memory of a program that may not be read"]
    assert_contained(hostile, attack(sandbox, hostile, host, "clock"))


SUPERVISOR = """
import sys, time
from kapelle.environments.sandbox import bubblewrap as arguments
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits
if sys.argv[2] == "without":
    arguments.LAYERS = {name: () if name == "session" else kept for name, kept in arguments.LAYERS.items()}
box = Bubblewrap()
session = box.prepare(Limits()).start({}, [box.python, "-c", "import time; print(1, flush=True); time.sleep(60)", sys.argv[1]])
session.receive(10.0)
print("running", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("layer", ["with", "without"])
def test_a_killed_supervisor_ends_its_runs(sandbox: Bubblewrap, layer: str) -> None:
    marker = f"orphan-{os.getpid()}-{layer}"
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, marker, layer],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(bubblewrap.__file__).parents[3])},
    )
    assert supervisor.stdout is not None
    try:
        assert supervisor.stdout.readline() == b"running\n"
        supervisor.kill()
        supervisor.wait()
        until = time.monotonic() + 30.0
        while alive(marker) and time.monotonic() < until and layer == "with":
            time.sleep(0.01)
        if layer == "without":
            time.sleep(1.0)  # long after it would have ended
        assert (alive(marker) == []) == (layer == "with")
    finally:
        supervisor.stdout.close()
        for pid in alive(marker):
            os.kill(int(pid), signal.SIGKILL)
