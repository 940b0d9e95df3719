"""A system call filter for programs in a sandbox, written as classic BPF.

Honest programs compute, read, write and start processes. The filter blocks operations that honest programs never need:

- parts of the kernel with a large attack surface or with shared storage (io_uring, bpf, filters, keyrings, userfaultfd);
- the memory of other processes;
- mounts and namespaces;
- memory that belongs to no process or that no sum over processes includes (memfd, System V segments, pages held by a pipe, huge
  pages, and sockets other than the stream sockets of the run);
- locks and notifications on files that all runs share, the content of these files in the page cache, and the disks that store them;
- other calling conventions, in which the system call numbers have a different meaning.

New kernels add operations to `fcntl`, `ioctl` and `prctl`; only the operations that honest programs use are allowed. The filter
reports epoll as missing, as on an older kernel, because an epoll instance can have any number of entries, and these entries
belong to no process. Programs that wait for descriptors then use `poll`.

The instruction format is `struct sock_filter` of linux/filter.h: code, jump if true, jump if false, operand.
"""

from __future__ import annotations

import errno
import platform
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LOAD, _EQUAL, _ABOVE, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_ARGUMENTS = (16, 24, 32, 40, 48, 56)
"""Offsets in `struct seccomp_data` of the lower halves of the first six arguments (little-endian)."""
_HIGH = 4
"""Offset from the lower half of an argument to its upper half."""
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000
"""The smallest system call number of the x32 calling convention of x86-64."""

NEW_NAMESPACES = 0x7E020000
"""The flags CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET} of sched.h."""
CLONE_FILES, CLONE_THREAD = 0x400, 0x10000
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
PLAIN_IOCTL = (0x541B, 0x5421, 0x5450, 0x5451)
"""The allowed `ioctl` operations: FIONREAD, FIONBIO, FIONCLEX and FIOCLEX. All other operations control devices and file
systems, or reveal information about those of the host."""
PLAIN_FCNTL = (*range(8), 1030, 1032)
"""The allowed `fcntl` operations: F_DUPFD, F_{GET,SET}{FD,FL}, F_{GETLK,SETLK,SETLKW}, F_DUPFD_CLOEXEC and F_GETPIPE_SZ.
Leases, notifications, hints and descriptor locks are excluded, because they would affect other runs and the host through
shared files."""
F_SETFL = 4
AF_UNIX, AF_INET, AF_INET6, SOCK_STREAM, _SOCK_TYPE = 1, 2, 10, 1, 0xF
SOL_SOCKET, SO_SNDBUF, SO_SNDBUFFORCE, SO_ATTACH_FILTER = 1, 7, 32, 26
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x1, 0x20, 0x40000
MADV_MERGEABLE, MADV_HUGEPAGE, MADV_COLD, MADV_PAGEOUT, MADV_COLLAPSE = 12, 14, 20, 21, 25
PLAIN_PRCTL = (1, 2, 3, 7, 15, 16, 21, 23, 27, 29, 30, 37, 38, 39, 40, 42)
"""The allowed `prctl` operations: PR_{SET,GET}_PDEATHSIG, PR_GET_DUMPABLE, PR_GET_KEEPCAPS, PR_{SET,GET}_NAME, PR_GET_SECCOMP,
PR_CAPBSET_READ, PR_GET_SECUREBITS, PR_{SET,GET}_TIMERSLACK, PR_GET_CHILD_SUBREAPER, PR_{SET,GET}_NO_NEW_PRIVS,
PR_GET_TID_ADDRESS and PR_GET_THP_DISABLE. All other operations hide a process from the supervisor, disable its clock, or
make the kernel keep memory that no sum includes, such as futex tables and names of memory areas."""
SIGCHLD = 17
SHARED_ANONYMOUS_BYTES = 1024**2
"""Maximum size in bytes of a shared anonymous mapping. A process that maps one page of such a mapping may keep all its pages
allocated, and /proc does not report these pages."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """The system call numbers of one architecture, from the tables of the kernel."""

    audit: int
    """The constant AUDIT_ARCH_* of the architecture in linux/audit.h."""
    direct: int
    """The value of O_DIRECT in fcntl.h of the architecture."""
    bounded: Mapping[str, int]
    """Mapping from name to number for the calls whose arguments determine whether they are allowed."""
    refused: Mapping[str, int]
    """Mapping from name to number for the calls that always fail."""
    pretended: Mapping[str, int]
    """Mapping from name to number for the calls that return success without any effect."""
    without: Mapping[str, int]
    """Mapping from name to number for the calls that fail as on a file system that does not support them."""
    absent: Mapping[str, int]
    """Mapping from name to number for the calls that fail as on a kernel that does not support them."""


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
    "seccomp": (317, 277), "modify_ldt": (154, None), "mincore": (27, 232), "membarrier": (324, 283),
    "mbind": (237, 235), "move_pages": (279, 239), "migrate_pages": (256, 238), "clock_adjtime": (305, 266),
}
"""Mapping from the name of a call to its numbers on x86_64 and on aarch64; a number is None if the call does not exist on that
architecture."""
_REFUSED_NEW: Mapping[str, int] = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "landlock_create_ruleset": 444,
    "landlock_add_rule": 445, "landlock_restrict_self": 446, "memfd_secret": 447, "cachestat": 451, "open_tree_attr": 467,
    "file_getattr": 468, "file_setattr": 469,
}
"""Mapping from name to number for calls that were added since Linux 5.1. These calls have the same number on every
architecture."""
_BOUNDED: Mapping[str, tuple[int, int | None]] = {
    "clone": (56, 220), "ioctl": (16, 29), "socket": (41, 198), "socketpair": (53, 199),
    "setsockopt": (54, 208), "mmap": (9, 222), "madvise": (28, 233), "fcntl": (72, 25), "prctl": (157, 167),
    "rt_sigaction": (13, 134), "preadv2": (327, 286), "open": (2, None), "openat": (257, 56),
    "creat": (85, None), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "mknod": (133, None), "mknodat": (259, 33), "umask": (95, 166),
}
_PRETENDED: Mapping[str, tuple[int, int | None]] = {
    "sync": (162, 81), "syncfs": (306, 267), "sync_file_range": (277, 84), "fsync": (74, 82),
    "fdatasync": (75, 83), "msync": (26, 227), "fadvise64": (221, 223), "readahead": (187, 213),
}
"""Calls that return success without any effect, as on the in-memory file systems to which a program can write. For a file that
the program can only read, or for all files, these calls would make the host write to its disks or drop its cached data."""
_WITHOUT: Mapping[str, tuple[int, int | None]] = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
}
"""Calls that fail as on a file system without extended attributes. One of these attributes is an access control list, which
defines who may read a file."""
_ABSENT: Mapping[str, tuple[int, int | None]] = {
    "clone3": (435, 435), "openat2": (437, 437), "epoll_create": (213, None), "epoll_create1": (291, 20),
}
"""Calls that fail as on a kernel that does not have them. The flags of `clone3` and `openat2` are stored behind a pointer,
which a filter cannot follow. Programs fall back to `clone`, `openat` and `poll`."""
# fmt: on


def _column(table: Mapping[str, tuple[int, int | None]], column: int) -> dict[str, int]:
    """Return a mapping from the names of system calls to their numbers on one architecture.

    `table` contains the numbers on all architectures, and `column` is the index of the architecture.
    """
    numbers = ((name, row[column]) for name, row in table.items())
    return {name: number for name, number in numbers if number is not None}


_MODES = {"creat": 1, "chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "mknod": 1, "mknodat": 2}
"""Mapping from the name of a call to the index of the argument that contains the mode of a file."""
_MACHINES = {
    machine: _Machine(
        audit,
        direct,
        _column(_BOUNDED, column),
        _column(_REFUSED_OLD, column) | dict(_REFUSED_NEW),
        _column(_PRETENDED, column),
        _column(_WITHOUT, column),
        _column(_ABSENT, column),
    )
    for column, (machine, audit, direct) in enumerate(
        (("x86_64", 0xC000003E, 0x4000), ("aarch64", 0xC00000B7, 0x10000))
    )
}


def refused_calls(machine: str | None = None) -> Mapping[str, int]:
    """Return a mapping from name to number for the calls that fail with EPERM, or an empty mapping for an unknown architecture."""
    found = _MACHINES.get(machine or platform.machine())
    return found.refused if found else {}


def filter_program(
    machine: str | None = None, *, children_counted: bool = True, loopback: bool = False
) -> bytes | None:
    """Return the filter program for an architecture (by default, that of this machine).

    Returns None if the system call numbers of the architecture are unknown. With `loopback`, programs may use TCP in a separate
    network. They may also use epoll, because many clients and servers do not start without it.

    If `children_counted` is False, programs cannot change the handling of SIGCHLD, because the CPU time of children for which
    no process waits would be lost.
    """
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    rules = _rules(known.direct)
    absent = known.absent
    if loopback:
        rules["socket"] = _stream_sockets(AF_UNIX, AF_INET, AF_INET6)
        absent = {name: number for name, number in absent.items() if not name.startswith("epoll")}
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
            *(_when(_EQUAL, number, 0) for number in sorted(known.pretended.values())),
            *(_when(_EQUAL, number, errno.EOPNOTSUPP) for number in sorted(known.without.values())),
            *(_when(_EQUAL, number, errno.ENOSYS) for number in absent.values()),
            *(_within(known.bounded[name], body) for name, body in rules.items() if name in known.bounded),
            _step(_RETURN, _ALLOW),
        )
    )


def _rules(direct: int) -> dict[str, bytes]:
    """Return a mapping from each call whose arguments are checked to the instructions that check them."""
    socket = _stream_sockets(AF_UNIX)
    return {
        # The locks of a process that shares its descriptors remain after the process ends, and then appear in no list.
        "clone": _step(_LOAD, _ARGUMENTS[0])
        + _when(_ANY_BIT, NEW_NAMESPACES, errno.EPERM)
        + _step(_AND, CLONE_FILES | CLONE_THREAD)
        + _when(_EQUAL, CLONE_FILES, errno.EPERM),
        "ioctl": _step(_LOAD, _ARGUMENTS[1])
        + _refuse_each(TIOCSTI, TIOCLINUX)
        + _unless_one_of(PLAIN_IOCTL, errno.ENOTTY),
        "socket": socket,
        "socketpair": socket,
        # The buffer of a socket must not exceed the size that the supervisor counts.
        "setsockopt": _only_if(_EQUAL, _ARGUMENTS[1], SOL_SOCKET)
        + _step(_LOAD, _ARGUMENTS[2])
        + _refuse_each(SO_SNDBUF, SO_SNDBUFFORCE, SO_ATTACH_FILTER),
        # Huge pages are denied, and a shared anonymous mapping may only be as large as the size that is counted for it.
        "mmap": _step(_LOAD, _ARGUMENTS[3])
        + _when(_ANY_BIT, MAP_HUGETLB, errno.EPERM)
        + _only_if(_ANY_BIT, _ARGUMENTS[3], MAP_ANONYMOUS)
        + _only_if(_ANY_BIT, _ARGUMENTS[3], MAP_SHARED)
        + _step(_LOAD, _ARGUMENTS[1] + _HIGH)
        + _unless(0, errno.ENOMEM)
        + _step(_LOAD, _ARGUMENTS[1])
        + _when(_ABOVE, SHARED_ANONYMOUS_BYTES, errno.ENOMEM),
        # The error is that of a kernel without huge pages. One mapped page keeps an entire huge page, which is not counted.
        "madvise": _step(_LOAD, _ARGUMENTS[2])
        + _refuse_each(
            *(MADV_MERGEABLE, MADV_HUGEPAGE, MADV_COLD, MADV_PAGEOUT, MADV_COLLAPSE), error=errno.EINVAL
        ),
        "fcntl": _step(_LOAD, _ARGUMENTS[1])
        + _unless_one_of(PLAIN_FCNTL, errno.EINVAL)
        + _only_if(_EQUAL, _ARGUMENTS[1], F_SETFL)
        + _step(_LOAD, _ARGUMENTS[2])
        + _when(_ANY_BIT, direct, errno.EINVAL),
        # With O_DIRECT, every read bypasses the page cache and reaches the host's disks.
        "open": _step(_LOAD, _ARGUMENTS[1]) + _when(_ANY_BIT, direct, errno.EINVAL) + _readable(2),
        "openat": _step(_LOAD, _ARGUMENTS[2]) + _when(_ANY_BIT, direct, errno.EINVAL) + _readable(3),
        **{name: _readable(place) for name, place in _MODES.items()},
        "umask": _step(_LOAD, _ARGUMENTS[0]) + _when(_ANY_BIT, stat.S_IRUSR, errno.EPERM),
        # RWF_NOWAIT reveals the contents of the host's page cache.
        "preadv2": _step(_LOAD, _ARGUMENTS[5]) + _unless(0, errno.EOPNOTSUPP),
        "prctl": _step(_LOAD, _ARGUMENTS[0]) + _unless_one_of(PLAIN_PRCTL, errno.EINVAL),
        "rt_sigaction": _only_if(_EQUAL, _ARGUMENTS[0], SIGCHLD)
        + _step(_LOAD, _ARGUMENTS[1])
        + _unless(0, errno.EPERM)
        + _step(_LOAD, _ARGUMENTS[1] + _HIGH)
        + _unless(0, errno.EPERM),
    }


def _stream_sockets(*families: int) -> bytes:
    """Return instructions that deny all sockets except stream sockets of the given address families."""
    return (
        _step(_LOAD, _ARGUMENTS[0])
        + _unless_one_of(families, errno.EAFNOSUPPORT)
        + _step(_LOAD, _ARGUMENTS[1])
        + _step(_AND, _SOCK_TYPE)
        + _unless(SOCK_STREAM, errno.EPERM)
    )


def _readable(place: int) -> bytes:
    """Return instructions that deny a file mode with which the owner may execute a file but not read it.

    The mode is the argument with index `place`. A program that runs from such a file would lose the clock that counts its CPU
    time, and this clock is the only evidence that the program ran.
    """
    return (
        _step(_LOAD, _ARGUMENTS[place])
        + _step(_AND, stat.S_IRUSR | stat.S_IXUSR)
        + _when(_EQUAL, stat.S_IXUSR, errno.EPERM)
    )


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def _when(test: int, operand: int, error: int) -> bytes:
    return _step(test, operand, 0, 1) + _step(_RETURN, _ERRNO | error)


def _unless(operand: int, error: int) -> bytes:
    return _step(_EQUAL, operand, 1, 0) + _step(_RETURN, _ERRNO | error)


def _unless_one_of(operands: Sequence[int], error: int) -> bytes:
    tests = (_step(_EQUAL, operand, len(operands) - place) for place, operand in enumerate(operands))
    return b"".join(tests) + _step(_RETURN, _ERRNO | error)


def _only_if(test: int, argument: int, operand: int) -> bytes:
    """Return instructions that load an argument and allow the call unless the test is true."""
    return _step(_LOAD, argument) + _step(test, operand, 1, 0) + _step(_RETURN, _ALLOW)


def _refuse_each(*operands: int, error: int = errno.EPERM) -> bytes:
    return b"".join(_when(_EQUAL, operand, error) for operand in operands)


def _within(number: int, rules: bytes) -> bytes:
    """Return the instructions for one call, which is allowed if no rule denies it."""
    body = rules + _step(_RETURN, _ALLOW)
    return _step(_EQUAL, number, 0, len(body) // 8) + body
