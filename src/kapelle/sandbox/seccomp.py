"""A system call filter for contained programs, written by hand as classic BPF.

Honest programs compute, read, write and start processes; what they never need is closed here: parts of the
kernel with a large surface (io_uring, bpf, keyrings, userfaultfd), other processes' memory, mounts and
namespaces, memory that belongs to no process or that no sum over processes sees (memfd, System V segments, pages
that a pipe holds, huge pages, sockets that are not stream sockets of the run's own), locks and notifications on
files that all runs share, and the other calling conventions, in which none of these numbers would hold.

The instruction format is `struct sock_filter` of linux/filter.h: code, jump if true, jump if false, operand.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

_LOAD, _EQUAL, _ABOVE, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_ARGUMENTS = (16, 24, 32, 40)
"""Offsets in `struct seccomp_data` of the low halves of the first arguments (little-endian)."""
_HIGH = 4
"""From the low half of an argument to its high half."""
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000
"""Numbers from here on are the x32 calling convention of x86-64."""

NEW_NAMESPACES = 0x7E020000
"""CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET} of sched.h."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
AF_UNIX, SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF
SOL_SOCKET, SO_SNDBUF, SO_SNDBUFFORCE, SO_ATTACH_FILTER = 1, 7, 32, 26
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x1, 0x20, 0x40000
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
F_SETPIPE_SZ, F_SETLEASE, F_NOTIFY, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW = 1031, 1024, 1026, 36, 37, 38
PR_SET_DUMPABLE = 4
SIGCHLD = 17
SHARED_ANONYMOUS_BYTES = 1024**2
"""Most of one shared anonymous mapping: a process that maps a page of it may hold all of it, unseen."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """System call numbers of one architecture, from the kernel's tables."""

    audit: int
    """AUDIT_ARCH_* of linux/audit.h."""
    bounded: Mapping[str, int]
    """By name; whether they fail depends on their arguments."""
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
    "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "sendfile": (40, 71), "io_setup": (206, 0),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_mark": (301, 263), "flock": (73, 32), "mq_open": (240, 180), "timer_create": (222, 107),
}
"""Number on x86_64 and on aarch64; None where the call does not exist."""
_REFUSED_NEW: Mapping[str, int] = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "memfd_secret": 447,
}
"""Calls since Linux 5.1 have one number on every architecture."""
_BOUNDED: Mapping[str, tuple[int, int | None]] = {
    "clone": (56, 220), "ioctl": (16, 29), "socket": (41, 198), "socketpair": (53, 199),
    "setsockopt": (54, 208), "mmap": (9, 222), "madvise": (28, 233), "fcntl": (72, 25), "prctl": (157, 167),
    "rt_sigaction": (13, 134),
}
_CLONE3 = 435
# fmt: on


def _column(table: Mapping[str, tuple[int, int | None]], column: int) -> dict[str, int]:
    """Return the calls that the architecture in a column has."""
    numbers = ((name, row[column]) for name, row in table.items())
    return {name: number for name, number in numbers if number is not None}


_MACHINES = {
    machine: _Machine(audit, _column(_BOUNDED, column), _column(_REFUSED_OLD, column) | dict(_REFUSED_NEW))
    for column, (machine, audit) in enumerate({"x86_64": 0xC000003E, "aarch64": 0xC00000B7}.items())
}


def refused_calls(machine: str | None = None) -> Mapping[str, int]:
    """Return the names and numbers of the calls that fail with EPERM, empty for an unknown architecture."""
    found = _MACHINES.get(machine or platform.machine())
    return found.refused if found else {}


def filter_program(machine: str | None = None, *, children_counted: bool = True) -> bytes | None:
    """Return the filter for an architecture (this one's by default), None where its numbers are not known.

    Without `children_counted` nobody may change what SIGCHLD does: the CPU time of children that nobody waits for is lost
    to everyone who did not count it while they lived.
    """
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    rules = _rules()
    if children_counted:
        del rules["rt_sigaction"]
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
            *(_within(known.bounded[name], body) for name, body in rules.items()),
            _step(_RETURN, _ALLOW),
        )
    )


def _rules() -> dict[str, bytes]:
    """Return what decides about each call whose arguments matter."""
    socket = (
        _step(_LOAD, _ARGUMENTS[0])
        + _unless(AF_UNIX, errno.EAFNOSUPPORT)
        + _step(_LOAD, _ARGUMENTS[1])
        + _step(_AND, _SOCK_TYPE)
        + _unless(SOCK_STREAM, errno.EPERM)
    )
    locks = (F_SETLEASE, F_NOTIFY, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW)
    return {
        "clone": _step(_LOAD, _ARGUMENTS[0]) + _when(_ANY_BIT, NEW_NAMESPACES, errno.EPERM),
        "ioctl": _step(_LOAD, _ARGUMENTS[1]) + _refuse_each(TIOCSTI, TIOCLINUX),
        "socket": socket,
        "socketpair": socket,
        # How much a socket may hold stays what the supervisor counts for it.
        "setsockopt": _only_if(_EQUAL, _ARGUMENTS[1], SOL_SOCKET)
        + _step(_LOAD, _ARGUMENTS[2])
        + _refuse_each(SO_SNDBUF, SO_SNDBUFFORCE, SO_ATTACH_FILTER),
        "mmap": _mapping_rules(),
        # What a kernel without huge pages says; a page of one that is mapped holds all of it, unseen.
        "madvise": _step(_LOAD, _ARGUMENTS[2])
        + _refuse_each(MADV_HUGEPAGE, MADV_COLLAPSE, error=errno.EINVAL),
        "fcntl": _step(_LOAD, _ARGUMENTS[1]) + _refuse_each(F_SETPIPE_SZ, *locks),
        # The supervisor of an ordinary user reads what its own may.
        "prctl": _step(_LOAD, _ARGUMENTS[0]) + _refuse_each(PR_SET_DUMPABLE),
        "rt_sigaction": _only_if(_EQUAL, _ARGUMENTS[0], SIGCHLD)
        + _step(_LOAD, _ARGUMENTS[1])
        + _unless(0, errno.EPERM)
        + _step(_LOAD, _ARGUMENTS[1] + _HIGH)
        + _unless(0, errno.EPERM),
    }


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _when(test: int, operand: int, error: int) -> bytes:
    return _step(test, operand, 0, 1) + _step(_RETURN, _ERRNO | error)


def _unless(operand: int, error: int) -> bytes:
    return _step(_EQUAL, operand, 1, 0) + _step(_RETURN, _ERRNO | error)


def _only_if(test: int, argument: int, operand: int) -> bytes:
    """Load an argument and allow the call unless the test holds."""
    return _step(_LOAD, argument) + _step(test, operand, 1, 0) + _step(_RETURN, _ALLOW)


def _refuse_each(*operands: int, error: int = errno.EPERM) -> bytes:
    return b"".join(_when(_EQUAL, operand, error) for operand in operands)


def _mapping_rules() -> bytes:
    """Refuse huge pages, and shared anonymous memory beyond what is counted for one mapping."""
    return (
        _step(_LOAD, _ARGUMENTS[3])
        + _when(_ANY_BIT, MAP_HUGETLB, errno.EPERM)
        + _only_if(_ANY_BIT, _ARGUMENTS[3], MAP_ANONYMOUS)
        + _only_if(_ANY_BIT, _ARGUMENTS[3], MAP_SHARED)
        + _step(_LOAD, _ARGUMENTS[1] + _HIGH)
        + _unless(0, errno.ENOMEM)
        + _step(_LOAD, _ARGUMENTS[1])
        + _when(_ABOVE, SHARED_ANONYMOUS_BYTES, errno.ENOMEM)
    )


def _within(number: int, rules: bytes) -> bytes:
    """Return the rules of one call; it is allowed when none of them says otherwise."""
    body = rules + _step(_RETURN, _ALLOW)
    return _step(_EQUAL, number, 0, len(body) // 8) + body
