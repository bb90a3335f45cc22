"""Fill tensors from shards: each rank reads only the bytes that its own boxes need, a piece at a time, straight to their place.

Bytes are copied as bytes, whatever the type, so NaN payloads and -0.0 arrive as they were. The extra memory is one piece of 8 MiB.
This module trusts a manifest that has been checked (`verify.examine`), and never looks at tensors that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import ledger
from ..errors import CheckpointError
from ..ledger import Lane
from . import files, safetensors_file
from .layout import Box
from .manifest import TensorEntry
from .safetensors_file import DTYPES
from .state import LocalTensor


@dataclass(frozen=True)
class Job:
    """Copy the elements `box` of a tensor out of the saved piece `piece`, which has the name `name` in its file."""

    name: str
    piece: Box
    box: Box
    target: LocalTensor


def plan(tensors: dict[str, TensorEntry], targets: dict[str, LocalTensor]) -> dict[str, list[Job]]:
    """What to read for the targets on this rank, by file. `tensors` and `targets` have the same names.

    Saved by 2 ranks as rows 0-2 and 3-4; rank 1 of 4 holds rows 2-3: one row of the first file and one of the second.
    """
    jobs: dict[str, list[Job]] = {}
    for name, entry in tensors.items():
        for piece in entry.pieces:
            box = piece.box.overlap(targets[name].box)
            if box is not None:
                jobs.setdefault(piece.file, []).append(Job(name, piece.box, box, targets[name]))
    return jobs


def fill(step_dir: Path, jobs: dict[str, list[Job]], headers: dict[str, safetensors_file.Header] | None = None) -> int:
    """Do the jobs; returns the number of bytes read. `headers`: those of the files, where the caller has read them already.

    Raises:
        CheckpointError: a file changed since it was verified.
    """
    buffer, total = bytearray(files.PIECE), 0
    for name in sorted(jobs):
        path = step_dir / name
        nbytes = sum(job.box.volume * DTYPES[job.target.dtype].itemsize for job in jobs[name])
        with ledger.span(Lane.CHECKPOINT, "read", unit=name, phase="checkpoint", nbytes=nbytes):
            header = headers[name] if headers else safetensors_file.read_header(path)
            with files.opened(path) as (descriptor, _), torch.no_grad():
                for job in sorted(jobs[name], key=lambda job: header.entries[job.name].begin):
                    _copy(descriptor, header.start + header.entries[job.name].begin, job, buffer, path)
        total += nbytes
    return total


def _copy(descriptor: int, base: int, job: Job, buffer: bytearray, path: Path) -> None:
    """One job. `base`: where in the file the saved piece begins."""
    size = DTYPES[job.target.dtype].itemsize
    strides = _strides(job.piece.sizes, size)
    for box in _split(job.box, strides, size, len(buffer)):
        begin = base + sum((offset - start) * stride for offset, start, stride in zip(box.offsets, job.piece.offsets, strides, strict=True))
        count = _span(box, strides, size)
        view = memoryview(buffer)[:count]
        if files.layer().read_into(descriptor, view, begin) != count:
            raise CheckpointError(f"{path} changed while it was loaded; load again before you train on")
        source = torch.frombuffer(buffer, dtype=torch.uint8, count=count).as_strided((*box.sizes, size), (*strides, 1))
        job.target.slice(box).unsqueeze(-1).view(torch.uint8).copy_(source)


def _strides(sizes: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next along each dimension of a row-major tensor."""
    strides, step = [], itemsize
    for length in reversed(sizes):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _span(box: Box, strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes from the first element of the box to the end of its last one, in the file."""
    return sum((length - 1) * stride for length, stride in zip(box.sizes, strides, strict=True)) + itemsize


def _split(box: Box, strides: tuple[int, ...], itemsize: int, limit: int) -> Iterator[Box]:
    """Boxes that make up `box`, each of which spans at most `limit` bytes of the file."""
    if _span(box, strides, itemsize) <= limit:
        yield box
        return
    dimension = next(d for d, length in enumerate(box.sizes) if length > 1)       # the longest stride comes first
    rows = max(1, limit // strides[dimension])
    parts = -(-box.sizes[dimension] // rows)
    for index in range(parts):
        yield from _split(box.cut(dimension, parts, index), strides, itemsize, limit)
