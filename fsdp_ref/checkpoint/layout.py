"""Names and boxes: what the directories and files of a checkpoint are called, and which part of a tensor lies where.

    RUN/step-00000120/                             one committed checkpoint
        manifest.json                              what is in it, in words and numbers
        model-00000-of-00002.safetensors           what rank 0 holds of parameters and buffers
        optimizer-00000-of-00002.safetensors       what rank 0 holds of the optimizer's tensors
        rank-00000.json                            rank 0's random state
    RUN/step-00000130.tmp-<32 hex digits>/         being written, or left over from a run that died
    RUN/latest                                     the name of the newest checkpoint, for people; nothing relies on it

A box is a part of a tensor: offsets and sizes, one each a dimension. A name read from a file is never used as a path before
`step_of` or `file_names` has made the same name from numbers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..placements import chunk_rows

MANIFEST = "manifest.json"
POINTER = "latest"
_STEP = re.compile(r"step-([0-9]{8,18})")
_TEMPORARY = re.compile(r"step-[0-9]{8,18}\.tmp-[0-9a-f]{32}")


def step_name(step: int) -> str:
    """`step-00000120` for 120."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """120 for `step-00000120`; None for any other spelling (`step-120`, `old-step-00000120`, `step-00000120.bak`)."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def temporary_name(step: int, unique: str) -> str:
    """The name of a directory that is being written or deleted. `unique`: 32 hexadecimal digits."""
    return f"{step_name(step)}.tmp-{unique}"


def is_temporary(name: str) -> bool:
    """True for a name that `temporary_name` made."""
    return _TEMPORARY.fullmatch(name) is not None


def shard_name(kind: str, rank: int, world_size: int) -> str:
    """`model-00003-of-00004.safetensors`: what rank 3 of 4 wrote (ranks count from 0)."""
    return f"{kind}-{rank:05d}-of-{world_size:05d}.safetensors"


def random_name(rank: int) -> str:
    """`rank-00003.json`."""
    return f"rank-{rank:05d}.json"


def rank_of(name: str) -> int:
    """3 for `model-00003-of-00004.safetensors` and `rank-00003.json`; for names that `file_names` gave."""
    return int(name.split(".")[0].split("-")[1])


def file_names(world_size: int, optimizer: bool) -> set[str]:
    """Every file beside the manifest."""
    kinds = ("model", "optimizer") if optimizer else ("model",)
    shards = {shard_name(kind, rank, world_size) for kind in kinds for rank in range(world_size)}
    return shards | {random_name(rank) for rank in range(world_size)}


def plain_name(name: object, suffix: str) -> bool:
    """True for a file name that is safe in any directory on any system: no path, no hidden file, no stream, and the right ending."""
    return (type(name) is str and name.endswith(suffix) and len(name.encode("utf-8", "surrogatepass")) <= 255
            and not name.startswith(".") and not any(letter in '/\\:*?"<>|' or ord(letter) < 32 for letter in name))


def names_in(directory: Path) -> set[str]:
    """The names in a directory, hidden ones left out (file managers and network file systems leave such)."""
    return {entry.name for entry in directory.iterdir() if not entry.name.startswith(".")}


# -- boxes --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A part of a tensor: it starts at `offsets` and has the shape `sizes`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements; a scalar has one."""
        return math.prod(self.sizes)

    def cut(self, dimension: int, parts: int, index: int) -> Box:
        """Part `index` of `parts` along a dimension, cut as torch.chunk cuts: equal parts rounded up, late ones may be empty.

        5 rows on 4 ranks -> 2, 2, 1, 0:

        >>> [Box((0,), (5,)).cut(0, 4, rank).sizes[0] for rank in range(4)]
        [2, 2, 1, 0]
        """
        _, begin, size = chunk_rows(self.sizes[dimension], parts, index)
        replace = lambda values, value: (*values[:dimension], value, *values[dimension + 1:])  # noqa: E731
        return Box(replace(self.offsets, self.offsets[dimension] + begin), replace(self.sizes, size))

    def blocks(self, limit: int) -> Iterator[Box]:
        """Boxes of at most `limit` elements that make up this one, in row-major order: their bytes follow one another.

        >>> [block.sizes for block in Box.whole((5, 3)).blocks(6)]
        [(2, 3), (2, 3), (1, 3)]
        """
        if self.volume <= limit:
            yield self
            return
        dimension = next(d for d, length in enumerate(self.sizes) if length > 1)
        rows = max(1, limit * self.sizes[dimension] // self.volume)
        parts = -(-self.sizes[dimension] // rows)
        for index in range(parts):
            yield from self.cut(dimension, parts, index).blocks(limit)

    def overlap(self, other: Box) -> Box | None:
        """The elements that both hold; None when there are none."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
            return None
        return Box(begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True)))

    def inside(self, shape: tuple[int, ...]) -> bool:
        """True when the box has the dimensions of `shape` and does not stick out."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset + size <= length for offset, size, length in zip(self.offsets, self.sizes, shape, strict=True))


def check_cover(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Every element of the tensor lies in exactly one box.

    Raises:
        CheckpointError: a box sticks out, two overlap, or elements are missing; the message names the tensor.
    """
    for box in boxes:
        if not box.inside(shape):
            raise CheckpointError(f"a piece of {name} (offsets {list(box.offsets)}, sizes {list(box.sizes)}) does not fit its shape "
                                  f"{list(shape)}; restore the checkpoint from a copy")
    boxes = sorted(boxes, key=lambda box: box.offsets)
    for index, box in enumerate(boxes):
        later = itertools.takewhile(lambda other, box=box: not shape or other.offsets[0] < box.offsets[0] + box.sizes[0], boxes[index + 1:])
        for other in later:
            if box.overlap(other) is not None:
                raise CheckpointError(f"two pieces of {name} overlap (offsets {list(box.offsets)} and {list(other.offsets)}); "
                                      "restore the checkpoint from a copy")
    held, whole = sum(box.volume for box in boxes), math.prod(shape)
    if held != whole or not boxes:
        raise CheckpointError(f"{name} has {held} of its {whole} elements, a piece is missing; restore the checkpoint from a copy")
