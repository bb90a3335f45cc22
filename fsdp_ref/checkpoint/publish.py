"""Write a directory under a temporary name and give it its own when it is complete: a reader sees all of it or nothing.

For what is made from a checkpoint by one process (exports, conversions); `save` does the same with the votes of all ranks. An
existing directory with something in it is never touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from . import files


@contextlib.contextmanager
def new_directory(target: str | os.PathLike) -> Iterator[Path]:
    """A fresh directory beside `target`; when the block ends well it is flushed and renamed to `target`, otherwise removed.

    Raises:
        CheckpointError: `target` exists and is not an empty directory, or the disk failed; nothing is left behind.
    """
    target, layer = Path(target).absolute(), files.layer()
    temporary = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex}")
    try:
        _check_free(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        layer.mkdir(temporary)
        try:
            yield temporary
            layer.fsync_dir(temporary)
            _check_free(target)
            layer.rename(temporary, target)                  # takes the place of an empty directory, and of nothing else
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        layer.fsync_dir(target.parent)
    except OSError as error:
        raise CheckpointError(f"{error.filename or target} cannot be written ({error.strerror}); free some space or give another "
                              "directory") from error


def _check_free(target: Path) -> None:
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise CheckpointError(f"{target} exists already and is never written into; give a new directory or empty this one")
