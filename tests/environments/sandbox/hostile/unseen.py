"""7 programs that get out of the sight of whoever counts, or reach for the process that ends them."""

from __future__ import annotations

from dataclasses import replace

from tests.environments.sandbox.hostile.program import SMALL, Hostile, ends

_COPY = """
import shutil
copy = shutil.copy(sys.executable, "/dev/shm/program")
try:
    os.chmod(copy, 0o111)
except PermissionError:
    pass
os.execv(copy, [copy, "-c", '''
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
%s
print("ESCAPED", "nobody counted it")
'''])
"""

UNSEEN = {
    "programs that may not be read": Hostile(
        """
shared = os.open("/box/file", os.O_RDWR | os.O_CREAT, 0o700)
# An access list: the owner may run, the group read, a mask, others read.
rights = b"\\2\\0\\0\\0" + b"".join(bytes([tag, 0, right, 0]) + b"\\xff" * 4 for tag, right in ((1, 1), (4, 4), (32, 4)))
for mode in (0o111, 0o100, 0o377, 0o4711 & ~0o400):
    refused(os.chmod, "/box/file", mode)
    refused(os.fchmod, shared, mode)
    refused(os.mknod, f"/box/node{mode}", 0o100000 | mode)
    refused(os.open, f"/box/{mode}", os.O_CREAT | os.O_RDWR, mode)
    refused_call("creat", 85, b"/box/created", mode)
    refused_call("fchmodat2", 452, -100, b"/box/file", mode, 0)
refused(os.setxattr, "/box/file", "system.posix_acl_access", rights)
refused(os.setxattr, shared, "system.posix_acl_access", rights)
refused_call("umask", 95, 0o400)
for mode in (0o700, 0o644, 0o755, 0o500, 0o444, 0o200, 0):
    os.chmod("/box/file", mode)
"""
    ),
    "memory of a program that may not be read": Hostile(
        _COPY
        % """
for _ in range(12):
    if os.fork() == 0:
        held = b"x" * 60_000_000
        time.sleep(60)
time.sleep(20)
""",
        ends("memory"),
        limits=replace(SMALL, wall_s=30.0, cpu_s=20.0),
    ),
    "time of a program that may not be read": Hostile(
        _COPY
        % """
until = time.monotonic() + 19.0
while time.monotonic() < until:
    try:
        child = os.fork()
    except BlockingIOError:
        continue
    if child == 0:
        end = time.process_time() + 0.004
        while time.process_time() < end:
            pass
        os._exit(0)
    time.sleep(0.005)
""",
        ends("cpu"),
        limits=replace(SMALL, wall_s=20.0, cpu_s=0.4),
    ),
    "page tables of pages that are far apart": Hostile(
        """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for _ in range(10):
    if os.fork() == 0:
        for k in range(3500):
            # Read and never written: a page of zeros, and two tables of its own.
            at = libc.mmap(0x100000000000 + k * (1 << 30), 4096, 1, 0x100022, -1, 0)
            ctypes.c_ubyte.from_address(at).value
        time.sleep(60)
time.sleep(60)
""",
        ends("memory"),
        limits=replace(SMALL, wall_s=20.0, cpu_s=10.0),
    ),
    "has the kernel keep what belongs to nobody": Hostile(
        """
for option in (78, 0x53564D41, 4, 22, 31, 32, 36, 41, 62, 65, 67, 0x59616D61):
    refused_call(f"prctl {option}", 157, option, 1, 1 << 20, 0, 0)
refused_call("epoll_create", 213, 1)
refused_call("epoll_create1", 291, 0)
libc.prctl(15, b"named", 0, 0, 0)
with open("/proc/self/comm") as name:
    assert name.read().strip() == "named"
"""
    ),
    "how the host was started": Hostile(
        """
for name in ("cmdline", "keys", "key-users", "interrupts", "diskstats", "partitions", "modules", "config.gz"):
    refused(os.open, f"/proc/{name}", os.O_RDONLY)
"""
    ),
    "takes over process 1": Hostile(
        """
import resource
for name in ("mem", "environ", "maps", "task/1/mem", "root/../1/mem", "fd/0", "fd/1", "clear_refs", "oom_score_adj"):
    refused(os.open, f"/proc/1/{name}", os.O_RDONLY)
    refused(os.open, f"/proc/1/{name}", os.O_WRONLY)
refused(os.mkdir, "/proc/1/folder")
buffer = ctypes.create_string_buffer(16)
refused_call("process_vm_writev", 311, 1, buffer, 1, buffer, 1, 0)
refused_call("pidfd_getfd", 438, libc.syscall(434, 1, 0), 0, 0)
refused_call("prctl PR_TASK_PERF_EVENTS_DISABLE", 157, 31, 0, 0, 0, 0)
refused_call("clock_adjtime", 305, 0, ctypes.create_string_buffer(400))
"""
    ),
}
