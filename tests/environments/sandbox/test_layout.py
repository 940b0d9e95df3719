"""What programs find in a sandbox beside the system: folders, files, a network of their own, one socket, a report."""

from __future__ import annotations

import base64
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kapelle.environments.sandbox.bubblewrap import Bubblewrap, Layout, check_reachable
from kapelle.environments.sandbox.contract import Limits, Result
from kapelle.environments.sandbox.session import run
from kapelle.errors import SandboxError

pytestmark = pytest.mark.usefixtures("sandbox")


def ran(layout: Layout, program: str, limits: Limits | None = None) -> Result:
    box = Bubblewrap(layout)
    return run(box, {"p.py": program.encode()}, [box.python, "p.py"], limits=limits or Limits(wall_s=20.0))


def test_further_folders_are_bounded_like_the_work_directory() -> None:
    fill = """
try:
    for k in range(3):
        open(f"/app/{k}", "wb").write(bytes(1 << 20))
except OSError as error:
    print(error.strerror)
"""
    assert (
        ran(Layout(folders=("/app",)), fill, Limits(file_bytes=2 << 20)).stdout
        == b"No space left on device\n"
    )
    many = "import time\nfor k in range(500):\n    open(f'/app/{k}', 'w').close()\ntime.sleep(9)"
    assert ran(Layout(folders=("/app",)), many, Limits(files=400)).limit == "files"


ATTEMPTS = """
import os, signal, subprocess, sys, time
def attempt(work):
    try:
        work()
    except OSError:
        pass
attempt(lambda: os.makedirs("/logs"))
open("/logs/reward", "w").write("0")
{attack}
"""
ATTACKS = {
    "prints it": "print('MQ=='); sys.stdout.flush(); os.write(2, b'MQ==')",
    "writes to process 1": "attempt(lambda: os.write(os.open('/proc/1/fd/1', os.O_WRONLY), b'MQ==\\n'))",
    "writes to its parents": "[attempt(lambda: os.write(os.open(f'/proc/{p}/fd/1', os.O_WRONLY), b'MQ==\\n')) for p in os.listdir('/proc') if p.isdigit()]",
    "kills process 1": "attempt(lambda: os.kill(1, signal.SIGKILL)); attempt(lambda: os.kill(1, signal.SIGSTOP))",
    "kills all": "os.kill(-1, signal.SIGKILL)",
    "a daemon writes when it is over": "subprocess.Popen(['sh', '-c', 'sleep 0.05; while :; do echo 1 > /logs/late; done'], start_new_session=True)",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_only_process_1_reports(attack: str) -> None:
    layout = Layout(folders=("/logs",), report=("/logs/reward", "/logs/late"))
    result = ran(layout, ATTEMPTS.format(attack=ATTACKS[attack]))
    assert result.limit is None
    assert result.stdout == base64.b64encode(b"0") + b"\n\n"
    assert result.stderr == b""


def test_a_report_has_regular_files_only() -> None:
    layout = Layout(folders=("/logs",), report=("/logs/a", "/logs/b", "/logs/c", "/logs/d"))
    program = "import os\nos.symlink('/usr/bin/env', '/logs/a'); os.mkfifo('/logs/b'); os.mkdir('/logs/c')\nopen('/logs/d', 'wb').write(bytes(3 << 20))"
    first, second, third, fourth, _ = ran(layout, program, Limits(output_bytes=4 << 20)).stdout.split(b"\n")
    assert (first, second, third) == (b"", b"", b"")
    assert len(base64.b64decode(fourth)) == 1 << 20


NETWORK = """
import select, socket
def found(work):
    try:
        return str(work())
    except OSError as error:
        return type(error).__name__
def speak():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as near, server.accept()[0] as far:
            near.sendall(b"x")
            return far.recv(1).decode()
print(found(speak), found(lambda: select.epoll().fileno() > 2), found(lambda: socket.create_connection(("127.0.0.1", PORT), 1)),
      found(lambda: socket.create_connection(("192.0.2.1", 80), 1)), found(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
      found(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW)), found(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)))
"""


def test_loopback_is_an_empty_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hosts:
        program = f"PORT = {hosts.getsockname()[1]}\n{NETWORK}"
        assert ran(Layout(loopback=True), program).stdout.split() == (
            b"x True ConnectionRefusedError OSError PermissionError PermissionError OSError".split()
        )
        assert ran(Layout(), program).stdout.split()[:3] == [b"OSError", b"OSError", b"OSError"], (
            "none without"
        )


def test_what_waits_in_connections_counts_as_memory() -> None:
    program = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
held = []
for _ in range(40):
    near = socket.create_connection(server.getsockname())
    held += [near, server.accept()[0]]
    near.setblocking(False)
    try:
        while near.send(bytes(1 << 16)):
            pass
    except BlockingIOError:
        pass
time.sleep(9)
"""
    result = ran(Layout(loopback=True), program, Limits(memory_bytes=192 << 20, wall_s=8.0))
    assert result.limit == "memory"


@pytest.fixture
def door() -> Iterator[Path]:
    """A Unix socket of this machine that says what it hears."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        Path(folder).chmod(0o711)
        path = Path(folder) / "door"
        server.bind(str(path))
        path.chmod(0o666)
        server.listen()

        def answer() -> None:
            with server.accept()[0] as near:
                near.sendall(near.recv(100))

        threading.Thread(target=answer, daemon=True).start()
        yield path


def test_one_socket_leads_out(door: Path) -> None:
    program = """
import os, socket
with socket.socket(socket.AF_UNIX) as out:
    out.connect("/run/out")
    out.sendall(b"heard")
    print(out.recv(100).decode())
try:
    os.unlink("/run/out")
except OSError:
    print("it stays")
"""
    assert ran(Layout(socket=(str(door), "/run/out")), program).stdout == b"heard\nit stays\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's programs run as that user")
def test_files_that_others_cannot_read_are_rejected_before_a_run(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        with pytest.raises(SandboxError, match="other users have no access"):
            check_reachable(str(folder))
        folder.chmod(0o755)
        check_reachable(str(folder))
    finally:
        folder.rmdir()
    with pytest.raises(SandboxError, match="does not exist"):
        check_reachable(str(folder))
