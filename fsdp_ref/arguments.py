"""What `fully_shard` and `data_parallel` accept, and what they say to the rest. The types and first words of errors are torch's.

Nothing here changes anything, and nothing here is about how sharding works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .errors import ConfigError
from .placements import Placement, Placements
from .policies import MixedPrecisionPolicy, OffloadPolicy


def modules_of(given: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The modules of one unit, from what `fully_shard` was called with.

    Raises:
        TypeError: something that is no module.
        ValueError: none at all, or a container without forward: its hooks would never run.
    """
    modules = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not modules:
        raise ValueError("fully_shard got an empty list; give it the modules that are gathered together")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, not {type(each)}")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {each}")
    return modules


def refuse_spmd(dp_mesh_dims: Any) -> None:
    """torch's `dp_mesh_dims` describes parameters that are tensor-parallel already. Raises ValueError unless it is None."""
    if dp_mesh_dims is not None:
        raise ValueError(f"dp_mesh_dims={dp_mesh_dims} is for parameters that are tensor-parallel DTensors already, which this engine does "
                         "not shard; give the data-parallel dims of the mesh alone, as mesh=mesh[name] or mesh[replicas, shards]")


def refuse_misfits(placements: Placements, mesh: DeviceMesh | None, policy: MixedPrecisionPolicy, offload: OffloadPolicy,
                   prefetch: int) -> None:
    """What `data_parallel` cannot do for a row of the ladder. Raises ConfigError."""
    name, shards_rest = placements.name, placements.parameter is Placement.SHARD
    if mesh is not None and (mesh.ndim == 2) != placements.replicas:
        raise ConfigError(f"{name} needs a {2 if placements.replicas else 1}-D mesh and this one has {mesh.ndim} dims; "
                          f"{'give it the dims (replicate, shard)' if placements.replicas else 'use HSDP, or mesh[name] of one dim'}")
    if placements.optimizer is Placement.REPLICATE and policy.param_dtype is not None:
        raise ConfigError(f"{name} computes with the weights the optimizer updates, so they cannot be cast; use ZERO1 or a later row, or "
                          "torch.autocast")
    if hasattr(offload, "pin_memory") and not shards_rest:
        raise ConfigError(f"{name} keeps whole weights on the device that computes, so there is nothing to offload; use ZERO3 or HSDP")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ConfigError(f"prefetch is a number of units, 0 or more, not {prefetch!r}")


def refuse_odd(param: nn.Parameter, name: str) -> None:
    """Parameters that cannot be cut into rows. Raises ValueError or NotImplementedError."""
    if param.ndim == 0:
        raise ValueError(f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with numel equal to 1.")
    if isinstance(param, DTensor):
        raise ValueError(f"parameter {name} is a DTensor already (tensor parallel, or sharded before); this engine shards plain tensors")
    if not param.is_contiguous():
        raise NotImplementedError(f"FSDP does not support non-contiguous parameters yet: {name} has shape {tuple(param.shape)} and "
                                  f"stride {param.stride()}; call .contiguous() on it before fully_shard")


def dim_to_cut(placement: Shard | None, param: nn.Parameter, size: int) -> int:
    """The dim that `shard_placement_fn` chose, counted from the front. Raises ValueError, AssertionError or NotImplementedError."""
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ValueError(f"Invalid shard_placement_fn result: {placement}; return a Shard(dim), or None for rows")
    dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.ndim:
        raise AssertionError(f"Shard dim {placement.dim} is invalid for {param.ndim}D tensor: {param.shape}")
    if dim > 0 and param.shape[dim] % size:
        raise NotImplementedError(f"FSDP does not support uneven sharding on dim {dim}: {param.shape} (world size: {size})")
    return dim


def one_or_more(value: int, name: str) -> int:
    """`value`, if it is a whole number from 1. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} should be an int, got {type(value)}")
    if value < 1:
        raise ValueError(f"{name} should be at least 1, got {value}")
    return value
