"""11 programs that look for the network, or for parts of the kernel that honest programs never call."""

from __future__ import annotations

from tests.environments.sandbox.hostile.program import Hostile

KERNEL = {
    "TCP to the outside": Hostile(
        """
import socket
for address in (("1.1.1.1", 80), ("8.8.8.8", 443), ("10.0.0.1", 22)):
    refused(socket.create_connection, address, 0.3)
refused(socket.create_connection, ("2606:4700:4700::1111", 80), 0.3)
if len(open("/proc/net/dev").readlines()) > 3:
    escaped("interfaces other than lo")
"""
    ),
    "DNS": Hostile(
        """
import socket
refused(socket.getaddrinfo, "example.com", 80)
def ask():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53))
    return "sent"
refused(ask)
"""
    ),
    "loopback to a service of the host": Hostile(
        """
import socket
for host in ("127.0.0.1", "localhost", "0.0.0.0"):
    refused(socket.create_connection, (host, int("{port}")), 0.5)
"""
    ),
    "metadata address": Hostile(
        """
import socket
for address in ("169.254.169.254", "100.100.100.200", "169.254.170.2"):
    refused(socket.create_connection, (address, 80), 0.3)
"""
    ),
    "abstract unix socket": Hostile(
        """
import socket
refused(socket.socket(socket.AF_UNIX).connect, "\\0{socket}")
"""
    ),
    "vsock, netlink and raw sockets": Hostile(
        """
import socket
for family, kind in ((40, 1), (16, 3), (17, 3), (2, 3), (10, 3), (38, 5), (31, 3), (29, 3), (44, 3)):
    refused(socket.socket, family, kind)
"""
    ),
    "io_uring": Hostile(
        """
refused_call("io_uring_setup", 425, 4, ctypes.create_string_buffer(120))
if ctypes.get_errno() != 1:
    escaped("reached io_uring", ctypes.get_errno())
"""
    ),
    "bpf, keyctl and userfaultfd": Hostile(
        """
refused_call("keyctl", 250, 0, -3, 1, 0, 0)
refused_call("add_key", 248, b"user", b"kapelle", b"x", 1, -3)
refused_call("bpf", 321, 0, ctypes.create_string_buffer(72), 72)
refused_call("userfaultfd", 323, 1)
refused_call("perf_event_open", 298, ctypes.create_string_buffer(128), 0, -1, -1, 0)
for number in (250, 248, 321, 323):
    libc.syscall(number, 0, 0, 0, 0, 0)
    if ctypes.get_errno() != 1:
        escaped("reached", number, ctypes.get_errno())
"""
    ),
    "mount, pivot_root and chroot": Hostile(
        """
os.makedirs("new/old")
refused_call("mount", 165, b"none", b"/box/new", b"tmpfs", 0, 0)
refused_call("remount", 165, b"none", b"/", b"", 32 | 4096, 0)
refused_call("umount", 166, b"/box", 2)
refused_call("pivot_root", 155, b"/box/new", b"/box/new/old")
refused_call("fsopen", 430, b"tmpfs", 0)
refused_call("open_tree", 428, -100, b"/", 1)
refused(os.chroot, "/box")
"""
    ),
    "32-bit system calls": Hostile(
        """
import mmap
# mov eax, 20 (getpid of the 32-bit table); int 0x80; ret
page = mmap.mmap(-1, 4096, prot=7)
page.write(b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3")
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
if os.fork() == 0:
    os._exit(0 if call() > 0 else 1)
if os.waitstatus_to_exitcode(os.wait()[1]) == 0:
    escaped("int 0x80")
if os.fork() == 0:
    os._exit(0 if libc.syscall(0x40000000 + 39) > 0 else 1)
if os.waitstatus_to_exitcode(os.wait()[1]) == 0:
    escaped("x32")
"""
    ),
    "TIOCSTI": Hostile(
        """
import fcntl
refused(open, "/dev/tty")
for request in (0x5412, 0x541C):
    try:
        fcntl.ioctl(0, request, b"x")
        escaped("injected a key")
    except OSError as error:
        if error.errno != 1:
            escaped("reached the terminal", error)
"""
    ),
}
