"""11 programs that leave messages in what the kernel keeps for all, or make it keep more than it has limits for."""

from __future__ import annotations

from dataclasses import replace

from tests.environments.sandbox.hostile.program import SMALL, Hostile, ends
from tests.environments.sandbox.hostile.whole import MAPS

CHANNELS = {
    "leases, notifications and hints on files": Hostile(
        """
import fcntl
needed = {*range(8), 1030, 1032}
hint = ctypes.create_string_buffer(b"\\5" + b"\\0" * 63)
own = os.open("/box/own", os.O_RDWR | os.O_CREAT)
for shared in (os.open(sys.executable, os.O_RDONLY), os.open("/dev/null", os.O_RDWR), own):
    for command in {*range(60), *range(1020, 1070)} - needed:
        if libc.fcntl(shared, command, hint) != -1 or ctypes.get_errno() != 22:
            escaped("fcntl", command, ctypes.get_errno())
"""
    ),
    "what the page cache holds": Hostile(
        MAPS
        + """
import struct
shared, known = os.open(sys.executable, os.O_RDONLY), ctypes.create_string_buffer(4096)
page = ctypes.c_void_p(libc.mmap(None, 65536, 1, 2, shared, 0))
piece = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(known), 10))
refused_call("mincore", 27, page, 65536, known)
refused_call("cachestat", 451, shared, ctypes.create_string_buffer(16), known, 0)
refused_call("preadv2 RWF_NOWAIT", 327, shared, piece, 1, 0, 0, 8)
for advice in (20, 21):
    if libc.madvise(page, 65536, advice) == 0:
        escaped("advice that makes the host forget", advice)
for name, number in (("fadvise64", 221), ("readahead", 187)):
    # No file has this number: whoever does not say so has not asked the kernel.
    if libc.syscall(number, 9999, 0, 0, 4) != 0:
        escaped("the kernel was asked for", name)
if os.pread(shared, 4, 0) != b"\\x7fELF" or os.preadv(shared, [bytearray(4)], 0) != 4:
    escaped("an honest program reads")
"""
    ),
    "reads past the page cache": Hostile(
        """
import fcntl
refused(os.open, sys.executable, os.O_RDONLY | os.O_DIRECT)
refused_call("open", 2, sys.executable.encode(), os.O_DIRECT)
refused_call("openat2", 437, -100, sys.executable.encode(), ctypes.create_string_buffer(24), 24)
refused(fcntl.fcntl, os.open(sys.executable, os.O_RDONLY), fcntl.F_SETFL, os.O_DIRECT)
"""
    ),
    "pages that the kernel merges": Hostile(
        MAPS
        + """
if libc.madvise(touched(MIB, PRIVATE), MIB, 12) == 0:
    escaped("pages are merged with those of other runs")
refused_call("prctl PR_SET_MEMORY_MERGE", 157, 67, 1, 0, 0, 0)
"""
    ),
    "record locks without end": Hostile(
        """
import fcntl, struct
files = [os.open(f"/box/{number}", os.O_RDWR | os.O_CREAT) for number in range(100)]
try:
    for place in range(1 << 40, 0, -2):
        for one in files:
            fcntl.fcntl(one, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, place, 1, 0))
        if place < (1 << 40) - 1000:
            escaped("nobody counted them")
except OSError:
    pass
""",
        ends("memory"),
        limits=replace(SMALL, wall_s=30.0, cpu_s=20.0),
    ),
    "record locks on files of the host": Hostile(
        """
import fcntl
for name in ("/usr/bin/env", sys.executable, "/dev/null"):
    fcntl.lockf(os.open(name, os.O_RDONLY), fcntl.LOCK_SH)
    time.sleep(1.0)
    escaped("held up who wants to write", name)
""",
        ends("memory"),
    ),
    "triggers of the machine's pressure": Hostile(
        """
for name in ("cpu", "io", "memory"):
    refused(os.open, f"/proc/pressure/{name}", os.O_RDWR | os.O_NONBLOCK)
    refused(os.open, f"/proc/pressure/{name}", os.O_RDONLY)
refused(os.mkdir, "/proc/pressure/folder")
"""
    ),
    "locks that outlive who took them": Hostile(
        """
for flags in (0x400 | 17, 0x400 | 0x200 | 17, 0x400 | 0x100 | 17):
    got = libc.syscall(56, flags, 0, 0, 0, 0)
    if got == 0:
        os._exit(0)
    if got > 0:
        escaped("shares descriptors with a process", hex(flags))
"""
    ),
    "questions to file systems and devices": Hostile(
        """
import fcntl
for name in (sys.executable, "/usr", "/dev/urandom", "/dev/null", "/box"):
    shared = os.open(name, os.O_RDONLY)
    for request in (0x80111500, 0x81009431, 0xC0C0583B, 0xC020660B, 0x80086601, 1, 2, 0xC0045877, 0x80045200,
                    0x5207, 0x5452, 0x5460, 0x541D, 0x5411, 0xC0189436, 0x40049409, 0x801C581F):
        if libc.ioctl(shared, request, ctypes.create_string_buffer(4096)) != -1 or ctypes.get_errno() != 25:
            escaped("asked", name, hex(request), ctypes.get_errno())
    for number in (468, 469):
        refused_call("file attributes", number, -100, name.encode(), ctypes.create_string_buffer(24), 24, 0)
reader, writer = os.pipe()
os.write(writer, b"abc")
if fcntl.ioctl(reader, 0x541B, b"\\0" * 4) != b"\\3\\0\\0\\0" or os.isatty(0):
    escaped("an honest program asks how much there is")
"""
    ),
    "memory and processors of the whole machine": Hostile(
        """
status = ctypes.create_string_buffer(64)
refused_call("membarrier", 324, 1, 0, 0)
refused_call("move_pages", 279, 0, 0, 0, 0, status, 0)
refused_call("migrate_pages", 256, 0, 0, 0, 0)
refused_call("mbind", 237, 0, 0, 0, 0, 0, 0)
refused_call("prctl PR_SCHED_CORE", 157, 62, 1, 0, 0, 0)
refused_call("process_mrelease", 448, 3, 0)
"""
    ),
    "times of devices": Hostile(
        """
devices = [f"/dev/{name}" for name in ("null", "full", "random", "urandom")]
times = [os.stat(device).st_mtime for device in devices]
if max(times) - min(times) > 0.8:
    escaped("a message of an earlier run", times)
time.sleep(0.9)
os.utime(devices[1])
for device in devices:
    refused(os.chmod, device, 0o600)
    refused(os.setxattr, device, "user.message", b"x")
""",
        again=True,
    ),
}
