from __future__ import annotations

import platform
import pwd
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kapelle.environments.sandbox import bubblewrap
from kapelle.environments.sandbox import bubblewrap as arguments
from kapelle.environments.sandbox import bubblewrap as boot
from kapelle.environments.sandbox import bubblewrap as namespaces
from kapelle.environments.sandbox.bubblewrap import Bubblewrap, needs
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.pool import layers, modes_required, require
from kapelle.environments.sandbox.seccomp import filter_program, refused_calls
from kapelle.environments.sandbox.session import run
from kapelle.errors import SandboxError


def test_the_layers_that_must_be_there_are_named_and_there(sandbox: Bubblewrap) -> None:
    required = {layer.name: layer.present for layer in layers("bubblewrap") if layer.required}
    assert required == {
        "user namespace": True,
        "mount namespace": True,
        "pid namespace": True,
        "network namespace": True,
        "unprivileged user": True,
        "cleared environment": True,
        "process limit": True,
        "wall time, output bound, group kill": True,
    }
    assert {layer.name for layer in layers("bubblewrap") if not layer.required} == {
        "seccomp",
        "user id per run",
        "cgroups",
        "mode",
    }
    (mode,) = (layer for layer in layers("bubblewrap") if layer.name == "mode")
    assert mode.detail.startswith(("strong: ", "weak: "))
    require(sandbox)
    assert f"bubblewrap: {mode.detail}" in modes_required()


@pytest.mark.parametrize("missing", ["network namespace", "pid namespace"])
def test_a_missing_required_layer_raises(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    # The layers are looked at from inside, not inferred from what was asked for.
    kept = {name: () if name == missing else options for name, options in arguments.LAYERS.items()}
    if missing == "pid namespace":
        kept[missing] = ("--ro-bind", "/proc", "/proc")
    monkeypatch.setattr(arguments, "LAYERS", kept)
    monkeypatch.setattr(bubblewrap, "_layers", bubblewrap._layers.__wrapped__)
    with pytest.raises(SandboxError, match=missing):
        sandbox.prepare(Limits())
    with pytest.raises(SandboxError, match=f"{missing}.*unsafe_subprocess"):
        require(sandbox)


def test_a_home_is_not_shown_because_an_interpreter_was_installed_into_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (
        ".ssh/id",
        "bin/python3.11",
        "bin/own",
        "lib/python3.11/os.py",
        "lib/libpython3.11.so",
        "lib/key",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = [str(Path(path).relative_to(tmp_path)) for path in needs(tmp_path / "bin/python3.11", tmp_path)]
    assert shown == ["bin/python3.11", "lib/libpython3.11.so", "lib/python3.11"]
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir="/nonexistent"))
    shown = [str(Path(path).relative_to(tmp_path)) for path in needs(tmp_path / "bin/python3.11", tmp_path)]
    assert shown == ["bin/python3.11", "lib"]


def test_no_limit_can_be_switched_off() -> None:
    for name in Limits.__slots__:
        with pytest.raises(SandboxError, match=name):
            Limits(**{name: -1 if name == "patience" else 0})


def test_a_run_ends_before_the_trainer_when_the_machine_runs_out_of_memory(sandbox: Bubblewrap) -> None:
    assert run(sandbox, {}, ["sh", "-c", "cat /proc/self/oom_score_adj & wait"]).stdout == b"1000\n"


def test_a_sandbox_that_is_not_ready_in_time_is_reported(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = sandbox.prepare(Limits())
    monkeypatch.setattr("kapelle.environments.sandbox.session.BEGIN_WITHIN_S", 0.0)
    with pytest.raises(SandboxError, match="not ready within 0 s"):
        prepared.start({}, ["true"]).finish()


def test_where_no_one_can_count_lost_children_none_can_be_lost(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore = [sandbox.python, "-c", "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"]
    catch = [sandbox.python, "-c", "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(1)"]
    for module in (bubblewrap, namespaces):
        monkeypatch.setattr(module, "task_clock_works", lambda: False)
    assert b"PermissionError" in run(sandbox, {}, ignore).stderr
    assert run(sandbox, {}, catch).stdout == b"1\n"


def test_the_interpreter_can_be_reached(sandbox: Bubblewrap) -> None:
    result = run(
        sandbox,
        {},
        [sandbox.python, "-I", "-c", "import sys, json, re, math; print(sys.version_info >= (3, 11))"],
    )
    assert result.stdout == b"True\n"


@pytest.mark.parametrize("loopback", [True, False])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_a_program_of_whole_instructions(machine: str, counted: bool, loopback: bool) -> None:
    program = filter_program(machine, children_counted=counted, loopback=loopback)
    assert program is not None
    steps = list(struct.iter_unpack("=HBBI", program))
    # The kernel rejects more than 4096 steps, and jumps past the end.
    assert len(steps) < 4096
    assert all(
        index + 1 + max(step[1], step[2]) < len(steps) for index, step in enumerate(steps) if step[0] & 7 == 5
    )
    assert steps[-1] == (0x06, 0, 0, 0x7FFF0000)
    assert len(set(refused_calls(machine).values())) == len(refused_calls(machine))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
def test_every_denied_call_fails_with_eperm(sandbox: Bubblewrap) -> None:
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {dict(refused_calls())!r}.items():
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:
        print(name, ctypes.get_errno())
"""
    result = run(sandbox, {"p.py": program.encode()}, [sandbox.python, "p.py"])
    assert (result.stdout, result.exit_code) == (b"", 0)


def test_a_sandbox_that_fails_before_the_program_starts_has_no_result(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_limit = {"descriptors": "ulimit -n none"}
    with monkeypatch.context() as patch:
        patch.setattr(boot, "kernel_limits", lambda limits: broken_limit)
        with pytest.raises(SandboxError, match="could not start the program"):
            run(sandbox, {}, ["true"])
    for broken in ("echo no room >&2; exit 1", "exit 0", boot.UNPACK.replace("eval", "missing")):
        monkeypatch.setattr(bubblewrap, "UNPACK", broken)
        with pytest.raises(SandboxError, match="could not start the program"):
            run(sandbox, {}, ["true"])
        session = sandbox.prepare(Limits()).start({}, ["true"])
        with pytest.raises(SandboxError, match="could not start the program"):
            session.receive(5.0)
        assert session.finish().stdout == b""


FEW = """
import os, resource, sys
from kapelle.errors import SandboxError
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.session import run

def held():
    return sorted(int(name) for name in os.listdir("/proc/self/fd"))

box, limits = Bubblewrap(), Limits(wall_s=20.0)
command = [box.python, "-c", "print(1)"]
assert run(box, {}, command, b"", limits).ok  # what is looked up once is
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
ended = []
for spare in range(1, 16):
    before = held()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + spare, hard))
    try:
        ended.append(run(box, {}, command, b"", limits).ok)
    except (SandboxError, OSError):
        ended.append(None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert held() == before, (spare, before, held())
    try:
        assert os.waitpid(-1, os.WNOHANG) == (0, 0), "a child is left"
    except ChildProcessError:
        pass
print(ended)
assert ended[0] is None and ended[-1] is True and False not in ended, ended
"""


def test_too_few_descriptors_leave_none_open_and_no_process(sandbox: Bubblewrap) -> None:
    done = subprocess.run([sys.executable, "-c", FEW], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
