"""18 programs that stay small in every process and large as a whole, or that meet other runs on what all share."""

from __future__ import annotations

from dataclasses import replace

from tests.environments.sandbox.hostile.program import SMALL, Hostile, ends

MAPS = """
import mmap
MIB = 1 << 20
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PRIVATE, SHARED, HUGE, FAILED = 0x22, 0x21, 0x40022, ctypes.c_void_p(-1).value
def touched(size, flags):
    found = libc.mmap(None, size, 3, flags, -1, 0)
    if found == FAILED:
        return None
    for place in range(found, found + size, 4096):
        ctypes.c_char.from_address(place).value = b"x"
    return found
heard, tells = os.pipe()
os.set_blocking(heard, False)
def ready():
    os.write(tells, b"x")
def everywhere(work, processes=14):
    for _ in range(processes):
        if os.fork() == 0:
            work()
            ready()
            time.sleep(60)
            os._exit(0)
    there = 0
    while there < processes:
        time.sleep(0.02)
        try:
            there += os.waitpid(-1, os.WNOHANG)[0] > 0
            there += len(os.read(heard, 100))
        except BlockingIOError:
            pass
        except ChildProcessError:
            break
    time.sleep(2.0)
"""
_FILL = """
def fill(one):
    one.setblocking(False)
    try:
        while True:
            one.send(b"x" * 65536)
    except OSError:
        pass
"""
_LOST_CHILDREN = """
until = time.monotonic() + 19.0
while time.monotonic() < until:
    if os.fork() == 0:
        end = time.process_time() + 0.004
        while time.process_time() < end:
            pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
escaped("nobody counted it")
"""
_LONG = replace(SMALL, wall_s=20.0, cpu_s=0.4)
PATIENT = replace(SMALL, wall_s=30.0, cpu_s=20.0)

WHOLE = {
    "huge pages held by pipes": Hostile(
        MAPS
        + """
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
pipes, held = [], 0
while held < 600 * MIB:
    pipes.append(os.pipe())
    for _ in range(16):
        area = libc.mmap(None, 4 * MIB, 3, PRIVATE, -1, 0)
        page = (area + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        libc.madvise(page, 2 * MIB, 14)
        ctypes.c_char.from_address(page).value = b"x"
        got = libc.syscall(278, pipes[-1][1], ctypes.byref(Piece(page, 1)), 1, 0)
        libc.munmap(area, 4 * MIB)
        held += 2 * MIB if got > 0 else 0
    if got < 0:
        break
else:
    time.sleep(0.5)
    escaped("held", held)
"""
    ),
    "huge pages of which a page is kept": Hostile(
        MAPS
        + """
held = 0
for _ in range(300):
    area = libc.mmap(None, 4 * MIB, 3, PRIVATE, -1, 0)
    page = (area + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
    if libc.madvise(page, 2 * MIB, 14) == 0 or libc.madvise(page, 2 * MIB, 25) == 0:
        ctypes.c_char.from_address(page).value = b"x"
        held += 1
    libc.munmap(area, page - area)
    libc.munmap(page + 4096, area + 4 * MIB - page - 4096)
if held:
    escaped("asked for huge pages", held)
if libc.mmap(None, 2 * MIB, 3, HUGE, -1, 0) != FAILED or ctypes.get_errno() != 1:
    escaped("reached reserved huge pages", ctypes.get_errno())
"""
    ),
    "shared memory that nobody touches any more": Hostile(
        MAPS
        + """
def hide():
    area = touched(90 * MIB, SHARED)
    if area is None:
        os._exit(0)
    libc.madvise(area, 90 * MIB, 4)
everywhere(hide)
try:
    while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    escaped("holds more than a gigabyte")
except ChildProcessError:
    pass
""",
        limits=PATIENT,
    ),
    "shared memory of which a page is kept": Hostile(
        MAPS
        + """
def hide():
    while (area := touched(MIB, SHARED)) is not None:
        libc.munmap(area + 4096, MIB - 4096)
everywhere(hide)
escaped("nobody saw the rest")
""",
        ends("memory"),
        limits=PATIENT,
    ),
    "shared memory of a device": Hostile(
        MAPS
        + """
refused(os.open, "/dev/zero", os.O_RDWR)
refused(os.open, "/dev/mem", os.O_RDWR)
"""
    ),
    "memory behind a leader that has ended": Hostile(
        MAPS
        + """
import threading
def hide():
    def hold():
        time.sleep(0.05)
        touched(60 * MIB, PRIVATE)
        ready()
        time.sleep(60)
    threading.Thread(target=hold).start()
    libc.syscall(60, 0)
everywhere(hide, 6)
escaped("nobody saw it")
""",
        ends("memory"),
        limits=PATIENT,
    ),
    "a million mappings": Hostile(
        MAPS
        + """
def split():
    area = libc.mmap(None, 110 * MIB, 3, PRIVATE, -1, 0)
    for place in range(area, area + 110 * MIB, 8192):
        libc.munmap(place, 4096)
everywhere(split)
time.sleep(4)
escaped("the kernel keeps a record of each")
""",
        ends("memory", "cpu"),
        limits=PATIENT,
    ),
    "buffers of socket pairs": Hostile(
        MAPS
        + _FILL
        + """
import socket
held = []
def hide():
    for _ in range(55):
        try:
            held.append(socket.socketpair())
        except OSError:
            break
        for one in held[-1]:
            try:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MIB)
                escaped("a larger buffer")
            except OSError:
                pass
            fill(one)
everywhere(hide)
escaped("nobody counted them")
""",
        ends("memory"),
        limits=PATIENT,
    ),
    "connections that nobody accepts": Hostile(
        _FILL
        + """
import socket
listener = socket.socket(socket.AF_UNIX)
listener.bind("/box/socket")
listener.listen(4000)
for _ in range(1500):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect("/box/socket")
        fill(one)
time.sleep(0.5)
escaped("nobody counted them")
""",
        ends("memory"),
        limits=PATIENT,
    ),
    "sockets that keep more": Hostile(
        """
import socket
for family in (socket.AF_INET, socket.AF_INET6):
    refused(socket.socket, family, socket.SOCK_STREAM)
    refused(socket.socket, family, socket.SOCK_DGRAM)
refused(socket.socket, socket.AF_UNIX, socket.SOCK_DGRAM)
refused(socket.socketpair, socket.AF_UNIX, socket.SOCK_SEQPACKET)
refused(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)
"""
    ),
    "full pipes": Hostile(
        MAPS
        + """
import fcntl
def hide():
    held = [os.pipe() for _ in range(55)]
    for reader, writer in held:
        try:
            fcntl.fcntl(writer, 1031, MIB)
            escaped("a larger pipe")
        except OSError:
            pass
        os.set_blocking(writer, False)
        try:
            os.write(writer, b"x" * 65536)
        except OSError:
            pass
everywhere(hide, 28)
escaped("nobody counted them")
""",
        ends("memory"),
        limits=replace(PATIENT, memory_bytes=80 * 1024**2, processes=30),
    ),
    "pages of files that pipes and sockets hold": Hostile(
        """
import socket
open("pages", "wb").write(b"x" * 8192)
pages, (reader, writer), pair = os.open("pages", os.O_RDONLY), os.pipe(), socket.socketpair()
refused_call("splice", 275, pages, 0, writer, 0, 1, 0)
refused_call("tee", 276, reader, writer, 1, 2)
refused(os.sendfile, pair[0].fileno(), pages, 0, 1)
"""
    ),
    "a hundred thousand files in /run": Hostile(
        """
for folder in ("/run", "/dev", "/etc", "/", "/proc", "/dev/mqueue"):
    refused(open, f"{folder}/file", "w")
    refused(os.mkdir, f"{folder}/folder")
refused_call("mq_open", 240, b"queue", 0o102, 0o600, 0)
"""
    ),
    "children that nobody waits for": Hostile(
        "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)" + _LOST_CHILDREN,
        ends("cpu"),
        limits=_LONG,
    ),
    "children that leave nothing to wait for": Hostile(
        """
class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_ulong * 16), ("flags", ctypes.c_int),
                ("restorer", ctypes.c_void_p)]
libc.sigaction(17, ctypes.byref(Action(flags=2)), None)
"""
        + _LOST_CHILDREN,
        ends("cpu"),
        limits=_LONG,
    ),
    "slots and timers of the machine": Hostile(
        """
context = ctypes.c_ulong(0)
refused_call("io_setup", 206, 1000, ctypes.byref(context))
refused_call("timer_create", 222, 1, 0, ctypes.byref(context))
refused_call("prctl PR_SET_DUMPABLE", 157, 4, 0, 0, 0, 0)
"""
    ),
    "terminals": Hostile(
        """
refused(os.openpty)
for name in ("/dev/ptmx", "/dev/pts/ptmx", "/dev/tty", "/dev/console"):
    refused(os.open, name, os.O_RDWR)
"""
    ),
    "locks and watches on what all runs share": Hostile(
        """
import fcntl
for name in ("/usr/bin/env", "/usr", "/etc/ld.so.cache", "/dev/null", sys.executable, os.__file__):
    shared = os.open(name, os.O_RDONLY)
    refused(fcntl.flock, shared, fcntl.LOCK_SH | fcntl.LOCK_NB)
    refused(fcntl.fcntl, shared, 1024, fcntl.F_RDLCK)
    refused(fcntl.fcntl, shared, 1026, 1)
    for command in (36, 37, 38):
        refused(fcntl.fcntl, shared, command, b"\\0" * 32)
refused_call("inotify_init", 253)
refused_call("inotify_init1", 294, 0)
refused_call("fanotify_init", 300, 0, 0)
refused_call("fanotify_mark", 301, 0, 1, 1, -100, b"/usr")
""",
        twice=True,
    ),
}
