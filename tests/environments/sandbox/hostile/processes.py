"""8 programs that try to outlive their run, or to act on processes that are not theirs."""

from __future__ import annotations

from tests.environments.sandbox.hostile.program import ANY, Hostile

PROCESSES = {
    "daemon by setsid and double fork": Hostile(
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        time.sleep(60)
    os._exit(0)
time.sleep(0.1)
"""
    ),
    "daemon that holds the result pipe open": Hostile(
        """
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
"""
    ),
    "signals its parent, process 1 and everyone": Hostile(
        """
import signal
for target in (os.getppid(), 1, -1):
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        try:
            os.kill(target, number)
        except OSError:
            pass
time.sleep(60)
""",
        ANY,
    ),
    "ptrace": Hostile(
        """
child = os.fork()
if child == 0:
    time.sleep(60)
refused_call("ptrace", 101, 16, child, 0, 0)
refused_call("ptrace me", 101, 0, 0, 0, 0)
buffer = ctypes.create_string_buffer(8)
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
piece = Piece(ctypes.addressof(buffer), 8)
refused_call("process_vm_readv", 310, child, ctypes.byref(piece), 1, ctypes.byref(piece), 1, 0)
"""
    ),
    "resets the signal of its parent's death": Hostile(
        """
libc.prctl(1, 0, 0, 0, 0)
if os.fork() == 0:
    libc.prctl(1, 0, 0, 0, 0)
    os.setsid()
    if os.fork() == 0:
        libc.prctl(1, 0, 0, 0, 0)
        time.sleep(60)
    os._exit(0)
"""
    ),
    "setuid programs": Hostile(
        """
import subprocess
for number in (0, 65534):
    refused(os.setuid, number)
    refused(os.setgid, number)
refused(os.setgroups, [0])
for command in (["su", "-c", "id"], ["mount", "-t", "tmpfs", "none", "/box"], ["newgrp"], ["sudo", "id"]):
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0 or b"uid=0" in done.stdout:
            escaped(command, done.stdout)
    except OSError:
        pass
"""
    ),
    "raises priority and limits": Hostile(
        """
import resource
refused(os.nice, -5)
refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
for name in ("RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE"):
    hard = resource.getrlimit(getattr(resource, name))[1]
    if hard == resource.RLIM_INFINITY:
        escaped(name, "is not set")
    refused(resource.setrlimit, getattr(resource, name), (hard + 1, hard + 1))
try:
    os.sched_setaffinity(0, range(os.cpu_count()))
except OSError:
    pass
"""
    ),
    "a namespace in the namespace": Hostile(
        """
import subprocess
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000):
    refused_call("unshare", 272, flag)
    got = libc.syscall(56, flag | 17, 0, 0, 0, 0)
    if got == 0:
        os._exit(0)
    if got > 0:
        escaped("clone into a namespace")
if libc.syscall(435, ctypes.create_string_buffer(88), 88) >= 0:
    escaped("clone3")
if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode == 0:
    escaped("unshare -Ur")
"""
    ),
}
