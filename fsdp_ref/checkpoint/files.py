"""Every file operation of a checkpoint goes through one small object, so that a test can count them and fail or kill at the n-th.

The operations are those of POSIX, one call each, with two additions: a write goes on until all bytes are written, and a flush
on macOS asks the drive too. Reading is here as well, bounded and without following a link. This module knows nothing of
tensors, steps or ranks, and must never open a path for writing that exists already.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import xxhash

from ..errors import CheckpointError

PIECE = 8 << 20         # bytes that are written, read or digested at a time; the only buffer a save or a load needs


class Files:
    """The real file system. Tests put a subclass in its place with `use`."""

    def create(self, path: Path) -> int:
        """Open a new file for writing; FileExistsError when anything stands there. Mode 0666 less the umask (so 0644 mostly)."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write all of `data`; the system may take several goes."""
        while len(data):
            count = self.write_some(descriptor, data)
            if count <= 0:
                raise OSError(errno.EIO, "a write took no byte")
            data = data[count:]

    def write_some(self, descriptor: int, data: memoryview) -> int:
        """One write of the system; returns how many bytes it took."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """Return when the file's bytes are on the drive."""
        if sys.platform == "darwin":
            import fcntl
            with contextlib.suppress(OSError):              # not every file system of macOS can ask its drive
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def fsync_dir(self, path: Path) -> None:
        """Return when the names in the directory are on the drive."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):        # some network file systems cannot flush a directory
                raise
        finally:
            os.close(descriptor)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        """Give a directory its final name. On POSIX this is atomic: a reader sees the old name or the new one."""
        os.rename(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """Put a file in the place of another, atomically."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def open(self, path: Path) -> int:
        """Open a regular file for reading, never through a link at its end.

        Raises:
            CheckpointError: it is a link, a directory or a device.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CheckpointError(f"{path} is a symbolic link; a checkpoint holds plain files only, copy the file there") from error
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{path} is not a plain file; restore the checkpoint from a copy")
        return descriptor

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from byte `offset` of the file; returns how many bytes there were."""
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done


_layer = Files()


def layer() -> Files:
    """The file operations in use."""
    return _layer


@contextlib.contextmanager
def use(replacement: Files) -> Iterator[Files]:
    """Put another set of file operations in place for a while (tests)."""
    global _layer
    before, _layer = _layer, replacement
    try:
        yield replacement
    finally:
        _layer = before


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """A file open for reading: its descriptor and its size in bytes."""
    descriptor = _layer.open(path)
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        _layer.close(descriptor)


def make_directories(path: Path) -> None:
    """Make a directory and those above it that are missing, and flush each new name; one that exists is fine.

    Without the flush a power loss could take the name of the directory, and with it every checkpoint that was flushed inside.
    """
    if path.is_dir():
        return
    make_directories(path.parent)
    try:
        _layer.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    _layer.fsync_dir(path.parent)


class Writer:
    """A new file that is digested while it is written, and flushed to the drive when the block ends well.

    `bytes` and `digest` tell what was written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._hash = path, xxhash.xxh3_128()
        self.bytes = 0

    def __enter__(self) -> Writer:
        self._descriptor = _layer.create(self._path)
        return self

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        for begin in range(0, len(view), PIECE):
            piece = view[begin: begin + PIECE]
            self._hash.update(piece)
            _layer.write(self._descriptor, piece)
        self.bytes += len(view)

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                _layer.fsync(self._descriptor)
        finally:
            _layer.close(self._descriptor)

    @property
    def digest(self) -> str:
        return f"xxh3-128:{self._hash.hexdigest()}"


def digest_bytes(data: bytes) -> str:
    """The digest of bytes in memory, in the form the manifest uses."""
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"


def digest_file(path: Path) -> tuple[int, str]:
    """Size and digest of a file, read a piece at a time."""
    with opened(path) as (descriptor, size):
        state, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(PIECE, size) or 1))
        offset = 0
        while count := _layer.read_into(descriptor, buffer, offset):
            state.update(buffer[:count])
            offset += count
    return offset, f"xxh3-128:{state.hexdigest()}"


def read_small(path: Path, limit: int) -> bytes:
    """A whole small file.

    Raises:
        CheckpointError: it is larger than `limit` bytes (refused before anything is read).
    """
    with opened(path) as (descriptor, size):
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes and at most {limit} make sense there; restore the checkpoint from a copy")
        buffer = bytearray(size)
        if size and _layer.read_into(descriptor, memoryview(buffer), 0) != size:
            raise CheckpointError(f"{path} became shorter while it was read; restore the checkpoint from a copy")
    return bytes(buffer)
