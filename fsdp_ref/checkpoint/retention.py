"""Which checkpoints a directory has, which old ones may go, and the removal of what dead runs left behind.

Only a name that `layout` made is ever looked at or deleted. A directory counts as committed when it has such a name and a
manifest inside, which one rename brings about together. Deletion renames first, so a half-deleted checkpoint never bears a
committed name. Nothing here makes a collective: one rank calls it.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from . import diagnosis, files, layout
from .manifest import Manifest

_protected: Path | None = None          # the checkpoint this process was loaded from; never deleted by it


def protect(step_dir: Path) -> None:
    """Remember the checkpoint that was loaded, so that retention spares it."""
    global _protected
    _protected = step_dir.resolve()


def committed(root: str | os.PathLike) -> list[Path]:
    """The committed checkpoints in `root`, in the order of their steps (as numbers). Empty when `root` does not exist."""
    found = []
    try:
        entries = list(os.scandir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:
        step = layout.step_of(entry.name)
        if step is not None and entry.is_dir(follow_symlinks=False) and (Path(root, entry.name) / layout.MANIFEST).is_file():
            found.append((step, Path(root, entry.name)))
    return [path for _, path in sorted(found)]


def latest(root: str | os.PathLike) -> Path | None:
    """The newest committed checkpoint in `root` that has its manifest and all its files in their full size; None without one.

    One that is not whole is passed over with a warning. The bytes themselves are checked by `verify` and by `load`.
    """
    for path in reversed(committed(root)):
        try:
            check_sizes(path, Manifest.read(path))
            return path
        except CheckpointError as error:
            warnings.warn(f"passing over {path}: {error}", stacklevel=2)
    return None


def check_sizes(step_dir: Path, manifest: Manifest) -> None:
    """The directory holds the manifest's files, in their sizes, and no other.

    Raises:
        CheckpointError: the message names the file.
    """
    for fault in size_faults(step_dir, manifest):
        raise CheckpointError(fault)


def size_faults(step_dir: Path, manifest: Manifest) -> Iterator[str]:
    """Everything that is wrong with the set of files and their sizes, one sentence each."""
    present = layout.names_in(step_dir) - {layout.MANIFEST}
    for name in sorted(manifest.files.keys() - present):
        yield f"{step_dir / name} is missing; restore the checkpoint from a copy or go back to an older one"
    for name in sorted(present - manifest.files.keys()):
        yield f"{step_dir / name} does not belong to this checkpoint; move it elsewhere"
    for name in sorted(manifest.files.keys() & present):
        size = manifest.files[name][0]
        try:
            with files.opened(step_dir / name) as (_, found):
                pass
        except CheckpointError as error:                     # a link, a directory, a device
            yield str(error)
            continue
        if found != size:
            lost = f", {diagnosis.cut_off(name, found, manifest)} is cut off" if found < size else ""
            yield (f"{step_dir / name} has {found} bytes instead of {size}{lost}; restore the checkpoint from a copy or go back to an "
                   "older one")


def sweep(root: Path) -> None:
    """Remove what saves and deletions that died have left in `root`. One run at a time may write to a directory.

    What cannot be removed is told in a warning, for it does not hinder the save.
    """
    for entry in sorted(os.listdir(root)):
        if layout.is_temporary(entry):
            try:
                remove_tree(root / entry)
            except OSError as error:
                warnings.warn(f"could not remove {root / entry}, left by a dead save ({error.strerror}); delete it by hand", stacklevel=2)


def remove_tree(path: Path) -> None:
    """Remove a temporary directory and the files in it; one that is gone already is fine. A link is removed, not followed."""
    layer = files.layer()
    if not layout.is_temporary(path.name):
        raise ValueError(f"{path} is no temporary directory")
    try:
        if path.is_symlink() or path.is_file():              # the pointer before it got its name is a file
            layer.unlink(path)
            return
        for name in sorted(os.listdir(path)):
            layer.unlink(path / name)
        layer.rmdir(path)
    except FileNotFoundError:
        pass


def prune(root: Path, written: Path, keep_last: int) -> None:
    """Delete the oldest committed checkpoints until `keep_last` are left, counting the one just written.

    Steps above the one just written belong to another run: they are neither counted nor deleted, and a warning names them. The
    checkpoint this process was loaded from is spared too. Failure to delete is a warning, for the new checkpoint is safe.
    """
    everything, step = committed(root), layout.step_of(written.name)
    above = [path.name for path in everything if layout.step_of(path.name) > step]
    if above:
        warnings.warn(f"{root} has later checkpoints than the one just written ({', '.join(above)}), which load takes for the newest; "
                      "move them away if they are of an earlier run", stacklevel=2)
    counted = [path for path in everything if layout.step_of(path.name) <= step]
    for path in counted[:-keep_last]:
        if path.resolve() == _protected or path == written:
            continue
        trash = root / layout.temporary_name(layout.step_of(path.name), uuid.uuid4().hex)
        try:
            files.layer().rename(path, trash)
            files.layer().fsync_dir(root)
            remove_tree(trash)
        except OSError as error:
            warnings.warn(f"could not delete the old checkpoint {path} ({error.strerror}); delete it by hand", stacklevel=2)
