"""What a device mesh means to a unit: who shares its shards, who holds a copy of this rank's shard, and where things compute.

    1-D mesh of 4               shard group {0 1 2 3}
    2-D mesh [[0 1] [2 3]]      shard groups {0 1} and {2 3}; replicate groups {0 2} and {1 3}       (hybrid sharding, HSDP)

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

from .. import collectives, world
from ..collectives import Label
from ..errors import ConfigError, WorldError
from ..placements import Placements

_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, UnitMesh]] = weakref.WeakKeyDictionary()
_averages: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()           # groups whose AVG has been tried


class UnitMesh:
    """See the module docstring. `size` and `rank` count within the shard group, `ranks` counts everyone who shares the gradients."""

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim not in (1, 2):
            raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
        if mesh.get_coordinate() is None:
            raise WorldError(f"rank {dist.get_rank()} is not part of {mesh}; a mesh must hold every rank that runs the model")
        self.mesh, shard_dim = mesh, mesh.ndim - 1
        self.group, self.size, self.rank = mesh.get_group(shard_dim), mesh.size(shard_dim), mesh.get_local_rank(shard_dim)
        self.replicas = mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None
        self.ranks = mesh.size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device(mesh.device_type)

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

    def check_average(self) -> None:
        """Try once a group whether AVG averages on this backend. Every rank must call it.

        Raises:
            WorldError: it does not, so every gradient would be wrong by the same factor and training would go on.
        """
        for group in (self.group, self.replicas):
            if group is None or group.size() == 1 or group in _averages or dist.get_backend(group) == "fake":
                continue
            numbers = torch.full((2,), float(group.rank()), device=self.device)
            with collectives.route("library"):
                collectives.all_reduce(numbers, group, Label("check", "start")).wait()
            if numbers.tolist() != [(group.size() - 1) / 2] * 2:
                raise WorldError(f"AVG of 0 to {group.size() - 1} gave {numbers[0].item():g} on the backend {dist.get_backend(group)}, not "
                                 f"{(group.size() - 1) / 2:g}: gradients would be wrong; use gloo, NCCL, or another torch")
            _averages.add(group)


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
