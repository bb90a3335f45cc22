"""What exactly is damaged: the tensor behind a changed or missing byte, and everything that is wrong instead of the first thing.

Where a tensor's bytes lie follows from the manifest alone (the writer's order is fixed), so a shard whose own header is ruined can be
explained too. Nothing here decides whether a file is good: its size and its digest do (`verify`). This module never repairs.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from . import files
from .layout import Box
from .manifest import Manifest
from .safetensors_file import DTYPES, file_order


def ranges(manifest: Manifest, name: str) -> list[tuple[str, Box, str, int, int]]:
    """The tensors of a shard: (tensor, box, digest, first byte, byte behind the last), in the order of the file."""
    held = {label: (entry, piece) for label, entry in manifest.sections().get(name.split("-")[0], {}).items()
            for piece in entry.pieces if piece.file == name}
    order = file_order({label: entry.dtype for label, (entry, _) in held.items()})
    sizes = [held[label][1].box.volume * DTYPES[held[label][0].dtype].itemsize for label in order]
    begin, result = max(0, manifest.files[name][0] - sum(sizes)), []    # the header takes what the tensors leave
    for label, size in zip(order, sizes, strict=True):
        piece = held[label][1]
        result.append((label, piece.box, piece.digest, begin, begin + size))
        begin += size
    return result


def changed(path: Path, manifest: Manifest) -> str:
    """Which tensors of a file of the right size have other bytes than were saved, in words."""
    parts = ranges(manifest, path.name)
    found = [_part(label, box) for label, box, digest, begin, end in parts if _digest(path, begin, end) != digest]
    return _list(found) if found else "its header" if parts else "its text"


def cut_off(name: str, size: int, manifest: Manifest) -> str:
    """Which tensors a file that is only `size` bytes long has lost, in words."""
    parts = ranges(manifest, name)
    return _list([_part(label, box) for label, box, _, begin, end in parts if end > size and end > begin]) if parts else "its text"


def _part(label: str, box: Box) -> str:
    return f"tensor {label} (offsets {list(box.offsets)}, sizes {list(box.sizes)})"


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more tensors" if len(names) > 5 else "")


def _digest(path: Path, begin: int, end: int) -> str:
    """The digest of a range of bytes, read a piece at a time."""
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(files.PIECE, end - begin) or 1))
    with files.opened(path) as (descriptor, _):
        while begin < end and (count := files.layer().read_into(descriptor, buffer[:end - begin], begin)):
            state.update(buffer[:count])
            begin += count
    return f"xxh3-128:{state.hexdigest()}"
