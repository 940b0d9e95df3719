"""A system call filter for contained programs, written by hand as classic BPF.

Honest programs compute, read, write and start processes; what they never need is closed here: parts of the
kernel with a large surface (io_uring, bpf, keyrings, userfaultfd), other processes' memory, mounts and
namespaces, memory that belongs to no process (memfd, System V segments), address families that a network
namespace does not contain, and the other calling conventions, in which none of these numbers would hold.

The instruction format is `struct sock_filter` of linux/filter.h: code, jump if true, jump if false, operand.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_ARGUMENTS = (16, 24, 32)
"""Offsets in `struct seccomp_data` of the low halves of the first arguments (little-endian)."""
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000
"""Numbers from here on are the x32 calling convention of x86-64."""

NEW_NAMESPACES = 0x7E020000
"""CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET} of sched.h."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
SOCK_RAW, SOCK_PACKET, _SOCK_TYPE = 3, 10, 0xF


@dataclass(frozen=True, slots=True)
class _Machine:
    """System call numbers of one architecture, from the kernel's tables."""

    audit: int
    """AUDIT_ARCH_* of linux/audit.h."""
    socket: int
    ioctl: int
    clone: int
    refused: Mapping[str, int]
    """By name; they fail whatever their arguments are."""


# fmt: off
_REFUSED_OLD: Mapping[str, tuple[int, int | None]] = {
    "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "userfaultfd": (323, 282), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "perf_event_open": (298, 241), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "quotactl": (179, 60), "memfd_create": (319, 279), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "personality": (135, 92), "vhangup": (153, 58),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "syslog": (103, 116), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "iopl": (172, None), "ioperm": (173, None),
}
"""Number on x86_64 and on aarch64; None where the call does not exist."""
_REFUSED_NEW: Mapping[str, int] = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "memfd_secret": 447,
}
"""Calls since Linux 5.1 have one number on every architecture."""
_CLONE3 = 435
# fmt: on


def _refused(column: int) -> Mapping[str, int]:
    """Return the refused calls of the architecture in this column of `_REFUSED_OLD`."""
    old = ((name, numbers[column]) for name, numbers in _REFUSED_OLD.items())
    return {name: number for name, number in old if number is not None} | dict(_REFUSED_NEW)


_MACHINES = {
    "x86_64": _Machine(0xC000003E, socket=41, ioctl=16, clone=56, refused=_refused(0)),
    "aarch64": _Machine(0xC00000B7, socket=198, ioctl=29, clone=220, refused=_refused(1)),
}


def refused_calls(machine: str | None = None) -> Mapping[str, int]:
    """Return the names and numbers of the calls that fail with EPERM, empty for an unknown architecture."""
    found = _MACHINES.get(machine or platform.machine())
    return found.refused if found else {}


def filter_program(machine: str | None = None) -> bytes | None:
    """Return the filter for an architecture (this one's by default), None where its numbers are not known."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    return b"".join(
        (
            _step(_LOAD, _ARCHITECTURE),
            _step(_EQUAL, known.audit, 1, 0),
            _step(_RETURN, _KILL),
            _step(_LOAD, _NUMBER),
            _step(_AT_LEAST, _X32, 0, 1),
            _step(_RETURN, _KILL),
            *(_when(_EQUAL, number, errno.EPERM) for number in sorted(known.refused.values())),
            # Its flags lie behind a pointer, where a filter cannot look; callers fall back to clone.
            _when(_EQUAL, _CLONE3, errno.ENOSYS),
            _within(known.clone, _step(_LOAD, _ARGUMENTS[0]) + _when(_ANY_BIT, NEW_NAMESPACES, errno.EPERM)),
            _within(known.ioctl, _step(_LOAD, _ARGUMENTS[1]) + _refuse_each(TIOCSTI, TIOCLINUX)),
            _within(known.socket, _socket_rules()),
            _step(_RETURN, _ALLOW),
        )
    )


def _socket_rules() -> bytes:
    return b"".join(
        (
            _step(_LOAD, _ARGUMENTS[0]),
            _step(_EQUAL, AF_UNIX, 3, 0),
            _step(_EQUAL, AF_INET, 2, 0),
            _step(_EQUAL, AF_INET6, 1, 0),
            _step(_RETURN, _ERRNO | errno.EAFNOSUPPORT),
            _step(_LOAD, _ARGUMENTS[1]),
            _step(_AND, _SOCK_TYPE),
            _refuse_each(SOCK_RAW, SOCK_PACKET),
        )
    )


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _when(test: int, operand: int, error: int) -> bytes:
    return _step(test, operand, 0, 1) + _step(_RETURN, _ERRNO | error)


def _refuse_each(*operands: int) -> bytes:
    return b"".join(_when(_EQUAL, operand, errno.EPERM) for operand in operands)


def _within(number: int, rules: bytes) -> bytes:
    """Return the rules of one call; it is allowed when none of them says otherwise."""
    body = rules + _step(_RETURN, _ALLOW)
    return _step(_EQUAL, number, 0, len(body) // 8) + body
