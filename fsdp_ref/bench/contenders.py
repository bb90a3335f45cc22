"""Who takes part: the same GPT made data-parallel in seven ways, each as a function that makes one training step.

Every contender starts from equal weights and sees equal data. This module must never take a time or look at memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..engine import data_parallel
from ..models import GPT, GPTConfig
from ..placements import DDP, ZERO1, ZERO2, ZERO3, Placements

RECORDING = "zero3-recording"

# What --contenders takes -> what tables and JSON call it.
NAMES = {"zero3": "fsdp_ref ZeRO-3", RECORDING: "fsdp_ref ZeRO-3, recording", "zero1": "fsdp_ref ZeRO-1", "zero2": "fsdp_ref ZeRO-2",
         "ddp": "fsdp_ref DDP", "torch-fsdp": "torch fully_shard", "torch-ddp": "torch DDP"}

OURS: dict[str, Placements] = {"zero3": ZERO3, RECORDING: ZERO3, "zero1": ZERO1, "zero2": ZERO2, "ddp": DDP}


@dataclass(frozen=True)
class Shape:
    """The model and its batch: `batch` sequences of `context` tokens a rank, `layers` blocks of width `dim`."""

    dim: int = 512
    layers: int = 6
    batch: int = 4
    context: int = 128

    @property
    def config(self) -> GPTConfig:
        heads = next(heads for heads in (8, 4, 2, 1) if self.dim % heads == 0)
        return GPTConfig(dim=self.dim, layers=self.layers, heads=heads, context=self.context)


def step_of(key: str, shape: Shape, device: torch.device) -> Callable[[], None]:
    """A function that makes one training step (forward, backward, AdamW) of contender `key`; every rank must call both."""
    if key in OURS:
        return training_step(data_parallel(_model(shape, device), OURS[key], reshard_after_forward=None), shape, device)
    return training_step(_torch_sharded(shape, device) if key == "torch-fsdp" else _torch_replicated(shape, device), shape, device)


def prefetching_step(prefetch: int, shape: Shape, device: torch.device) -> Callable[[], None]:
    """One training step of ZeRO-3 whose gathers start `prefetch` units ahead (0: only when their turn has come)."""
    return training_step(data_parallel(_model(shape, device), ZERO3, reshard_after_forward=None, prefetch=prefetch), shape, device)


def training_step(model: nn.Module, shape: Shape, device: torch.device) -> Callable[[], None]:
    """One step of `model` with its own AdamW; the same tokens every time."""
    tokens = torch.randint(256, (shape.batch, shape.context + 1), device=device, generator=torch.Generator(device).manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        logits = model(tokens[:, :-1])                                 # (batch, context, 256)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _model(shape: Shape, device: torch.device) -> GPT:
    torch.manual_seed(0)
    return GPT(shape.config).to(device)


def _torch_sharded(shape: Shape, device: torch.device) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    model = _model(shape, device)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _torch_replicated(shape: Shape, device: torch.device) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel
    return DistributedDataParallel(_model(shape, device))
