"""What a device mesh means to a unit: who shares its shards, who holds a copy of this rank's shard, and where things compute.

    1-D mesh of 4               shard group {0 1 2 3}
    2-D mesh [[0 1] [2 3]]      shard groups {0 1} and {2 3}; replicate groups {0 2} and {1 3}       (hybrid sharding, HSDP)
    1-D mesh of 4, DDP          shard groups of one rank each; replicate group {0 1 2 3}

Source: `FSDPMeshInfo`, `HSDPMeshInfo` of torch/distributed/fsdp/_fully_shard/_fsdp_common.py.
"""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TensorPlacement

from . import world
from .errors import ConfigError, WorldError
from .placements import Placements

_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, UnitMesh]] = weakref.WeakKeyDictionary()


class UnitMesh:
    """See the module docstring. `size` and `rank` count within the shard group, `ranks` counts everyone who shares the gradients."""

    def __init__(self, mesh: DeviceMesh, replicate: bool = False) -> None:
        if mesh.ndim not in (1, 2):
            raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
        if mesh.get_coordinate() is None:
            raise WorldError(f"rank {dist.get_rank()} is not part of {mesh}; a mesh must hold every rank that runs the model")
        self.mesh, last = mesh, mesh.ndim - 1
        self.group, self.size, self.rank = mesh.get_group(last), mesh.size(last), mesh.get_local_rank(last)
        self.replicas = mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None
        if replicate:
            self.replicas, self.group, self.size, self.rank = self.group if self.size > 1 else None, None, 1, 0
        self.ranks = mesh.size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device(mesh.device_type)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups this rank communicates in."""
        return [group for group in (self.group, self.replicas) if group is not None]

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh of the shard group."""
        return self.mesh if self.mesh.ndim == 1 else self.mesh[self.mesh.mesh_dim_names[1]]

    def placements(self, dim: int) -> list[TensorPlacement]:
        """DTensor placements of a parameter that is sharded along `dim`."""
        return [Replicate()] * (self.mesh.ndim - 1) + [Shard(dim)]

    def part(self, ranks: int) -> UnitMesh:
        """Groups of `ranks` neighbours inside the shard groups: where `reshard_after_forward=<int>` keeps its shards. Made once a group."""
        known = _kept.setdefault(self.group, {})
        if ranks not in known:
            known[ranks] = UnitMesh(DeviceMesh(self.mesh.device_type, self.mesh.mesh.view(-1, ranks), mesh_dim_names=("again", "kept")))
        return known[ranks]


def default_mesh(placements: Placements) -> DeviceMesh:
    """All ranks in a row; for hybrid sharding, one row a machine (as torchrun started them).

    A process without a process group joins one first (torchrun's, or a world of one).
    """
    if not dist.is_initialized():
        world.start()
    kinds = {device.type for device in dist.group.WORLD._device_types}
    here = world.current()
    kind = here.device.type if here else ("cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu")
    size, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not placements.replicas:
        return init_device_mesh(kind, (size,))
    if not 0 < local < size or size % local:
        raise ConfigError(f"{placements.name} shards inside a group of ranks and replicates across groups, and the {size} ranks here are "
                          f"one group; say which belong together: mesh=init_device_mesh({kind!r}, (replicas, shards), "
                          "mesh_dim_names=('replicate', 'shard'))")
    return init_device_mesh(kind, (size // local, local), mesh_dim_names=("replicate", "shard"))
