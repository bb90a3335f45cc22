"""An `Architecture` as a module of shapes alone, on the meta device, so that the engine can be replayed on a preset in seconds.

Every unit is one node of autograd: its output has the right shape, its backward gives every parameter a gradient of its shape, and
nothing is computed between. The parameters are those of `Architecture.block` and `.root`; the engine sees the same units, in the same
order, as in the model itself. Times come from formulas (costs.py). A user's own module is replayed with its own forward instead.
"""

from __future__ import annotations

import torch
from torch import nn

from .architecture import Architecture


class Shapes(nn.Module):
    """The parameters of a part; forward makes an output of `features` in the last dim, from an input and all of them."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], features: int) -> None:
        super().__init__()
        self.features = features
        for number, shape in enumerate(shapes):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.empty(shape, device="meta")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) or (B, T, C) -> (B, T, features)"""
        return _Node.apply(self.features, x, *self.parameters(recurse=False))


class Stack(nn.Module):
    """First part of the root, blocks, last part of the root."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        root, block = shape.root(), shape.block()
        ahead = 1 + bool(shape.positions) if not shape.patch else 4
        self.first = Shapes(root.shapes[:ahead], shape.dim)
        self.blocks = nn.ModuleList(Shapes(block.shapes, shape.dim) for _ in range(shape.layers))
        self.last = Shapes(root.shapes[ahead:], shape.vocab)
        if shape.tied and not shape.patch:
            self.last.tied = self.first.weight0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (B, T, V)"""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class _Node(torch.autograd.Function):
    """One unit's work, in shapes."""

    @staticmethod
    def forward(ctx, features: int, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.like = (x, *params)
        dtype = params[0].dtype
        return torch.empty(*x.shape[:2], features, dtype=dtype, device="meta")

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        wanted = ctx.needs_input_grad[1:]
        return None, *(torch.empty_like(each) if needed else None for each, needed in zip(ctx.like, wanted, strict=True))


def build(shape: Architecture) -> Stack:
    """The module, on meta."""
    return Stack(shape)


def example(shape: Architecture, batch: int, sequence: int) -> torch.Tensor:
    """An input: `batch` sequences of `sequence` tokens (or patches)."""
    return torch.empty(batch, sequence, dtype=torch.int64, device="meta")


