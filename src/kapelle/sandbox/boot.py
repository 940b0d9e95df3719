"""Hands a prepared sandbox its files and its command, on the pipe that then is its standard input."""

from __future__ import annotations

import io
import math
import secrets
import shlex
import tarfile
from collections.abc import Mapping, Sequence

from kapelle.sandbox.arguments import WORK
from kapelle.sandbox.contract import Limits
from kapelle.sandbox.session import Opening

_OPEN_FILES = 128
# Reads exactly the archive and the script, so that what follows on the pipe is the program's own standard input.
UNPACK = f'read -r n m; head -c "$n" | tar -x -m -o -f - -C {WORK} && eval "$(head -c "$m")"'


def opening(files: Mapping[str, bytes], command: Sequence[str], limits: Limits) -> Opening:
    """Return what the waiting shell reads (two sizes, an archive, a script) and what it then prints."""
    greeting = f"kapelle {secrets.token_hex(8)}"
    archive, script = _archive(files), _start_script(greeting, command, limits)
    return Opening(f"{len(archive)} {len(script)}\n".encode() + archive + script, f"{greeting}\n".encode())


def kernel_limits(limits: Limits) -> dict[str, str]:
    """Return what the kernel enforces for each process, as the shell's commands by what they bound."""
    cpu_s = max(1, math.ceil(limits.cpu_s))
    # The shell that waits for the command is a process too. Shells differ in the letter.
    processes = limits.processes + 1
    return {
        "address space": f"ulimit -v {max(1, limits.memory_bytes // 1024)}",
        "processes": f"{{ ulimit -u {processes} 2>/dev/null || ulimit -p {processes}; }}",
        # The first bound can be ignored, the second kills.
        "cpu": f"ulimit -S -t {cpu_s} && ulimit -H -t {cpu_s + 1}",
        "file size": f"ulimit -f {max(1, limits.file_bytes // 512)}",
        "descriptors": f"ulimit -n {_OPEN_FILES}",
        "locked memory": "ulimit -l 0",
    }


def _start_script(greeting: str, command: Sequence[str], limits: Limits) -> bytes:
    bounded = " && ".join(kernel_limits(limits).values()) or ":"
    # The greeting comes after every limit holds: a run without it never began.
    return f'{bounded} && echo {greeting} || exit 1\nset -- {shlex.join(command)}\n"$@"\nexit $?\n'.encode()


def _archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
