"""An all-gather in 8 bits: a quarter of fp32's bytes on the wire. An example of what torch's all-gather extensions are for.

    shard (fp32)  --quantise-->  8-bit numbers and one scale  --all-gather-->  everyone's  --dequantise-->  whole parameter

Each rank finds the largest magnitude of its own shard, scales the shard so that it fills the range of float8 e4m3 (up to 448), and sends
the bytes and the scale; who receives them multiplies again. The optimizer keeps its fp32 shards, so errors do not build up: every step
rounds the same masters anew. What is lost is precision of compute: e4m3 has 3 bits of mantissa, a relative error of up to 1/16.

The two methods below are torch's protocol (`fsdp_pre_all_gather`, `fsdp_post_all_gather` of torch/distributed/fsdp/_fully_shard), so the
same call works on a model sharded by torch's own `fully_shard` where shards are even. This module must never change the shards.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .errors import ConfigError
from .placements import chunk_rows

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max           # 448


def gather_in_fp8(model: nn.Module, choose: Callable[[str, nn.Parameter], bool] | None = None) -> list[str]:
    """Have the chosen parameters of a sharded `model` gathered in 8 bits; returns their names. Call it after `fully_shard`.

    Args:
        choose: (name, parameter) -> whether to; default: floating-point parameters of two or more dims (norms and biases are small
            and sensitive).

    Raises:
        ConfigError: no parameter of the model is a shard, or none was chosen.
    """
    shards = [(name, param) for name, param in model.named_parameters() if isinstance(param, DTensor) and param.is_floating_point()]
    if not shards:
        raise ConfigError(f"no parameter of this {type(model).__name__} is sharded; call fully_shard, or data_parallel with ZERO3, first")
    chosen = [(name, param) for name, param in shards if (choose(name, param) if choose else param.ndim >= 2)]
    if not chosen:
        raise ConfigError(f"none of the {len(shards)} shards of this {type(model).__name__} was chosen to be gathered in 8 bits")
    for _, param in chosen:
        local, rows = param._local_tensor, _padded_rows(param)
        local.fsdp_pre_all_gather = types.MethodType(_Quantise(rows), local)          # methods of the shard: they go where it goes
        local.fsdp_post_all_gather = types.MethodType(_Dequantise(param.shape), local)
    return [name for name, _ in chosen]


def quantise(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(8-bit numbers of the same shape, scale of shape (1,) in fp32) with `numbers * scale` close to `tensor`: an error of at most 1/16
    of each number, or of 2**-10 of the scale where a number is nearly zero."""
    largest = tensor.abs().amax().float() if tensor.numel() else torch.zeros((), device=tensor.device)
    scale = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest)).reshape(1)
    return (tensor.float() / scale).clamp(-LARGEST, LARGEST).to(FORMAT), scale


def _padded_rows(param: DTensor) -> int:
    """Rows of the first rank's shard, the longest: what every rank sends."""
    dim = next(placement.dim for placement in param.placements if placement.is_shard())
    if dim:
        raise ConfigError(f"8-bit gathers cut rows (dim 0), and a parameter of shape {tuple(param.shape)} is cut along dim {dim}; "
                          "leave it out")
    return chunk_rows(param.shape[0], param.device_mesh.size(param.device_mesh.ndim - 1), 0)[0]


@dataclass(frozen=True)
class _Quantise:
    """`shard.fsdp_pre_all_gather(mesh)`: what this rank sends, padded to `rows`."""

    rows: int

    def __call__(self, local: torch.Tensor, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        numbers, scale = quantise(local)
        padded = numbers.new_zeros((self.rows, *local.shape[1:]))
        padded.view(torch.uint8)[: len(local)].copy_(numbers.view(torch.uint8))
        return (padded, scale), None


@dataclass(frozen=True)
class _Dequantise:
    """`shard.fsdp_post_all_gather(...)`: (ranks * rows, *rest) 8-bit numbers and (ranks,) scales -> the parameter, of shape `shape`."""

    shape: torch.Size

    def __call__(self, local: torch.Tensor, outputs: Iterable[torch.Tensor], metadata: None, dtype: torch.dtype, *,
                 out: torch.Tensor | None = None) -> Any:
        numbers, scales = outputs
        grid = numbers.view(len(scales), -1).to(torch.float32) * scales[:, None]       # (ranks, rows * rest)
        whole = grid.view(numbers.shape)[: self.shape[0]].to(dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):     # the same numbers as in forward
            out.copy_(whole)
        return None
