"""The two sandboxes of a task folder: one for the agent, and a new one for the tests.

    files of the task ─▶ Workplace: the agent's programs ─▶ entries (limited, checked) ─▶ grade: tests ─▶ report ─▶ reward

The sandbox of the agent is stopped before the sandbox of the tests starts. Only files, folders and links inside the folders of
the task are copied to the second sandbox, as data. No program can change the files of the tests in this sandbox. The results of
the tests are read after all programs have been killed. A `Provider` runs the sandboxes.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import posixpath
import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kapelle.environments.task_folders.bubblewrapped import REWARDS, AgentSandbox, Bubblewrapped
from kapelle.environments.task_folders.containers import Containers
from kapelle.environments.task_folders.forms import TESTS, VERIFIER, TaskFolder, summary_passed
from kapelle.environments.task_folders.provider import (
    MOST_FILES,
    Entries,
    Provider,
    Room,
    TaskSandbox,
    WorkspaceClosed,
)
from kapelle.errors import SandboxError

PROVIDERS: Mapping[str, Provider] = {
    "bubblewrap": Bubblewrapped(),
    "podman": Containers("podman"),
    "docker": Containers("docker"),
}
"""The places where tasks can run, by name."""
REPORT_BYTES = 4 << 20
"""Maximum number of bytes of the files that the tests write to `VERIFIER`."""
SAID_BYTES = 256 << 10
"""Maximum number of bytes of the output of the tests that are kept."""


class Workplace:
    """The sandbox of the agent, which starts with the first command."""

    def __init__(self, task: TaskFolder, room: Room) -> None:
        self.task, self._room = task, room
        self._sandbox: TaskSandbox | None = None
        self._lock = threading.RLock()
        self._over = False

    def put(self, entries: Entries) -> None:
        """Write files and folders to the sandbox; raise WorkspaceClosed if the sandbox has stopped."""
        with self._lock:
            self._started().put(entries)

    def run(self, command: Sequence[str], seconds: float, most: int) -> tuple[int | None, str]:
        """Run a command in the working directory; return its exit code (None if it exceeds its time limit) and its output.

        Raises WorkspaceClosed if the sandbox has stopped.
        """
        with self._lock:
            sandbox = self._started()
            return sandbox.run(command, self.task.workdir, self.task.env, seconds, most)

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
            sandbox = self._started()
            assert isinstance(sandbox, AgentSandbox), "only this sandbox has a relay to the policy"
            sandbox.launch(command, self.task.workdir, {**self.task.env, **env}, most)
            used, before = 0.0, time.monotonic()
            while used < seconds:
                if stop.is_set():
                    self.close()
                    raise WorkspaceClosed("the episode has ended")
                ended = sandbox.look(0.1)
                if ended is not None:
                    return ended
                now = time.monotonic()
                used, before = used + (0.0 if waits() else now - before), now
        return None, f"(the program was ended after {seconds:g} s)"

    def take(self) -> tuple[Entries, str | None]:
        """Stop the sandbox; return the files in the folders of the task, or no files and the reason why they are missing."""
        with self._lock:
            try:
                if self._over:
                    return [], "the sandbox had already ended"
                if self._sandbox is None:
                    start = built(self.task, self._room)
                    self.task = start.task
                    return [*start.entries], None
                most = self._room.left_mb << 20
                taken = self._sandbox.take(self.task.folders, most, MOST_FILES)
                if isinstance(taken, str):
                    bound = f"{self._room.left_mb} MiB" if taken == "bytes" else f"{MOST_FILES} files"
                    return [], f"the agent's files exceed {bound}"
                return checked(taken, self.task.folders, most, MOST_FILES), None
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
            if self._sandbox is not None:
                self._sandbox.stop()
                self._sandbox = None

    def _started(self) -> TaskSandbox:
        if self._over:
            raise WorkspaceClosed("the sandbox has ended")
        if self._sandbox is None:
            start = built(self.task, self._room)
            self.task = start.task
            self._sandbox = PROVIDERS[self._room.sandbox].start(self.task, self._room, tests=False)
            self._sandbox.put(start.entries)
        return self._sandbox


@dataclass(frozen=True, slots=True)
class BuiltTask:
    """The files of a task before the agent begins."""

    task: TaskFolder
    """The task, with the working directory and the folders of its image if it has one."""
    entries: Entries
    failed: tuple[str, ...] = ()
    """RUN lines of the Dockerfile that failed in the sandbox."""


_built: dict[tuple[int, str], tuple[TaskFolder, BuiltTask]] = {}
_building = threading.RLock()
BUILD_S = 120.0
"""Maximum time in seconds for one RUN line."""


def built(task: TaskFolder, room: Room) -> BuiltTask:
    """Return the files of a task after its RUN lines or from its image, which is done once per process.

    Raises SandboxError if no sandbox or image is available or there are too many files.
    """
    if task.image is None and not task.run:
        return BuiltTask(task, _files_before(task))
    key = id(task), room.sandbox
    with _building:
        if key not in _built or _built[key][0] is not task:
            made = _after_run_lines(task, room) if task.image is None else _from_image(task, room)
            _built[key] = task, made
        return _built[key][1]


def _files_before(task: TaskFolder) -> Entries:
    workdir: Entries = [[task.workdir, "folder", 0o755, ""]] if task.workdir.count("/") > 1 else []
    return workdir + [_entry(file.path, file.mode, file.content) for file in task.files]


def _from_image(task: TaskFolder, room: Room) -> BuiltTask:
    """Copy the folders of a task out of its image, because every sandbox has its own writable copy of them."""
    provider = PROVIDERS[room.sandbox]
    task = provider.prepare(task)
    sandbox = provider.start(replace(task, folders=()), room, tests=False)
    try:
        entries = sandbox.take(task.folders, room.left_mb << 20, MOST_FILES)
    except WorkspaceClosed as over:
        raise SandboxError(f"The image of the task {task.name} could not be read: {over}.") from None
    finally:
        sandbox.stop()
    if isinstance(entries, str):
        raise SandboxError(
            f"The folders {', '.join(task.folders)} in the image of the task {task.name} exceed {room.left_mb} MiB or {MOST_FILES} "
            "files. Raise `environment.left_mb`, or remove this task."
        )
    return BuiltTask(task, [*_files_before(task), *entries])


def _after_run_lines(task: TaskFolder, room: Room) -> BuiltTask:
    files, failed, copied = _files_before(replace(task, workdir="/")), [], 0
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
    return BuiltTask(task, entries, tuple(failed))


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
    summary = bool(task.expected) or task.form == "terminal-bench"
    env = {"PYTEST_ADDOPTS": "-p no:cacheprovider", **task.env, **task.tests_env}
    sandbox = PROVIDERS[room.sandbox].start(task, room, tests=True)
    try:
        sandbox.put([_entry(path, 0o555, content) for path, content in task.tests], fixed=True)
        sandbox.put([entry for entry in entries if _stays_inside(entry, task.folders)])
        _, output = sandbox.run(_tests_command(task), task.workdir, env, task.tests_s, SAID_BYTES)
        taken = [] if summary else sandbox.take((VERIFIER,), REPORT_BYTES, MOST_FILES)
    except WorkspaceClosed as over:
        return TaskRunResult(rewards[0], f"The tests gave no result: {over}.")
    finally:
        sandbox.stop()
    if isinstance(taken, str):
        return TaskRunResult(rewards[0], f"The tests left too many {taken} in {VERIFIER}.")
    reported = [f"{VERIFIER}/{name}" for name in (named or REWARDS)]
    files = {
        path: base64.b64decode(content).decode("utf-8", "replace")
        for path, kind, _, content in taken
        if kind == "file"
    }
    # Remove durations, so that equal files give equal records.
    tail = re.sub(r" in [0-9.]+s\b", "", output)[-2000:]
    if summary:
        reward, why = summary_passed(output, task.expected)
        return TaskRunResult(reward, why, tail)
    for path in reported:
        if text := files.get(path, "").strip():
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


def _tests_command(task: TaskFolder) -> list[str]:
    if task.script is not None:
        return ["bash", task.script]
    chosen = [path for path, _ in task.tests if re.search(r"/(test_[^/]*|[^/]*_test)\.py$", path)]
    # pytest is isolated from settings, plugins and modules in the agent's folders.
    begin = "import sys, os; sys.path[:0] = filter(None, os.environ.get('PYTHONPATH', '').split(':')); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-rA", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={TESTS}"]
    return ["python3", "-I", "-c", begin, *options, *chosen]


# -------- Checks of an agent's files in this process


def _entry(path: str, mode: int, content: bytes) -> list[Any]:
    return [path, "file", mode, base64.b64encode(content).decode()]


_SYSTEM = ("/usr/", "/bin/", "/lib/", "/lib64/", "/opt/", "/kapelle/")


def _stays_inside(entry: Sequence[Any], folders: Sequence[str]) -> bool:
    """Return whether an entry is no link, or a link that leads to the folders of the task or to the system.

    The target may go up only at its beginning. A link is written to a real folder, so it goes up from there, and then each part
    of the path is below an allowed folder or is another link of this kind.
    """
    path, kind, _, target = entry
    if kind != "link":
        return True
    inner = re.sub(r"^(?:\.\.?/+)*(?:\.\.?$)?", "", target)
    real = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    allowed = (*(f"{folder}/" for folder in folders), *_SYSTEM)
    return ".." not in inner.split("/") and f"/{real.lstrip('/')}/".startswith(allowed)


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
