"""Landlock, seccomp and capabilities, called directly: a few structures and numbers of the Linux kernel's interface, no library.

(linux/landlock.h, linux/seccomp.h, linux/filter.h; the numbers of system calls from asm/unistd.h.) On another system, another processor or
an old kernel each function returns False and changes nothing. This module must never be called before everything that the process needs
is open.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_PDEATHSIG, FILTER = 38, 22, 1, 2
READ = 1 | 1 << 2 | 1 << 3                             # execute (a library is mapped so), read a file, read a folder
LIST = 1 << 3
ALL_OF = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
OF_FILES = 1 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15     # the rights that a rule for a single file may name
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38

# name: (x86-64, arm64); -1 where there is none
DENIED = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "setpgid": (109, 154), "setsid": (112, 157), "setrlimit": (160, 164), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "bpf": (321, 280), "io_uring_setup": (425, 425), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104),
    "reboot": (169, 142), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
}
OWN = {"kill": (62, 129), "tgkill": (234, 131)}        # allowed at the process itself
CLONE, CLONE3, PRLIMIT = (56, 220), (435, 435), (302, 261)
CLONE_THREAD = 0x10000


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it is gone."""
    if sys.platform == "linux":
        _libc().prctl(PR_SET_PDEATHSIG, 9)


def landlock(readable: list[str], listable: list[str], writable: str) -> bool:
    """No file but these, for ever; no TCP and no signal to processes outside. True when the kernel knows Landlock."""
    if sys.platform != "linux":
        return False
    libc = _libc()
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return False
    handled = ALL_OF[min(version, 5)]
    attributes = struct.pack("QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = libc.syscall(444, attributes, size, 0)
    if ruleset < 0:
        return False
    for path in readable:
        _rule(libc, ruleset, path, READ)
    for path in listable:                               # importing looks for names in a folder
        _rule(libc, ruleset, path, LIST)
    _rule(libc, ruleset, writable, handled)
    _rule(libc, ruleset, "/dev/null", handled)
    _rule(libc, ruleset, "/dev/urandom", READ)
    done = not libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) and not libc.syscall(446, ruleset, 0)
    os.close(ruleset)
    return done


def _rule(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= OF_FILES
    libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)


def seccomp() -> bool:
    """No new process or program, no socket, no trace, no signal to others, no higher limit, no capability. True when it is in force."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in AUDIT:
        return False
    libc = _libc()
    libc.syscall(126 if machine == "x86_64" else 91, struct.pack("Ii", 0x20080522, 0), bytes(24))         # capset: none
    program = _program(AUDIT[machine], list(AUDIT).index(machine), os.getpid())
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    return not libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) and not libc.prctl(PR_SET_SECCOMP, FILTER, described, 0, 0)


def _program(audit: int, column: int, pid: int) -> list[tuple[int, int, int, int]]:
    """The filter as BPF lines (code, jump if true, jump if false, value). The call's number stands at 0, the processor at 4, argument i at
    16 + 8 i (its lower half)."""
    load, equal, at_least, any_bit, back = 0x20, 0x15, 0x35, 0x45, 0x06
    lines = [(load, 0, 0, 4), (equal, 1, 0, audit), (back, 0, 0, KILL), (load, 0, 0, 0)]
    if column == 0:
        lines += [(at_least, 0, 1, 0x40000000), (back, 0, 0, EPERM)]                    # the x32 twins of the numbers below
    for number in (numbers[column] for numbers in DENIED.values() if numbers[column] >= 0):
        lines += [(equal, 0, 1, number), (back, 0, 0, EPERM)]
    lines += [(equal, 0, 1, CLONE3[column]), (back, 0, 0, ENOSYS)]                      # the C library then calls clone
    lines += [(equal, 0, 4, CLONE[column]), (load, 0, 0, 16), (any_bit, 1, 0, CLONE_THREAD), (back, 0, 0, EPERM), (back, 0, 0, ALLOW)]
    for numbers in OWN.values():
        lines += [(equal, 0, 4, numbers[column]), (load, 0, 0, 16), (equal, 1, 0, pid), (back, 0, 0, EPERM), (back, 0, 0, ALLOW)]
    lines += [(equal, 0, 4, PRLIMIT[column]), (load, 0, 0, 32), (equal, 1, 0, 0), (back, 0, 0, EPERM), (back, 0, 0, ALLOW)]
    return [*lines, (back, 0, 0, ALLOW)]
