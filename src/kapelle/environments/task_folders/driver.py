"""Run inside the sandbox of a task: unpack files, run commands, relay calls to the policy and return the files.

`serve` answers requests. Each request and each reply is a line with a number and JSON, and a reply has the number of its
request. `grade` runs the tests of a task once without output, because process 1 reports the result. The caller trusts nothing
that this file returns, because the programs of the agent run as the same user. This file imports only the standard library,
because it is copied into sandboxes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

SYSTEM = ("/usr/", "/bin/", "/lib/", "/lib64/", "/kapelle/")
"""Read-only folders that may be targets of links, in addition to the folders of the task."""
VERIFIER = "/logs/verifier"
OUTPUT = f"{VERIFIER}/test-stdout.txt"

# -------- Files as entries [path, kind, mode, content]; the content is base64 for a `file`, the target for a `link`, and empty for a
# `folder`


def put(entries: list[list[Any]]) -> None:
    """Write the given entries to the file system; entries that cannot be written are skipped.

    Links are written last, so that no file is written through a link.
    """
    for path, kind, mode, content in sorted(entries, key=lambda entry: bool(entry[1] == "link")):
        with contextlib.suppress(OSError):
            place = Path(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            if kind == "folder":
                place.mkdir(parents=True, exist_ok=True)
            elif kind == "link":
                place.symlink_to(content)
            else:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(base64.b64decode(content))
            if kind != "link":
                place.chmod(mode & 0o777 | 0o600 | (0o100 if kind == "folder" else 0))


def take(folders: list[str], most_bytes: int, most_files: int) -> dict[str, Any]:
    """Kill every other process and return the entries below the folders, or the limit that they exceed (`refused`).

    Devices, pipes, sockets and unreadable files are skipped.
    """
    kill_others()
    entries: list[list[Any]] = []
    size, waiting = 0, list(folders)
    while waiting:
        folder = waiting.pop()
        with contextlib.suppress(OSError):
            Path(folder).chmod(0o700)
        try:
            found = sorted(os.scandir(folder), key=lambda each: each.name)
        except OSError:
            continue
        for each in found:
            try:
                status = each.stat(follow_symlinks=False)
                mode = stat.S_IMODE(status.st_mode)
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(each.path)
                    entries.append([each.path, "folder", mode, ""])
                elif stat.S_ISLNK(status.st_mode):
                    entries.append([each.path, "link", 0, str(Path(each.path).readlink())])
                elif stat.S_ISREG(status.st_mode):
                    size += status.st_size
                    if size > most_bytes:
                        return {"refused": "bytes"}
                    place = Path(each.path)
                    place.chmod(mode | 0o600)
                    with place.open("rb") as file:
                        content = file.read(most_bytes + 1)
                    entries.append([each.path, "file", mode, base64.b64encode(content).decode()])
            except OSError:
                continue
            if len(entries) > most_files:
                return {"refused": "files"}
    return {"entries": entries}


def kill_others() -> None:
    """Kill all processes except the current process and process 1."""
    until = time.monotonic() + 5.0
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(-1, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.005)


def remove_links_out(folders: list[str]) -> None:
    """Remove all links that lead outside the folders and the system.

    The search is repeated until no such link is left, because links may form chains.
    """
    inside = tuple(f"{os.path.realpath(folder)}/" for folder in folders) + SYSTEM
    removed = True
    while removed:
        removed = False
        for folder in folders:
            for place, names, files in os.walk(folder):
                for name in (*names, *files):
                    path = Path(place, name)
                    if path.is_symlink() and not f"{os.path.realpath(path)}/".startswith(inside):
                        path.unlink()
                        removed = True


# -------- Commands


def run(command: list[str], cwd: str, env: dict[str, str], seconds: float, most: int) -> dict[str, Any]:
    """Run a command; return its exit code (None if it exceeds its time limit) and the beginning and end of its output.

    Background processes of the command continue to run, unless the command exceeds its time limit.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 - this runs inside the sandbox
            command,
            cwd=cwd,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return {"code": 127, "said": f"{command[0]}: {error}"}
    assert process.stdout is not None
    first, last, until = b"", b"", time.monotonic() + seconds
    fd, late = process.stdout.fileno(), False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        ended = process.poll() is not None
        if not ended and time.monotonic() > until:
            late = True
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = True
        ready = poll.poll(0 if ended else 20)
        piece = os.read(fd, 65536) if ready else b""
        if piece:
            room = most // 2 - len(first)
            first, last = first + piece[:room], (last + piece[room:])[-(most // 2) :]
        # A background process may hold the pipe open or fill it forever; the command has ended anyway.
        elif ended or ready:
            break
        if ended and time.monotonic() > until + 1.0:
            break
    process.stdout.close()
    code = process.wait()
    output = first + (b"\n[...]\n" if len(last) == most // 2 else b"") + last
    return {"code": None if late else code, "said": output.decode("utf-8", "replace")}


_launched: list[threading.Thread] = []
_result: dict[str, Any] = {}


def launch(**arguments: Any) -> None:
    """Start the only background command in a thread that calls `run`; `look` reports when the command has ended."""
    _launched.append(threading.Thread(target=lambda: _result.update(run(**arguments)), daemon=True))
    _launched[0].start()


def look(seconds: float) -> dict[str, Any]:
    """Wait up to `seconds` for the background command and return the result of `run`, or `running` if it has not ended."""
    _launched[0].join(seconds)
    return {"running": True} if _launched[0].is_alive() else _result


def grade(request: dict[str, Any]) -> None:
    """Unpack the files of an agent, then run the tests once and write their output to a file."""
    put(request["entries"])
    remove_links_out(request["folders"])
    Path(VERIFIER).mkdir(parents=True, exist_ok=True)
    done = run(request["command"], request["cwd"], request["env"], request["seconds"], request["most"])
    kill_others()  # so that no process overwrites the files that the tests wrote
    fd = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(done["said"].encode())


# -------- The relay: connections to a port in the sandbox leave through the only socket to the outside


def relay(port: int, out: str) -> None:
    """Listen on a loopback port and relay each connection to a Unix socket."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(64)

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        while True:
            near, _ = listening.accept()
            threading.Thread(target=connect, args=(near,), daemon=True).start()

    def connect(near: socket.socket) -> None:
        with near, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as far, contextlib.suppress(OSError):
            far.connect(out)
            back = threading.Thread(target=carry, args=(far, near), daemon=True)
            back.start()
            carry(near, far)
            back.join()

    threading.Thread(target=accept, daemon=True).start()


# -------- Requests


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests from a stream until the stream ends."""
    functions: dict[str, Callable[..., dict[str, Any] | None]] = {
        "put": put,
        "run": run,
        "launch": launch,
        "look": look,
        "take": take,
        "relay": relay,
    }
    for line in requests:
        number, _, request = line.partition(b" ")
        arguments = json.loads(request)
        reply = functions[arguments.pop("do")](**arguments) or {}
        replies.write(number + b" " + json.dumps(reply).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(0), "rb") as reading, os.fdopen(os.dup(1), "wb") as writing:
        # Programs do not inherit this channel.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        if sys.argv[1:] == ["grade"]:
            grade(json.loads(reading.readline()))
        else:
            serve(reading, writing)
