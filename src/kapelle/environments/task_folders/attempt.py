"""The two sandboxes of a task folder: one for the agent, and a new one for the tests.

    files of the task ─▶ Workplace: the agent's programs ─▶ entries (limited, checked) ─▶ grade: tests ─▶ report ─▶ reward

The sandbox of the agent is stopped before the sandbox of the tests starts. Only files, folders and links inside the folders of
the task are copied to the second sandbox, as data. The files of the tests are read-only in this sandbox. Process 1 of this
sandbox, which no program can control, reports the result of the tests after it has killed all other processes.
"""

from __future__ import annotations

import base64
import binascii
import importlib.metadata
import json
import math
import posixpath
import re
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from kapelle.environments.sandbox.bubblewrap import Bubblewrap, Layout, check_reachable, reachable_interpreter
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.session import Session, start
from kapelle.environments.task_folders import driver as task_driver
from kapelle.environments.task_folders.forms import TESTS, VERIFIER, TaskFolder, summary_passed
from kapelle.errors import ConfigError, SandboxError
from kapelle.types import Json

DRIVER = "/kapelle/driver.py"
OUTPUT = f"{VERIFIER}/test-stdout.txt"
REWARDS = ("reward.json", "reward.txt")
"""Names of the files to which a test script may write rewards. Harbor reads the first file if both exist."""
SETUP_S = 30.0
"""Additional time in seconds for copying files, beyond the time limits of a task."""
LEAST_MB = 256
"""Minimum memory limit in mebibytes, which is needed to unpack the files of a task."""
SAID_BYTES = 256 << 10
"""Maximum number of bytes of the output of the tests that are kept."""
Entries = list[list[Any]]
"""Files in the format of `driver`: lists of path, kind, mode and content."""


@dataclass(frozen=True, slots=True)
class Room:
    """The limits and contents of the sandboxes."""

    memory_mb: int
    """Maximum memory in mebibytes of all programs and files."""
    disk_mb: int
    """Maximum total size in mebibytes of the files in one folder."""
    left_mb: int
    """Maximum total size in mebibytes of the files at the end of an episode."""
    processes: int
    packages: tuple[str, ...]
    """Installed Python packages that are available in the sandboxes, together with their dependencies."""
    visible: tuple[str, ...] = ()
    """Additional files and folders of the host that the programs of the agent may read."""
    files: tuple[str, ...] = ()
    """Files of the programs of the agent, which are copied to `AGENT`."""
    socket: str | None = None
    """Path of a Unix socket of the host for calls to the policy."""
    address_mb: int | None = None
    """Maximum address space in mebibytes of each program. With None, the limit is `memory_mb`."""


MOST_FILES = 4096
"""Maximum number of files at the end of an episode."""
PORT = 8000
"""Port of the relay in the sandbox of the agent."""
SOCKET = "/run/policy"
AGENT = "/agent"
INSTRUCTION = f"{AGENT}/instruction.md"
"""Path of the file in the sandbox that contains the instruction of the task."""


class WorkspaceClosed(Exception):
    """Raised if the sandbox of the agent has stopped; the message gives the reason."""


class Workplace:
    """The sandbox of the agent, which starts with the first command."""

    def __init__(self, task: TaskFolder, room: Room) -> None:
        self.task, self._room = task, room
        self._session: Session | None = None
        self._lock = threading.RLock()
        self._over = False

    def put(self, entries: Entries) -> None:
        """Write files and folders to the sandbox; raise WorkspaceClosed if the sandbox has stopped."""
        with self._lock:
            self._ask("put", SETUP_S, entries=entries)

    def run(self, command: Sequence[str], seconds: float, most: int) -> tuple[int | None, str]:
        """Run a command in the working directory; return its exit code (None if it exceeds its time limit) and its output.

        Raises WorkspaceClosed if the sandbox has stopped.
        """
        with self._lock:
            reply = self._ask("run", seconds + SETUP_S, **self._command(command, {}, seconds, most))
        return _code(reply)

    def play(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        seconds: float,
        most: int,
        *,
        waits: Callable[[], bool],
        stop: threading.Event,
    ) -> tuple[int | None, str]:
        """Run the program of an agent for at most `seconds`, excluding the time in which `waits` returns True.

        Returns the exit code (None if the program exceeds its time limit) and the output. Raises WorkspaceClosed if the sandbox
        has stopped or `stop` is set.
        """
        with self._lock:
            self._ask("launch", SETUP_S, **self._command(command, env, 1e9, most))
            used, before = 0.0, time.monotonic()
            while used < seconds:
                if stop.is_set():
                    self.close()
                    raise WorkspaceClosed("the episode has ended")
                reply = self._ask("look", SETUP_S, seconds=0.1)
                if "running" not in reply:
                    return _code(reply)
                now = time.monotonic()
                used, before = used + (0.0 if waits() else now - before), now
        return None, f"(the program was ended after {seconds:g} s)"

    def _command(
        self, command: Sequence[str], env: Mapping[str, str], seconds: float, most: int
    ) -> dict[str, Json]:
        variables = {**_variables(self.task, self._room), **env}
        return {
            "command": list(command),
            "cwd": self.task.workdir,
            "env": variables,
            "seconds": seconds,
            "most": most,
        }

    def take(self) -> tuple[Entries, str | None]:
        """Stop the sandbox; return the files in the folders of the task, or no files and the reason why they are missing."""
        with self._lock:
            try:
                if self._over:
                    return [], "the sandbox had already ended"
                if self._session is None:
                    return [*built(self.task, self._room).entries], None
                most = self._room.left_mb << 20
                reply = self._ask(
                    "take",
                    SETUP_S,
                    folders=list(self.task.folders),
                    most_bytes=most,
                    most_files=MOST_FILES,
                )
                if "refused" in reply:
                    too_large = reply["refused"] == "bytes"
                    bound = f"{self._room.left_mb} MiB" if too_large else f"{MOST_FILES} files"
                    return [], f"the agent's files exceed {bound}"
                return checked(reply.get("entries"), self.task.folders, most, MOST_FILES), None
            except WorkspaceClosed as ended:
                return [], str(ended)
            except ValueError as wrong:
                return [], f"the agent's files are malformed: {wrong}"
            finally:
                self.close()

    def close(self) -> None:
        """Stop the sandbox; repeated calls have no effect."""
        with self._lock:
            self._over = True
            if self._session is not None:
                self._session.finish(kill=True)
                self._session = None

    def _ask(self, what: str, within_s: float, **given: Json) -> Mapping[str, Any]:
        if self._over:
            raise WorkspaceClosed("the sandbox has ended")
        if self._session is None:
            self._begin()
        session = self._session
        assert session is not None, "`_begin` has started it"
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
            self._over, self._session = True, None
            limit = session.finish(kill=True).limit
            raise WorkspaceClosed(
                "a program ended the sandbox"
                if limit is None
                else f"the sandbox reached its limit of {limit}"
            )
        return reply

    def _begin(self) -> None:
        room, task = self._room, self.task
        socket = None if room.socket is None else (room.socket, SOCKET)
        own = tuple(
            (f"{AGENT}/{Path(file).name}", Path(file).expanduser().read_bytes()) for file in room.files
        )
        files = (*own, (INSTRUCTION, task.instruction.encode()))
        layout = _layout(task, room, files=files, socket=socket, visible=room.visible)
        limits = _limits(task, room, math.inf, output_bytes=(room.left_mb << 20) * 3 // 2 + (32 << 20))
        box = Bubblewrap(layout)
        self._session = start(box, {}, [box.python, "-I", "-B", DRIVER], limits)
        self.put(built(task, room).entries)
        if socket is not None:
            self._ask("relay", SETUP_S, port=PORT, out=SOCKET)


def _code(reply: Mapping[str, Any]) -> tuple[int | None, str]:
    code = reply.get("code")
    return code if isinstance(code, int) else None, str(reply.get("said", ""))


@dataclass(frozen=True, slots=True)
class BuiltTask:
    """The files of a task before the agent begins."""

    entries: Entries
    failed: tuple[str, ...] = ()
    """RUN lines of the Dockerfile that failed in the sandbox."""


_built: dict[int, tuple[TaskFolder, BuiltTask]] = {}
_building = threading.RLock()
BUILD_S = 120.0
"""Maximum time in seconds for one RUN line."""


def built(task: TaskFolder, room: Room) -> BuiltTask:
    """Return the files of a task after its RUN lines, which are run once per process.

    Raises SandboxError if no sandbox is available or the lines create too many files.
    """
    workdir: Entries = [[task.workdir, "folder", 0o755, ""]] if task.workdir.count("/") > 1 else []
    files = [_entry(file.path, file.mode, file.content) for file in task.files]
    if not task.run:
        return BuiltTask(workdir + files)
    with _building:
        if id(task) in _built and _built[id(task)][0] is task:
            return _built[id(task)][1]
        failed, copied = [], 0
        for_lines = replace(room, left_mb=room.disk_mb, visible=(), files=(), socket=None)
        place = Workplace(replace(task, run=(), files=()), for_lines)
        try:
            for line in task.run:
                place.put([*files[copied : line.after], [line.workdir, "folder", 0o755, ""]])
                copied = line.after
                code, _ = place.run(
                    ["sh", "-c", f"cd {shlex.quote(line.workdir)} && {line.command}"], BUILD_S, 2000
                )
                if code != 0:
                    failed.append(line.command)
            place.put(files[copied:])
            entries, why = place.take()
        except WorkspaceClosed as over:
            entries, why = [], str(over)
        finally:
            place.close()
        if why is not None:
            raise SandboxError(f"The RUN lines of the task {task.name} could not be run: {why}.")
        _built[id(task)] = task, BuiltTask(entries, tuple(failed))
        return _built[id(task)][1]


@dataclass(frozen=True, slots=True)
class TaskRunResult:
    """The result of the tests of a task."""

    reward: float
    why: str
    said: str = ""
    """The end of the output of the tests."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The numbers in the file `reward.json`, by name."""


def grade(
    task: TaskFolder, entries: Entries, room: Room, rewards: tuple[float, float] = (0.0, 1.0)
) -> TaskRunResult:
    """Run the tests of a task on the files of an agent, and block until the tests end.

    If the result is unclear, the reward is the first number of `rewards`, which is the minimum. Raises SandboxError if no
    sandbox is available.
    """
    named = [name for name in REWARDS if any(name.encode() in content for _, content in task.tests)]
    reported = [f"{VERIFIER}/{name}" for name in (named or REWARDS)]
    summary = bool(task.expected) or task.form == "terminal-bench"
    layout = _layout(task, room, files=task.tests, report=(OUTPUT,) if summary else (OUTPUT, *reported))
    box = Bubblewrap(layout)
    # The sandbox's only output is the report of process 1.
    limits = _limits(task, room, task.tests_s + SETUP_S, output_bytes=8 << 20)
    session = start(box, {}, [box.python, "-I", "-B", DRIVER, "grade"], limits)
    request = {
        "entries": entries,
        "folders": list(task.folders),
        "command": _tests_command(task),
        "cwd": task.workdir,
        "env": {"PYTEST_ADDOPTS": "-p no:cacheprovider", **_variables(task, room), **task.tests_env},
        "seconds": task.tests_s,
        "most": SAID_BYTES,
    }
    try:
        session.send(json.dumps(request).encode() + b"\n")
    except BaseException:
        session.finish(kill=True)
        raise
    done = session.finish()
    if done.limit is not None:
        return TaskRunResult(rewards[0], f"The tests reached their limit of {done.limit}.")
    lines = done.stdout.split(b"\n")
    texts = [base64.b64decode(line).decode("utf-8", "replace") for line in lines[: len(layout.report)]]
    output, files = texts[0], dict(zip(reported, texts[1:], strict=False))
    # Remove durations, so that equal files give equal records.
    tail = re.sub(r" in [0-9.]+s\b", "", output)[-2000:]
    if summary:
        reward, why = summary_passed(output, task.expected)
        return TaskRunResult(reward, why, tail)
    for path in reported:
        if text := files[path].strip():
            found = read_reward(posixpath.basename(path), text)
            if isinstance(found, str):
                return TaskRunResult(rewards[0], found, tail)
            if not rewards[0] <= found["reward"] <= rewards[1]:
                return TaskRunResult(
                    rewards[0],
                    f"{path} contains {found['reward']}, which is outside the range `rewards`.",
                    tail,
                )
            return TaskRunResult(found["reward"], f"{path} contains {found['reward']}.", tail, found)
    return TaskRunResult(rewards[0], f"The tests wrote no {' or '.join(reported)}.", tail)


def read_reward(name: str, text: str) -> dict[str, float] | str:
    """Return the numbers in a reward file, including `reward`, or the reason why there is no reward."""
    if name == "reward.txt":
        try:
            number = float(text) if len(text) < 64 else math.nan
        except ValueError:
            number = math.nan
        return {"reward": number} if math.isfinite(number) else f"{name} contains no number: {text[:60]!r}."
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return f"{name} is not valid JSON."
    if not isinstance(values, dict):
        return f"{name} is not a JSON object."
    found = {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
    }
    if "reward" not in found and len(found) == 1:
        found = {**found, "reward": next(iter(found.values()))}
    return found if "reward" in found else f"{name} has no number `reward`."


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
        memory_bytes=max(min(task.memory_mb, room.memory_mb), LEAST_MB) << 20,
        address_bytes=None if room.address_mb is None else room.address_mb << 20,
        processes=room.processes,
        output_bytes=output_bytes,
        file_bytes=room.disk_mb << 20,
        files=3 * MOST_FILES,
        patience=2.0,
    )


def _variables(task: TaskFolder, room: Room) -> dict[str, str]:
    places = dict.fromkeys(str(path.parent) for path in package_paths(room.packages))
    return {"PATH": "/kapelle/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": ":".join(places), **task.env}


def _tests_command(task: TaskFolder) -> list[str]:
    if task.script is not None:
        return ["bash", task.script]
    chosen = [path for path, _ in task.tests if re.search(r"/(test_[^/]*|[^/]*_test)\.py$", path)]
    # pytest is isolated from settings, plugins and modules in the agent's folders.
    begin = "import sys, os; sys.path[:0] = os.environ['PYTHONPATH'].split(':'); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-rA", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={TESTS}"]
    return ["python3", "-I", "-c", begin, *options, *chosen]


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


def check_room(room: Room) -> None:
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


# -------- Checks of an agent's files in this process


def _entry(path: str, mode: int, content: bytes) -> list[Any]:
    return [path, "file", mode, base64.b64encode(content).decode()]


def checked(entries: object, folders: Sequence[str], most_bytes: int, most_files: int) -> Entries:
    """Return the entries if they are inside the folders and within the limits; otherwise raise ValueError."""
    if not isinstance(entries, list) or len(entries) > most_files:
        raise ValueError("not a list of entries, or too many entries")
    size, kept = 0, Entries()
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 4:
            raise ValueError("an entry is not a list of four items")
        path, kind, mode, content = entry
        if not (isinstance(path, str) and isinstance(content, str) and type(mode) is int):
            raise ValueError("an entry has items of the wrong type")
        inside = any(path.startswith(f"{folder}/") for folder in folders)
        if (
            not inside
            or "\0" in path
            or posixpath.normpath(path) != path
            or kind not in ("file", "folder", "link")
        ):
            raise ValueError("an entry has an invalid path or kind")
        if kind == "file":
            try:
                size += len(base64.b64decode(content, validate=True))
            except (binascii.Error, ValueError):
                raise ValueError("a file's content is not valid base64") from None
        if size > most_bytes:
            raise ValueError("too many bytes")
        kept.append([path, kind, mode & 0o777, content])
    return kept
