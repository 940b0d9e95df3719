"""Task sandboxes that bubblewrap runs on this machine, with the programs of this machine.

An agent's sandbox runs the file `driver`, which answers requests. The sandbox of the tests has no output but the report of
process 1, which no program can control and which reads the results after it has killed all other processes.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import math
import posixpath
import secrets
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kapelle.environments.sandbox.bubblewrap import Bubblewrap, Layout, check_reachable, reachable_interpreter
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.pool import backend, require
from kapelle.environments.sandbox.session import Session, start
from kapelle.environments.task_folders import driver as task_driver
from kapelle.environments.task_folders.forms import VERIFIER, TaskFolder
from kapelle.environments.task_folders.provider import (
    MOST_FILES,
    SETUP_S,
    Entries,
    Room,
    TaskSandbox,
    WorkspaceClosed,
)
from kapelle.errors import ConfigError
from kapelle.types import Json

DRIVER = "/kapelle/driver.py"
OUTPUT = f"{VERIFIER}/test-stdout.txt"
REWARDS = ("reward.json", "reward.txt")
"""Names of the files to which a test script may write rewards. Harbor reads the first file if both exist."""
PORT = 8000
"""Port of the relay in the sandbox of the agent."""
SOCKET = "/run/policy"
AGENT = "/agent"
INSTRUCTION = f"{AGENT}/instruction.md"
"""Path of the file in the sandbox that contains the instruction of the task."""


class Bubblewrapped:
    """The provider `bubblewrap`."""

    def check(self, room: Room) -> None:
        """Raise SandboxError or ConfigError if bubblewrap, a package or a file cannot be used on this machine."""
        require(backend("bubblewrap"))
        _check_room(room)

    def prepare(self, task: TaskFolder) -> TaskFolder:
        """Return the task itself, because this provider uses no image."""
        return task

    def start(self, task: TaskFolder, room: Room, *, tests: bool) -> TaskSandbox:
        """Start a sandbox; the sandbox of the tests starts with the tests."""
        return TestsSandbox(task, room) if tests else AgentSandbox(task, room)


class AgentSandbox:
    """The sandbox of an agent."""

    def __init__(self, task: TaskFolder, room: Room) -> None:
        """Start the sandbox, with a relay to the socket of the room if there is one."""
        self._variables = _variables(room)
        socket = None if room.socket is None else (room.socket, SOCKET)
        own = tuple(
            (f"{AGENT}/{Path(file).name}", Path(file).expanduser().read_bytes()) for file in room.files
        )
        files = (*own, (INSTRUCTION, task.instruction.encode()))
        layout = _layout(task, room, files=files, socket=socket, visible=room.visible)
        limits = _limits(task, room, math.inf, output_bytes=(room.left_mb << 20) * 3 // 2 + (32 << 20))
        box = Bubblewrap(layout)
        self._session: Session | None = start(box, {}, [box.python, "-I", "-B", DRIVER], limits)
        if socket is not None:
            self._ask("relay", SETUP_S, port=PORT, out=SOCKET)

    def put(self, entries: Entries, *, fixed: bool = False) -> None:
        """Write files; `fixed` is not supported, because an agent's sandbox has no such files."""
        assert not fixed, "the files of the tests belong to the sandbox of the tests"
        self._ask("put", SETUP_S, entries=entries)

    def run(
        self, command: Sequence[str], cwd: str, env: Mapping[str, str], seconds: float, most: int
    ) -> tuple[int | None, str]:
        """Run a command; return its exit code and output."""
        return _code(self._ask("run", seconds + SETUP_S, **self._command(command, cwd, env, seconds, most)))

    def launch(self, command: Sequence[str], cwd: str, env: Mapping[str, str], most: int) -> None:
        """Start the only background command."""
        self._ask("launch", SETUP_S, **self._command(command, cwd, env, 1e9, most))

    def look(self, seconds: float) -> tuple[int | None, str] | None:
        """Wait up to `seconds` for the background command; return its exit code and output, or None if it is running."""
        reply = self._ask("look", SETUP_S, seconds=seconds)
        return None if "running" in reply else _code(reply)

    def take(self, folders: Sequence[str], most_bytes: int, most_files: int) -> Entries | str:
        """Kill all other programs and return the entries below the folders, or the exceeded limit."""
        reply = self._ask(
            "take", SETUP_S, folders=list(folders), most_bytes=most_bytes, most_files=most_files
        )
        return str(reply["refused"]) if "refused" in reply else reply.get("entries", [])

    def stop(self) -> None:
        """Stop the sandbox."""
        if self._session is not None:
            self._session.finish(kill=True)
            self._session = None

    def _command(
        self, command: Sequence[str], cwd: str, env: Mapping[str, str], seconds: float, most: int
    ) -> dict[str, Json]:
        variables = {**self._variables, **env}
        return {"command": list(command), "cwd": cwd, "env": variables, "seconds": seconds, "most": most}

    def _ask(self, what: str, within_s: float, **given: Json) -> Mapping[str, Any]:
        session = self._session
        if session is None:
            raise WorkspaceClosed("the sandbox has ended")
        # The number is random, so that a program cannot write the reply in advance.
        number = secrets.token_hex(16).encode()
        session.send(number + b" " + json.dumps({"do": what, **given}).encode() + b"\n")
        line = session.receive(within_s)
        reply_number, _, text = (line or b"").partition(b" ")
        try:
            reply = json.loads(text) if reply_number == number else None
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            self._session = None
            limit = session.finish(kill=True).limit
            raise WorkspaceClosed(
                "a program ended the sandbox"
                if limit is None
                else f"the sandbox reached its limit of {limit}"
            )
        return reply


def _code(reply: Mapping[str, Any]) -> tuple[int | None, str]:
    code = reply.get("code")
    return code if isinstance(code, int) else None, str(reply.get("said", ""))


class TestsSandbox:
    """The sandbox of the tests: `run` starts it with all files, runs one command and ends it."""

    __test__ = False

    def __init__(self, task: TaskFolder, room: Room) -> None:
        self._task, self._room = task, room
        self._entries: Entries = []
        self._fixed: list[tuple[str, bytes]] = []
        self._report: Entries = []

    def put(self, entries: Entries, *, fixed: bool = False) -> None:
        """Keep the files for `run`."""
        if fixed:
            self._fixed += [(path, base64.b64decode(content)) for path, _, _, content in entries]
        else:
            self._entries += entries

    def run(
        self, command: Sequence[str], cwd: str, env: Mapping[str, str], seconds: float, most: int
    ) -> tuple[int | None, str]:
        """Run the tests; return their output, without an exit code."""
        task, room = self._task, self._room
        report = (OUTPUT, *(f"{VERIFIER}/{name}" for name in REWARDS))
        box = Bubblewrap(_layout(task, room, files=tuple(self._fixed), report=report))
        # The sandbox's only output is the report of process 1.
        limits = _limits(task, room, seconds + SETUP_S, output_bytes=8 << 20)
        session = start(box, {}, [box.python, "-I", "-B", DRIVER, "grade"], limits)
        request = {
            "entries": self._entries,
            "folders": list(task.folders),
            "command": list(command),
            "cwd": cwd,
            "env": {**_variables(room), **env},
            "seconds": seconds,
            "most": most,
        }
        try:
            session.send(json.dumps(request).encode() + b"\n")
        except BaseException:
            session.finish(kill=True)
            raise
        done = session.finish()
        if done.limit is not None:
            raise WorkspaceClosed(f"the tests reached their limit of {done.limit}")
        output, *files = done.stdout.split(b"\n")[: len(report)]
        self._report = [
            [path, "file", 0o600, content.decode()]
            for path, content in zip(report[1:], files, strict=False)
            if content
        ]
        return None, base64.b64decode(output).decode("utf-8", "replace")

    def take(self, folders: Sequence[str], most_bytes: int, most_files: int) -> Entries | str:
        """Return the files that process 1 reported after the tests."""
        return self._report

    def stop(self) -> None:
        """Do nothing, because `run` has ended the sandbox."""


# -------- The contents of a sandbox


def _layout(
    task: TaskFolder,
    room: Room,
    files: tuple[tuple[str, bytes], ...],
    *,
    socket: tuple[str, str] | None = None,
    visible: tuple[str, ...] = (),
    report: tuple[str, ...] = (),
) -> Layout:
    python = reachable_interpreter().path
    programs = {
        "python": f'#!/bin/sh\nexec {python} "$@"\n',
        "python3": f'#!/bin/sh\nexec {python} "$@"\n',
        "pytest": f"#!{python}\nimport sys\nimport pytest\nsys.exit(pytest.main())\n",
    }
    shown = (
        (DRIVER, Path(str(task_driver.__file__)).read_bytes()),
        *((f"/kapelle/bin/{name}", text.encode()) for name, text in programs.items()),
        *files,
    )
    packages = tuple(str(path) for path in package_paths(room.packages))
    folders = (*task.folders, "/logs") if report else task.folders
    return Layout(folders, shown, (*packages, *visible), socket, loopback=True, report=report)


def _limits(task: TaskFolder, room: Room, wall_s: float, output_bytes: int) -> Limits:
    wall_s = min(wall_s, 24 * 3600.0)
    return Limits(
        wall_s=wall_s,
        cpu_s=wall_s * 4,
        memory_bytes=room.memory_bytes(task),
        address_bytes=None if room.address_mb is None else room.address_mb << 20,
        processes=room.processes,
        output_bytes=output_bytes,
        file_bytes=room.disk_mb << 20,
        files=3 * MOST_FILES,
        patience=2.0,
    )


def _variables(room: Room) -> dict[str, str]:
    places = dict.fromkeys(str(path.parent) for path in package_paths(room.packages))
    return {"PATH": "/kapelle/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": ":".join(places)}


@cache
def package_paths(names: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the files and folders of installed packages and of their dependencies; raise ConfigError for a missing package."""
    from packaging.requirements import Requirement

    found, waiting, seen = dict[Path, None](), list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(
                f"`environment.packages` requires the package {name}, which is not installed. Install it, or change the setting."
            ) from None
        for each in package.requires or ():
            need = Requirement(each)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                waiting.append(need.name)
        for file in package.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__"):
                found[Path(str(package.locate_file(top)))] = None
    return tuple(path for path in found if path.exists())


def _check_python(shown: str, visible: Sequence[str]) -> None:
    """Raise ConfigError for a virtual environment whose Python interpreter is outside the sandbox.

    This is the case for some environments of pyenv, conda or uv.
    """
    started = Path(shown, "bin", "python")
    found = started.resolve()
    if started.is_symlink() and not any(
        found.is_relative_to(Path(each).resolve())
        for each in ("/usr", *visible, *reachable_interpreter().needs)
    ):
        raise ConfigError(
            f"`environment.visible` contains the virtual environment {shown}, but its Python {found} is not in the sandbox. Create the "
            f"environment with `/usr/bin/python3 -m venv {shown}`, or add the folder of that Python to `environment.visible`."
        )


def _check_room(room: Room) -> None:
    """Raise ConfigError or SandboxError for packages or files that a sandbox cannot read."""
    python = Path(reachable_interpreter().path)
    own = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if room.packages and python != Path(sys.executable).resolve() and python.name != own:
        raise ConfigError(
            f"`environment.packages` are installed for {own}, but the sandbox's user can only start {python}. Install {own} for all "
            "users, or set `environment.packages: []`."
        )
    for path in package_paths(room.packages):
        check_reachable(str(path))
    for shown in room.visible:
        if not shown.startswith("/") or posixpath.normpath(shown) != shown:
            raise ConfigError(
                f"`environment.visible` contains {shown}, which is not a normalised absolute path. Give paths such as /opt/agent."
            )
        check_reachable(shown)
        _check_python(shown, room.visible)
    names = [Path(file).name for file in room.files]
    for file in room.files:
        if not Path(file).expanduser().is_file():
            raise ConfigError(
                f"`environment.files` contains {file}, which is not a file. List folders in `environment.visible` instead."
            )
        if names.count(Path(file).name) > 1 or f"{AGENT}/{Path(file).name}" == INSTRUCTION:
            raise ConfigError(
                f"The name {Path(file).name} in `environment.files` is used more than once or reserved. Rename the file."
            )
