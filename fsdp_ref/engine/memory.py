"""Pieces of one flat memory: where each begins, and a typed view of it. Offsets are bytes, so that dtypes may differ."""

from __future__ import annotations

import torch


def lay_out(pieces: list[tuple[int, torch.dtype]], align: int = 1) -> tuple[list[int], int]:
    """Byte offsets of pieces (elements, dtype) behind one another, each aligned to its element size or more; and the total, in bytes."""
    offsets, end = [], 0
    for numel, dtype in pieces:
        end += -end % max(dtype.itemsize, align)
        offsets.append(end)
        end += numel * dtype.itemsize
    return offsets, end + -end % 8


def piece(memory: torch.Tensor, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """`numel` elements of `dtype` that begin `offset` bytes into `memory` (uint8), as a 1-D view."""
    return memory[offset : offset + numel * dtype.itemsize].view(dtype)
