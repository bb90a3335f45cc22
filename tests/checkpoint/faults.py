"""File layers that fail: at one operation of a save, chosen by its number, the process dies, the power goes, or the disk says no."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from .support import Tripwire

OPERATIONS = {"mkdir", "create", "write", "fsync", "close", "fsync_dir", "rename", "replace", "unlink", "rmdir"}
ERRORS = ("ENOSPC", "EIO", "short")
DEATHS = ("kill", "torn")
CUTS = ("data lost", "names lost", "some lost")
WRITES_ONLY = ("short", "torn")                       # kinds that make sense for a write alone


class Faults(Tripwire):
    """Counts every operation that changes the disk, closing included. Flushing is left to the imagination: a test's disk is slow.

    Kinds: "kill" dies in the place of the operation, "torn" writes half and dies; "ENOSPC" and "EIO" raise in the place of the
    operation, "short" writes half and then raises ENOSPC.
    """

    def __init__(self, at: int = 0, kind: str = "") -> None:
        super().__init__(at, self._happen)
        self.kind = kind

    def _happen(self) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind in ("ENOSPC", "EIO"):
            number = getattr(errno, self.kind)
            raise OSError(number, os.strerror(number))

    def write_some(self, descriptor, data):
        self._step("write")
        if len(self.log) != self.at or self.kind not in WRITES_ONLY:
            return os.write(descriptor, data)
        os.write(descriptor, data[: len(data) // 2])
        if self.kind == "torn":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fsync(self, descriptor):
        self._step("fsync")

    def fsync_dir(self, path):
        self._step("fsync_dir", path)

    def close(self, descriptor):
        os.close(descriptor)                          # a close that reports an error has closed all the same
        self._step("close")


class PowerCut(Faults):
    """In the place of operation `at` the power goes: the process dies, and of what was not flushed the disk keeps the worst.

    "data lost": names are as they were, files that were not flushed are empty. "names lost": moreover, every name made, changed or
    removed in a directory since that directory was flushed is as before. "some lost": a part of those, drawn by chance.
    """

    def __init__(self, at: int, kind: str, grave: Path) -> None:
        super().__init__(at, kind)
        self.grave, self.dice = grave, random.Random(at)
        self.unflushed: dict[int, int] = {}
        self.undo: list[tuple[Path, Callable[[], object]]] = []
        grave.mkdir()

    def _happen(self) -> None:
        for descriptor in self.unflushed.values():
            os.ftruncate(descriptor, 0)
        for _, undo in reversed(self.undo) if self.kind != "data lost" else ():
            if self.kind == "names lost" or self.dice.random() < 0.5:
                with contextlib.suppress(OSError):    # what it would be undone on is gone itself
                    undo()
        os.kill(os.getpid(), signal.SIGKILL)

    def _bury(self, path: Path) -> Path:
        buried = self.grave / f"{len(self.log)}"
        with contextlib.suppress(FileNotFoundError):
            os.link(path, buried)
        return buried

    def create(self, path):
        descriptor = super().create(path)
        self.unflushed[descriptor] = os.dup(descriptor)
        parent = os.open(path.parent, os.O_RDONLY)           # still the same directory when that has another name by then
        self.undo.append((path.parent, lambda: os.unlink(path.name, dir_fd=parent)))
        return descriptor

    def fsync(self, descriptor):
        super().fsync(descriptor)
        os.close(self.unflushed.pop(descriptor))

    def fsync_dir(self, path):
        super().fsync_dir(path)
        self.undo = [entry for entry in self.undo if entry[0] != path]

    def mkdir(self, path):
        super().mkdir(path)
        self.undo.append((path.parent, lambda: shutil.rmtree(path)))

    def rename(self, source, target):
        super().rename(source, target)
        self.undo.append((target.parent, lambda: os.rename(target, source)))

    def replace(self, source, target):
        buried = self._bury(target)
        super().replace(source, target)

        def undo():
            os.rename(target, source)
            os.link(buried, target)
        self.undo.append((target.parent, undo))

    def unlink(self, path):
        buried = self._bury(path)
        super().unlink(path)
        self.undo.append((path.parent, lambda: os.link(buried, path)))

    def rmdir(self, path):
        super().rmdir(path)
        self.undo.append((path.parent, lambda: os.mkdir(path)))


def cases(log: list[tuple[str, str]], kinds: tuple[str, ...]) -> list[tuple[int, str]]:
    """Every (operation number, kind) for a save whose operations were `log`."""
    return [(at, kind) for at, (name, _) in enumerate(log, 1) for kind in kinds if name == "write" or kind not in WRITES_ONLY]
