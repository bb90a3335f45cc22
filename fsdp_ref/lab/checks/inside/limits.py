"""The walls around a submission: what its process may use, read, reach and start.

    every system    rlimits on memory, CPU time, file size and open files; an audit hook that refuses and reports sockets, new processes,
                    signals, foreign functions and files outside of the rank's folder and of the installed libraries
    Linux           Landlock: no file outside of these, no TCP, no signal out; seccomp (x86-64, arm64): no new process, program, socket,
                    shared memory, trace or higher limit; no capabilities

The hook gives the words for the report, the kernel the certainty: native code can go round the hook, not round the kernel. Where the kernel
offers no Landlock and no seccomp (macOS), whoever grades strangers' work should do it in a container. This module must never be undone
once `close_in` has returned.
"""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

from . import kernel

GIB = 2**30
PACKAGE = Path(__file__).parents[3]                   # the folder of fsdp_ref
FORBIDDEN = ("socket.bind", "socket.connect", "socket.sendto", "socket.__new__", "socket.getaddrinfo", "socket.gethostbyname",
             "subprocess.Popen", "os.system", "os.exec", "os.fork",
             "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill", "os.killpg", "pty.spawn", "ctypes.dlopen", "ctypes.dlsym",
             "ctypes.call_function", "signal.pthread_kill", "sys.addaudithook", "resource.setrlimit", "resource.prlimit",
             "shutil.chown", "os.chown", "gc.get_objects", "gc.get_referrers")
READS = ("os.listdir", "os.scandir", "os.chdir", "glob.glob")
WRITES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.utime", "shutil.rmtree")


def libraries() -> list[str]:
    """What a submission may read: the standard library, installed packages, what the dynamic linker needs, and of this package everything
    but the lab, where the judges are; of the lab this folder, which a traceback shows lines of."""
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {Path(path) for path in sys.path if path.endswith("site-packages")}
    folders |= {Path(path) for path in ("/usr/lib", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime",
                                           "/proc/cpuinfo", "/sys/devices/system/cpu")}
    found: list[Path] = []
    for folder in sorted(path.resolve() for path in folders if path.exists()):
        if PACKAGE.resolve().is_relative_to(folder):            # installed: every neighbour, but not the judges
            found += [each for each in _beside(folder, PACKAGE.resolve())]
        else:
            found.append(folder)
    found += [path for path in PACKAGE.resolve().iterdir() if path.name != "lab"] + [Path(__file__).resolve().parent]
    return [str(path) for path in found]


def _beside(folder: Path, package: Path) -> Iterable[Path]:
    for each in folder.iterdir():
        if each == package:
            continue
        if package.is_relative_to(each):
            yield from _beside(each, package)
        else:
            yield each


def restrict(memory: int, cpu: int, files: int) -> None:
    """Limits of the operating system: bytes of memory above what is mapped now, seconds of CPU time, bytes of one file."""
    mapped = 0
    if sys.platform == "linux":
        with open("/proc/self/statm") as pages:
            mapped = int(pages.read().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, mapped + memory)
    _limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    _limit(resource.RLIMIT_FSIZE, files)
    _limit(resource.RLIMIT_NOFILE, 128)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(what: int, soft: int, hard: int | None = None) -> None:
    _, most = resource.getrlimit(what)
    wanted = soft if hard is None else hard
    hard = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(what, (min(soft, hard), hard))


def close_in(home: str, report: Callable[[str], None]) -> None:
    """Shut the walls: from now on this process may write below `home` and read libraries, and no more. `report(words)` is called for each
    attempt that the hook refuses."""
    readable = libraries()
    kernel.landlock(readable, [str(PACKAGE)], home)
    kernel.seccomp()
    sys.addaudithook(_hook(tuple(readable), os.path.realpath(home), report))


def _hook(readable: tuple[str, ...], home: str, report: Callable[[str], None]) -> Callable:
    realpath, fspath, names, reads, writes = os.path.realpath, os.fspath, frozenset(FORBIDDEN), frozenset(READS), frozenset(WRITES)
    package, told = str(PACKAGE.resolve()), set()

    def allowed(path: object, writing: bool) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True                                          # a number: a file that is open already
        text = fspath(path)
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        if text.startswith("<"):                                 # linecache asks for the submission itself
            return True
        place = realpath(text)
        below = (home, "/dev/null") if writing else (home, "/dev/null", "/dev/urandom", *readable)
        return any(place == root or place.startswith(root + "/") for root in below)

    def refused(event: str, args: tuple) -> bool:
        if event in reads:
            return bool(args) and not allowed(args[0], False) and not (isinstance(args[0], str) and realpath(args[0]) == package)
        return event in writes and not allowed(args[0], True) or event == "open" and not allowed(args[0], _writes(args))

    def hook(event: str, args: tuple) -> None:
        if event in names:
            words = f"{event}{_of(args)}"
        elif refused(event, args):
            words = f"{event} of {str(args[0])[:200]}"
        else:
            return
        if words not in told and len(told) < 20:
            told.add(words)
            report(words)
        raise PermissionError(f"{words} is not allowed in an exercise")
    return hook


def _of(args: tuple) -> str:
    told = [str(each)[:80] for each in args[:2] if isinstance(each, str | bytes | int | tuple | list)]
    return f" ({', '.join(told)})" if told else ""


def _writes(args: tuple) -> bool:
    mode, flags = (args[1] if len(args) > 1 else None), (args[2] if len(args) > 2 else 0)
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
