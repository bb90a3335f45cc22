"""The tensors of a checkpoint a block at a time, whole and in order, whoever saved which part of them: for exports and comparisons.

One process reads; no group of ranks is needed. The extra memory is a few blocks of at most 8 MiB, however large the checkpoint. The
checkpoint must have been examined (`verify.examine`), for what is read here is believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from . import reading, safetensors_file
from .layout import Box
from .manifest import TensorEntry
from .safetensors_file import DTYPES, Header
from .state import LocalTensor

BLOCK = 1 << 20         # elements of a block: at most 8 MiB of the widest type


class TensorReader:
    """Reads any box of the tensors in `entries`, whose pieces lie in files of `directory`."""

    def __init__(self, directory: Path, entries: dict[str, TensorEntry]) -> None:
        self.directory, self.entries = directory, entries
        self._headers: dict[str, Header] = {}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A box of a tensor (all of it without `box`), of the saved type, on the CPU."""
        entry = self.entries[name]
        box = Box.whole(entry.shape) if box is None else box
        tensor = torch.empty(box.sizes, dtype=DTYPES[entry.dtype])
        target = LocalTensor(name, entry.dtype, entry.shape, tensor, box, replicas=1, replica=0)
        jobs = reading.plan({name: entry}, {name: target})
        for file in jobs.keys() - self._headers.keys():
            self._headers[file] = safetensors_file.read_header(self.directory / file)
        reading.fill(self.directory, jobs, self._headers)
        return tensor

    def blocks(self, name: str) -> Iterator[tuple[Box, torch.Tensor]]:
        """The whole tensor in row-major order. Tensors of one shape come in the same blocks, whatever their types."""
        for box in Box.whole(self.entries[name].shape).blocks(BLOCK):
            yield box, self.read(name, box)


def convert(block: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """A block as another floating-point type (nearest, ties to even), and whether a finite value did not stay finite."""
    if block.dtype == dtype:
        return block, False
    converted = block.to(dtype)
    return converted, bool((_finite(block) & ~_finite(converted)).any())


def _finite(block: torch.Tensor) -> torch.Tensor:
    return (block.float() if block.element_size() == 1 else block).isfinite()               # torch has no isfinite for 8-bit floats


def as_bytes(block: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous block, shape `[elements, item size]`: NaN payloads and -0.0 compare as what they are."""
    return block.reshape(-1, 1).view(torch.uint8)
