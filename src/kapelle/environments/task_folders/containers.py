"""Task sandboxes that podman or docker runs, one container of the task's image for each.

    container: process 1 (root without privileges, waits for the end of its input)
        ├─ exec as `PROGRAMS`: the commands of the agent, and the tests
        └─ exec as `KEEPER`: the files of the tests, and the check that no program is left

Process 1 ends with its input, so a container ends with the process that started it, at the latest after its time limit. No
program can signal, trace or imitate the keeper, which has another user id. All files that programs can change are in memory.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import secrets
import select
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.docker import (
    EngineName,
    call,
    confined,
    engine_path,
    engine_problem,
    remove,
    remove_left_behind,
)
from kapelle.environments.task_folders.forms import TESTS, VERIFIER, Image, TaskFolder, located
from kapelle.environments.task_folders.provider import (
    MOST_FILES,
    SETUP_S,
    Entries,
    Room,
    TaskSandbox,
    WorkspaceClosed,
)
from kapelle.errors import SandboxError

PROGRAMS, KEEPER = "65533:65533", "0:0"
"""The user of all programs of agents and tests, and the user of kapelle's own commands, as user and group id."""
MOST_S = 24 * 3600.0
"""Maximum time in seconds for which a container runs."""
TEMPORARY = ("/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108 (inside the container)
"""Folders for temporary files, which no one reads after an episode."""
# Each command is one process of the engine's client. Its first line of input is a secret with which it ends its output, so that
# no other program can end the output.
_BEGIN, _END = "read -r n; ", '; printf "\\n%s %s\\n" "$n" "$?"'
# Process 1 gives programs access to their folders, because some engines ignore the mode of a folder that the image contains.
_WAIT = (
    "for c in bash cat chmod head tar timeout; do "
    'command -v $c >/dev/null || { echo "the image has no program $c"; exit 1; }; done; '
    's=$1; t=$2; shift 2; chmod 1777 "$@" || exit 1; [ ! -d /tests ] || chmod 755 /tests 2>/dev/null; '
    'printf "\\n%s 0\\n" "$s"; timeout -s KILL "$t" cat >/dev/null; exit 0'
)
_RUN = 'cd "$1" && s=$2 && shift 2 && timeout -s KILL "$s" "$@" 2>&1 </dev/null'
_RUN_TESTS = f"{_RUN}; c=$?; kill -9 -1 2>/dev/null; (exit $c)"
_PUT = "umask 022; tar -x -m -o -f - -C / 2>/dev/null"
_KILL = "kill -9 -1"
_LEFT = 'for f in /proc/[0-9]*/status; do while read -r k v _; do [ "$k$v" = "Uid:$1" ] && echo left; done <"$f"; done 2>/dev/null'
_TAKE = 'm=$1; shift; cd /; chmod -R u+rwX "$@" 2>/dev/null; tar -c -f - "$@" 2>/dev/null | head -c "$m"'


class Containers:
    """The providers `podman` and `docker`."""

    def __init__(self, engine: EngineName) -> None:
        self._engine: EngineName = engine

    def check(self, room: Room) -> None:
        """Raise SandboxError if the engine is not installed or does not respond."""
        if problem := engine_problem(self._engine):
            raise SandboxError(f"The sandbox `{self._engine}` cannot be used on this machine: {problem}")

    def prepare(self, task: TaskFolder) -> TaskFolder:
        """Build or pull the image of a task unless it is present, and return the task with the folders of the image."""
        image = task.image
        if image is None:
            raise SandboxError(f"The task {task.name} has no image, which `{self._engine}` needs.")
        name = image.name or f"localhost/kapelle-task:{_content_hash(image)}"
        found = self._inspect(name)
        if found is None:
            if image.name is None:
                code, output = self._build(name, image)
            else:
                code, output = call(self._engine, "pull", name, within_s=image.build_s)
            found = self._inspect(name) if code == 0 else None
            if found is None:
                raise SandboxError(
                    f"{self._engine} could not {'pull' if image.name else 'build'} the image of the task {task.name}: {output[-600:]}"
                )
        config = found.get("Config") or {}
        volumes = tuple(config.get("Volumes") or ())
        built = replace(image, name=str(found["Id"]), context=())
        return located(task, built, str(config.get("WorkingDir") or "/"), volumes)

    def start(self, task: TaskFolder, room: Room, *, tests: bool) -> TaskSandbox:
        """Start a container of the image of a task."""
        return Container(self._engine, task, room, tests=tests)

    def _inspect(self, name: str) -> Mapping[str, Mapping[str, str]] | None:
        code, output = call(self._engine, "image", "inspect", name)
        return json.loads(output)[0] if code == 0 else None

    def _build(self, name: str, image: Image) -> tuple[int, str]:
        with tempfile.TemporaryDirectory(prefix="kapelle-") as folder:
            for file in image.context:
                path = Path(folder, file.path)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.content)
                path.chmod(file.mode)
            return call(self._engine, "build", f"--tag={name}", "--rm", folder, within_s=image.build_s)


def _content_hash(image: Image) -> str:
    content = repr([(file.path, file.mode, hashlib.sha256(file.content).digest()) for file in image.context])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


class Container:
    """A container of one task."""

    def __init__(self, engine: EngineName, task: TaskFolder, room: Room, *, tests: bool) -> None:
        """Start the container; raise SandboxError with the message of the engine if it does not start."""
        assert task.image is not None
        assert task.image.name is not None, "`prepare` has built the image"
        remove_left_behind(engine)
        self._engine: EngineName = engine
        self._name = f"kapelle-{secrets.token_hex(8)}"
        # When the tests end, the programs that they started have no time to change the results.
        self._run = _RUN_TESTS if tests else _RUN
        # Without writable folders, no program of an agent can run, and the keeper can read all files of the image.
        self._pristine = not task.folders
        limits = Limits(
            memory_bytes=room.memory_bytes(task),
            processes=room.processes + 8,  # the commands of kapelle
            file_bytes=room.disk_mb << 20,
            files=3 * MOST_FILES,
        )
        folders = (*task.folders, *TEMPORARY, *((VERIFIER,) if tests else ()))
        wall_s = min(MOST_S, 2 * (task.tests_s + SETUP_S)) if tests else MOST_S
        ready = secrets.token_hex(16)
        self._client = subprocess.Popen(  # noqa: S603 - the engine's client
            [
                *confined(engine, self._name, limits, folders),
                *((f"--tmpfs={TESTS}:rw,exec,nosuid,nodev,size={limits.file_bytes},mode=755",) * tests),
                *(f"--user={KEEPER}", "--workdir=/", *_user_namespace(engine), "--entrypoint=/bin/sh"),
                *(task.image.name, "-c", _WAIT, "sh", ready, f"{wall_s:.0f}", *folders),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # podman creates a file `oom` in its working directory when the memory is used up.
            cwd=tempfile.gettempdir(),
        )
        code, said = _read(self._client, time.monotonic() + 2 * SETUP_S, 4096, ready)
        if code is None:
            self.stop()
            reason = said.decode(errors="replace").strip()[-600:]
            raise SandboxError(f"{engine} could not start a container: {reason or 'it gave no reason'}")

    def put(self, entries: Entries, *, fixed: bool = False) -> None:
        """Write entries, as the keeper if they are `fixed`; like in other sandboxes, entries that do not fit are skipped."""
        if not entries:
            return
        user = KEEPER if fixed else PROGRAMS
        code, said = self._exec(user, _PUT, (), SETUP_S, 4096, given=_packed(entries))
        if code is None:
            raise WorkspaceClosed(
                f"files could not be written to the container ({said.decode(errors='replace')})"
            )

    def run(
        self, command: Sequence[str], cwd: str, env: Mapping[str, str], seconds: float, most: int
    ) -> tuple[int | None, str]:
        """Run a command; return its exit code and output."""
        begun = time.monotonic()
        words = (cwd, f"{seconds:.3f}", *command)
        code, output = self._exec(PROGRAMS, self._run, words, seconds + SETUP_S, most, env=env)
        killed = code in (None, 124, 137)
        late = killed and time.monotonic() - begun >= seconds
        return None if late else 137 if code is None else code, output.decode("utf-8", "replace")

    def take(self, folders: Sequence[str], most_bytes: int, most_files: int) -> Entries | str:
        """Kill all programs, check as the keeper that none is left, and return the entries below the folders."""
        if not self._pristine:
            self._kill_programs()
        user = KEEPER if self._pristine else PROGRAMS
        most = most_bytes + 2048 * most_files + (1 << 20)  # the archive has headers
        words = [str(most), *(folder.removeprefix("/") for folder in folders)]
        code, packed = self._exec(user, _TAKE, words, 2 * SETUP_S, 4 * most)
        if code is None:
            raise WorkspaceClosed(f"files could not be read ({packed[-200:].decode(errors='replace')})")
        return "bytes" if len(packed) >= most else _unpacked(packed, folders, most_bytes, most_files)

    def stop(self) -> None:
        """Remove the container."""
        remove(self._engine, self._name)
        self._client.kill()
        self._client.wait()
        for pipe in (self._client.stdin, self._client.stdout):
            assert pipe is not None
            pipe.close()

    def _kill_programs(self) -> None:
        until = time.monotonic() + SETUP_S
        while time.monotonic() < until:
            self._exec(PROGRAMS, _KILL, (), SETUP_S, 4096)
            code, left = self._exec(KEEPER, f"{_LEFT}; true", (PROGRAMS.partition(":")[0],), SETUP_S, 4096)
            if code == 0 and not left.strip():
                return
        raise WorkspaceClosed("the programs in the container could not be ended")

    def _exec(
        self,
        user: str,
        script: str,
        words: Sequence[str],
        seconds: float,
        most: int,
        *,
        env: Mapping[str, str] = MappingProxyType({}),
        given: bytes = b"",
    ) -> tuple[int | None, bytes]:
        """Run a script of the shell; return its exit code and output, or None and the output if it did not end by itself.

        Raises SandboxError if the engine has failed, and WorkspaceClosed if the container has ended or the time is over.
        """
        secret = secrets.token_hex(16)
        variables = {"HOME": "/tmp", **env}  # noqa: S108 (inside the container)
        with tempfile.TemporaryFile() as file:
            file.write(f"{secret}\n".encode() + given)
            file.seek(0)
            client = subprocess.Popen(  # noqa: S603 - the engine's client
                [
                    *(engine_path(self._engine), "exec", "--interactive", f"--user={user}", "--workdir=/"),
                    *(f"--env={name}={value}" for name, value in variables.items()),
                    *(self._name, "/bin/sh", "-c", _BEGIN + script + _END, "sh", *words),
                ],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=tempfile.gettempdir(),
            )
        until = time.monotonic() + seconds
        with client:
            code, output = _read(client, until, most, secret)
            client.kill()
        if code is None and time.monotonic() >= until:
            self.stop()
            raise WorkspaceClosed("a command did not end within its time limit")
        if code is None and self._client.poll() is not None:
            working, said = call(self._engine, "version")
            if working != 0:
                raise SandboxError(f"{self._engine} has failed: {said[-600:]}")
            raise WorkspaceClosed("the container has ended, for example because its memory was used up")
        return code, output


def _read(process: subprocess.Popen[bytes], until: float, most: int, secret: str) -> tuple[int | None, bytes]:
    """Read output up to the line with the secret and the exit code; return the exit code and the beginning and end of the output.

    The exit code is None if the output ends, or the time `until` (of the monotonic clock) is over, before this line.
    """
    assert process.stdout is not None
    fd, half = process.stdout.fileno(), most // 2
    first, last, dropped = b"", b"", False
    line = re.compile(rb"\n%s ([0-9]+)\n$" % secret.encode())
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (left := until - time.monotonic()) > 0:
        if not poll.poll(left * 1000):
            continue
        piece = os.read(fd, 65536)
        if not piece:
            break
        room = half - len(first)
        first, last = first + piece[: max(room, 0)], last + piece[max(room, 0) :]
        if len(last) > half + 128:
            last, dropped = last[-half - 128 :], True
        end = line.search((first[-128:] + last)[-128:])
        if end:
            ending = len(end[0])
            whole = first + (b"\n[...]\n" if dropped else b"") + last
            return int(end[1]), whole[:-ending]
    return None, first + last


def _user_namespace(engine: EngineName) -> tuple[str, ...]:
    """Return the option with which podman gives a container of root its own users; otherwise, the engine decides."""
    subordinate = Path("/etc/subuid")
    if engine != "podman" or os.geteuid() != 0 or not subordinate.is_file():
        return ()
    return ("--userns=auto:size=65536",) * ("containers:" in subordinate.read_text())


# -------- Files as archives


def _packed(entries: Entries) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        # Links are written last, so that no file is written through a link.
        for path, kind, mode, content in sorted(entries, key=lambda entry: bool(entry[1] == "link")):
            member = tarfile.TarInfo(path.removeprefix("/"))
            if kind == "link":
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            elif kind == "folder":
                member.type, member.mode = tarfile.DIRTYPE, mode | 0o700
                archive.addfile(member)
            else:
                data = base64.b64decode(content)
                member.size, member.mode = len(data), mode | 0o600
                archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _unpacked(packed: bytes, folders: Sequence[str], most_bytes: int, most_files: int) -> Entries | str:
    """Return the entries of an archive that programs of an agent may have influenced."""
    entries, size = Entries(), 0
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
            for member in archive:
                path, mode = f"/{member.name}", member.mode & 0o777
                if path in folders:
                    continue
                if member.isdir():
                    entries.append([path, "folder", mode, ""])
                elif member.issym():
                    entries.append([path, "link", 0, member.linkname])
                elif member.isreg() or member.islnk():
                    file = archive.extractfile(member)
                    content = b"" if file is None else file.read(most_bytes + 1)
                    size += len(content)
                    entries.append([path, "file", mode, base64.b64encode(content).decode()])
                if size > most_bytes:
                    return "bytes"
                if len(entries) > most_files:
                    return "files"
    except (tarfile.TarError, KeyError, ValueError, OverflowError, OSError, RecursionError) as error:
        raise WorkspaceClosed(f"its files could not be read: {error}") from None
    return entries
