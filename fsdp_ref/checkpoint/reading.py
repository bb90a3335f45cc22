"""Fill tensors from shards: each rank reads only the bytes that its own boxes need, a piece at a time, straight to their place.

Bytes are copied as bytes, whatever the type, so NaN payloads and -0.0 arrive as they were. Where a run of them lies in the tensor as
it does in the file, they are read into the tensor itself; elsewhere through a buffer of one piece (1 MiB), the only extra memory.
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

    def read(view: memoryview, box: Box) -> None:
        begin = base + sum((offset - start) * stride for offset, start, stride in zip(box.offsets, job.piece.offsets, strides, strict=True))
        if files.layer().read_into(descriptor, view, begin) != len(view):
            raise CheckpointError(f"{path} changed while it was loaded; load again before you train on")

    if (place := _place(job, strides, size)) is not None:
        read(place, job.box)
        if not job.target.part.is_inference():
            torch.autograd.graph.increment_version(job.target.part)          # as copy_ does: a backward that needs the old values says so
        return
    for box in _split(job.box, strides, size, len(buffer)):
        count = _span(box, strides, size)
        read(memoryview(buffer)[:count], box)
        source = torch.frombuffer(buffer, dtype=torch.uint8, count=count).as_strided((*box.sizes, size), (*strides, 1))
        job.target.slice(box).unsqueeze(-1).view(torch.uint8).copy_(source)


def _place(job: Job, strides: tuple[int, ...], itemsize: int) -> memoryview | None:
    """The memory of the job's box, when it is one run of bytes in the file and in the tensor alike; else None."""
    target = job.target.slice(job.box)
    if target.device.type != "cpu" or not target.is_contiguous() or _span(job.box, strides, itemsize) != target.numel() * itemsize:
        return None
    return memoryview(target.view(-1).view(torch.uint8).numpy())


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
