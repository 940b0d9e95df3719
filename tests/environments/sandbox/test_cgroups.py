"""The strong mode's file operations, on folders that stand in for a cgroup file system: see docs/sandbox.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.usage import RunCgroup, find_folder
from kapelle.errors import SandboxError

FILES = {
    "cgroup.procs": "",
    "cgroup.kill": "",
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.oom.group": "0",
    "memory.current": "9000000",
    "memory.stat": "anon 1000000\nfile 6000000\nshmem 2000000\n",
    "memory.events": "low 0\noom 0\noom_kill 0\n",
    "cpu.stat": "usage_usec 1500000\nuser_usec 1000000\n",
    "pids.max": "max",
}


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is made gets its files, and one that is removed loses them, as the kernel does it."""
    make, remove = Path.mkdir, Path.rmdir

    def mkdir(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        make(self, mode, parents, exist_ok)
        for name, text in FILES.items():
            (self / name).write_text(text)

    def rmdir(self: Path) -> None:
        for name in FILES:
            (self / name).unlink()
        remove(self)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(Path, "rmdir", rmdir)


def tree(root: Path, own: str, *, controllers: str = "cpu memory pids", control: str = "") -> Path:
    folder = root / "cgroup" / "user.slice" / "kapelle.scope"
    folder.mkdir(parents=True)
    for place in (root / "cgroup", folder):
        (place / "cgroup.controllers").write_text(controllers)
        (place / "cgroup.subtree_control").write_text(control)
    (folder / "cgroup.procs").write_text("12\n34\n")
    (root / "own").write_text(f"1:cpu:/elsewhere\n0::/{own}\n")
    return folder


def find(root: Path) -> Path:
    return find_folder(root / "cgroup", root / "own")


def test_a_run_is_bounded_counted_killed_and_removed(kernel: None, tmp_path: Path) -> None:
    run = RunCgroup(tmp_path, Limits(memory_bytes=160_000_000, processes=16))
    (folder,) = tmp_path.iterdir()
    run.add(4321)
    read = {name: (folder / name).read_text() for name in FILES}
    assert read["memory.max"].startswith("160000000")
    assert (read["memory.oom.group"], read["pids.max"][:2], read["cgroup.procs"]) == ("1", "20", "4321")
    assert read["memory.swap.max"].startswith("0")
    assert run.cpu_s() == 1.5
    assert run.memory_bytes() == 5_000_000, "pages of files on disk can be dropped, those of a tmpfs cannot"
    assert not run.ran_out_of_memory()
    (folder / "memory.events").write_text("oom 3\noom_kill 2\n")
    assert run.ran_out_of_memory()
    run.kill()
    assert (folder / "cgroup.kill").read_text() == "1"
    run.close()
    assert list(tmp_path.iterdir()) == []
    run.close()


def test_cgroups_of_a_killed_trainer_are_removed(kernel: None, tmp_path: Path) -> None:
    folder = tree(tmp_path, "user.slice/kapelle.scope/kapelle", control="memory pids")
    (folder / "kapelle").mkdir(exist_ok=True)
    own = RunCgroup(folder, Limits())
    (folder / "run-999999999-0123").mkdir()
    find(tmp_path)
    assert [path.name for path in folder.glob("run-*")] == [own._folder.name]


def test_a_kernel_without_a_limit_has_no_strong_mode(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="No cgroup can be made"):
        RunCgroup(tmp_path, Limits())
    assert list(tmp_path.iterdir()) == []


def test_a_delegated_scope_is_taken_and_its_processes_make_room(
    kernel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tree(tmp_path, "user.slice/kapelle.scope")
    with pytest.raises(SandboxError, match="not delegated; start kapelle with `systemd-run"):
        find(tmp_path)
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"1" if name == "user.delegate" else b"0")
    assert find(tmp_path) == folder
    assert (folder / "cgroup.subtree_control").read_text() == "+memory +pids"
    # A file of the kernel takes each number that is written; the substitute keeps the last.
    assert (folder / "kapelle" / "cgroup.procs").read_text() == "34"
