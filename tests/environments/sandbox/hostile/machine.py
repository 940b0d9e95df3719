"""18 programs that reach for what the whole machine shares, or hide what they use where no single process holds it."""

from __future__ import annotations

from dataclasses import replace

from tests.environments.sandbox.hostile.program import SMALL, Hostile, ends
from tests.environments.sandbox.hostile.whole import MAPS, PATIENT

_LONG = replace(SMALL, wall_s=20.0, cpu_s=0.4)

MACHINE = {
    "rules of a security module": Hostile(
        """
wanted = ctypes.create_string_buffer(b"\\1" + b"\\0" * 23)
for size in (8, 16, 24):
    refused_call("landlock_create_ruleset", 444, wanted, size, 0)
refused_call("landlock_create_ruleset", 444, 0, 0, 1)
"""
    ),
    "filters of its own": Hostile(
        """
import struct
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
load, allow = struct.pack("=HBBI", 0, 0, 0, 1), struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000)
steps = ctypes.create_string_buffer(load * 4095 + allow)
own = Filter(4096, ctypes.addressof(steps))
libc.prctl(38, 1, 0, 0, 0)
refused_call("seccomp", 317, 1, 0, ctypes.byref(own))
refused_call("prctl PR_SET_SECCOMP", 157, 22, 2, ctypes.byref(own), 0, 0)
refused_call("prctl PR_SET_THP_DISABLE", 157, 41, 0, 0, 0, 0)
"""
    ),
    "the disks of the host": Hostile(
        """
shared = os.open("/usr/bin/env", os.O_RDONLY)
for name, number in (("fsync", 74), ("fdatasync", 75), ("syncfs", 306), ("sync_file_range", 277), ("msync", 26)):
    if libc.syscall(number, shared, 0, 0, 0) != 0:
        escaped("an honest program needs", name)
    # No file has this number: whoever does not say so has not asked the kernel.
    if libc.syscall(number, 9999, 1, 0, 0) != 0:
        escaped("the kernel was asked for", name)
os.sync()
"""
    ),
    "tables, handles and quotas": Hostile(
        """
room, number = ctypes.create_string_buffer(200), ctypes.c_int()
ctypes.c_uint32.from_buffer(room, 0).value = 128
refused_call("modify_ldt", 154, 1, room, 16)
refused_call("name_to_handle_at", 303, -100, b"/usr", room, ctypes.byref(number), 0)
refused_call("open_by_handle_at", 304, -100, room, 0)
refused_call("open_tree_attr", 467, -100, b"/", 1, 0, 0)
refused_call("quotactl_fd", 443, 3, 0, 0, 0)
refused_call("acct", 163, b"/box/x")
refused_call("syslog", 103, 3, room, 200)
refused_call("swapon", 167, b"/box/x", 0)
"""
    ),
    "crashes that the host's handler would hear of": Hostile(
        """
import resource, signal
if max(resource.getrlimit(resource.RLIMIT_CORE)) > 1:
    escaped("cores of", resource.getrlimit(resource.RLIMIT_CORE))
if (child := os.fork()) == 0:
    os.kill(os.getpid(), signal.SIGQUIT)
if os.WCOREDUMP(os.waitpid(child, 0)[1]):
    escaped("left a core")
"""
    ),
    "signals that wait": Hostile(
        """
import signal
class Value(ctypes.Union):
    _fields_ = [("pointer", ctypes.c_void_p)]
libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, Value]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 1])
queued = 0
while queued < 5000 and libc.sigqueue(os.getpid(), signal.SIGRTMIN + 1, Value(1)) == 0:
    queued += 1
print("queued", queued)
""",
        counts={"queued": 1024},
    ),
    "bursts of memory between two looks": Hostile(
        MAPS
        + """
def burst():
    while (area := touched(100 * MIB, PRIVATE)) is not None:
        libc.munmap(area, 100 * MIB)
everywhere(burst)
""",
        ends("memory", "cpu"),
        limits=PATIENT,
    ),
    "mappings of a file of the system": Hostile(
        MAPS
        + """
shared = os.open(sys.executable, os.O_RDONLY)
for place in range(60_000):
    if libc.mmap(None, 4096, 1, 2, shared, place % 100 * 4096) == FAILED:
        break
time.sleep(0.5)
escaped("the kernel keeps a record of each")
""",
        ends("memory", "cpu"),
    ),
    "pipes on their way through sockets": Hostile(
        """
import array, socket
pairs, sent = [], 0
try:
    while sent < 2000:
        pairs.append(socket.socketpair())
        ends = [os.pipe() for _ in range(25)]
        for reader, writer in ends:
            os.set_blocking(writer, False)
            os.write(writer, b"x" * 65536)
        readers = array.array("i", [reader for reader, _ in ends])
        pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, readers)])
        sent += 25
        for fd in (fd for both in ends for fd in both):
            os.close(fd)
except OSError:
    pass
print("sent", sent)
""",
        counts={"sent": 300},
    ),
    "names in every place": Hostile(
        """
places = [folder for top in ("/dev", "/run", "/etc", "/proc/self") for folder, _, _ in os.walk(top)]
for place in (*places, "/", "/usr", "/usr/lib", "/home", "/var", "/sys", "/proc", "/proc/sys/kernel"):
    for make in (os.mkdir, os.mkfifo):
        try:
            make(f"{place}/kapelle-{make.__name__}")
        except OSError:
            continue
        if not place.startswith("/dev/shm"):
            escaped("made something in", place)
for number in range(100_000):
    for place in ("/dev/shm", "/box"):
        try:
            os.symlink("x" * 4000, f"{place}/{number}")
        except OSError:
            time.sleep(0.01)
""",
        ends("files", "memory"),
    ),
    "attributes of files": Hostile(
        """
held = 0
try:
    for number in range(150):
        open(f"/dev/shm/{number}", "w").close()
        for name in range(100):
            os.setxattr(f"/dev/shm/{number}", f"user.{name}", b"x" * 60_000)
            held += 60_000
except OSError:
    pass
time.sleep(0.2)
if held > 32_000_000:
    escaped("held", held)
""",
        ends("end", "files", "memory"),
    ),
    "folders in folders": Hostile(
        """
here, name = os.open("/box", os.O_RDONLY), "d" * 200
try:
    while True:
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
except OSError:
    time.sleep(60)
""",
        ends("files"),
    ),
    "time in the kernel of children that nobody waits for": Hostile(
        """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
source, until = os.open("/dev/urandom", os.O_RDONLY), time.monotonic() + 19.0
while time.monotonic() < until:
    if os.fork() == 0:
        for _ in range(4):
            os.read(source, 500_000)
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
escaped("nobody counted it")
""",
        ends("cpu"),
        limits=_LONG,
    ),
    "time in programs that replace one another": Hostile(
        """
end = time.process_time() + 0.01
while time.process_time() < end:
    pass
turns = int(sys.argv[2]) + 1 if len(sys.argv) > 2 else 0
if turns < 3000:
    os.execv(sys.executable, [sys.executable, "-S", "-E", *sys.argv[:2], str(turns)])
escaped("nobody counted it")
""",
        ends("cpu"),
        limits=_LONG,
    ),
    "sockets of every family": Hostile(
        """
import socket
for family in range(50):
    for kind in (1, 2, 3, 4, 5, 10):
        for protocol in (0, 1, 15, 255):
            try:
                socket.socket(family, kind, protocol).close()
            except OSError:
                continue
            if (family, kind) != (socket.AF_UNIX, socket.SOCK_STREAM):
                escaped("a socket of", family, kind, protocol)
"""
    ),
    "devices of every kind": Hostile(
        """
for name in ("kmsg", "hpet", "fuse", "kvm", "net/tun", "vhost-vsock", "loop-control", "userfaultfd", "udmabuf",
             "dma_heap/system", "vda", "sda", "snapshot", "cpu_dma_latency", "watchdog", "rtc0", "uinput", "tty0"):
    refused(os.open, f"/dev/{name}", os.O_RDONLY)
for major, minor in ((1, 1), (1, 3), (1, 5), (5, 2), (10, 200), (10, 229)):
    refused(os.mknod, "/box/device", 0o20666, os.makedev(major, minor))
    refused(os.mknod, "/box/device", 0o60666, os.makedev(major, minor))
"""
    ),
    "half characters without end": Hostile(
        """
import threading
def flood(fd):
    while True:
        os.write(fd, b"\\xc3\\xe2\\x82\\xf0\\x9f\\x1b]0;" * 5000)
threading.stack_size(1 << 18)
for fd in (1, 2):
    threading.Thread(target=flood, args=(fd,)).start()
""",
        ends("output"),
    ),
    "daemons that replace themselves": Hostile(
        """
import signal
if os.fork() == 0:
    os.setsid()
    for fd in range(3):
        os.close(fd)
    libc.prctl(1, 0, 0, 0, 0)
    for number in range(1, 64):
        if number not in (9, 17, 19, 32, 33):
            signal.signal(number, signal.SIG_IGN)
    until = time.monotonic() + 40
    while time.monotonic() < until:
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            pass
        time.sleep(0.005)
time.sleep(0.2)
""",
        ends("end", "cpu"),
    ),
}
