"""What a training script calls. `fully_shard` has the name, arguments and meaning of torch.distributed.fsdp.fully_shard.

    for block in model.blocks:
        fully_shard(block)                        # inner units first
    fully_shard(model)                            # the root takes what is left
    optimizer = torch.optim.AdamW(model.parameters())          # after sharding: it must see the shards

`data_parallel` does the same for a row of the ZeRO ladder: `data_parallel(model, ZERO2)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .. import agreement, arguments, clipping, collectives, optimizers, wrap
from ..collectives import Label
from ..mesh import UnitMesh, default_mesh
from ..placements import HSDP, ZERO3, Placement, Placements
from ..policies import MixedPrecisionPolicy, OffloadPolicy
from . import ownership
from .hooks import UnitHooks, hooks_of
from .module import sharded_class
from .param import ShardedParam
from .unit import Unit


def fully_shard(module: nn.Module | list[nn.Module], *, mesh: DeviceMesh | None = None, reshard_after_forward: bool | int | None = None,
                shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
                mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(), offload_policy: OffloadPolicy = OffloadPolicy(),
                ignored_params: set[nn.Parameter] | None = None, dp_mesh_dims: Any = None) -> Any:
    """Shard the parameters of `module` that no inner unit owns, as one unit, in place; returns `module` (now also an FSDPModule).

    The parameters become DTensors of the same shape whose rows are spread over the ranks of `mesh` by torch.chunk's rule. Before
    forward they are all-gathered in one collective; afterwards they are freed; backward gathers again, then reduce-scatters the
    mean of the gradients to the owners of the rows. Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py.

    Args:
        module: a module, or a list of modules that are gathered together (they share one unit).
        mesh: a 1-D device mesh (default: all ranks), or a 2-D one with names: sharded along its second dim, replicated along its first.
        reshard_after_forward: free the weights after forward (True), keep them until backward (False), keep them only for the
            root, whose backward begins at once (None), or keep them in pieces on groups of so many neighbours (an int that divides the
            number of shards): backward then gathers within that group.
        shard_placement_fn: parameter -> `Shard(dim)` to cut along another dim than 0 (which must divide evenly), or None.
        mp_policy: dtypes of compute, reduction and output.
        offload_policy: `CPUOffloadPolicy()` lets shards, gradients and so the optimizer's state rest in host memory.
        ignored_params: parameters that stay as they are, on every rank, without reduction of their gradients.
        dp_mesh_dims: torch's way to shard what is tensor-parallel already, which this engine does not do; leave it None.

    Raises:
        TypeError: something that is no module.
        ValueError: a container without forward, a mesh of another shape, a scalar parameter, an int that does not divide, a
            placement that is no `Shard`, `dp_mesh_dims`.
        AssertionError: `module` is a unit already, an unnamed 2-D mesh, a dim that does not exist.
        NotImplementedError: a parameter that is not contiguous, or an uneven dim other than 0.
    """
    arguments.refuse_spmd(dp_mesh_dims)
    placements = HSDP if mesh is not None and mesh.ndim == 2 else ZERO3
    return _apply(module, placements, mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params, shard_placement_fn)


fully_shard.state = hooks_of          # the unit of a module, or None (torch has its FSDPState there)


def data_parallel(model: nn.Module, placements: Placements, mesh: DeviceMesh | None = None, *, units: Iterable[nn.Module] | None = None,
                  mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(), offload_policy: OffloadPolicy = OffloadPolicy(),
                  ignored_params: set[nn.Parameter] | None = None, reshard_after_forward: bool | int | None = True,
                  prefetch: int = 1) -> nn.Module:
    """Train `model` data-parallel with its state placed as the row `placements` says; returns `model`.

    All ranks start from rank 0's weights and buffers, as in torch's DistributedDataParallel.

    Args:
        placements: `DDP`, `ZERO1`, `ZERO2`, `ZERO3`, `HSDP`.
        mesh: 1-D (default: all ranks); for `HSDP` 2-D with names, replicas first (default: a row for each machine torchrun started).
        units: modules that become a unit each, inner ones first (default: `wrap.blocks(model)`); the model itself takes the rest.
        reshard_after_forward: ZeRO-3 and HSDP: as in `fully_shard`, for all units. True moves what the formulas say, 3P a step. None keeps
            what backward needs at once, the root and the last unit of the last forward: less on the wire, two units more in memory.
        prefetch: ZeRO-3 and HSDP: how many units are gathered ahead in forward, in the order of the last forward (0: none).

    Raises:
        ConfigError: a mesh that does not fit the row, or a low-precision `mp_policy` or an `offload_policy` for a row that cannot have it.
    """
    arguments.refuse_misfits(placements, mesh, mp_policy, offload_policy, prefetch)
    if placements.parameter is Placement.REPLICATE:
        reshard_after_forward = True                        # only says which parameters the modules hold: whole weights stay
    mesh = mesh or default_mesh(placements)
    _start_equal(model, UnitMesh(mesh))
    for module in (wrap.blocks(model) if units is None else units):
        _apply(module, placements, mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params)
    _apply(model, placements, mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params)
    root = hooks_of(model)
    root.prefetch_ahead, root.keep_last = prefetch, reshard_after_forward is None
    return model


def _apply(module: nn.Module | list[nn.Module], placements: Placements, mesh: DeviceMesh | None, reshard_after_forward: bool | int | None,
           policy: MixedPrecisionPolicy, offload: OffloadPolicy, ignored: set[nn.Parameter] | None,
           placement_fn: Callable | None = None) -> Any:
    modules = arguments.modules_of(module)
    for each in modules:
        if hooks_of(each) is not None:
            raise AssertionError("Each distinct composable distributed API can only be applied to a module once. fully_shard has already "
                                 f"been applied to this {type(each).__name__}")
    unit_mesh = UnitMesh(mesh or default_mesh(placements), replicate=placements.optimizer is Placement.REPLICATE)
    reshard, keep_mesh = _after_forward(reshard_after_forward, unit_mesh)
    owned = ownership.owned_modules(modules)
    ownership.move(owned, unit_mesh.device, ignored or set())
    params = [ShardedParam(param, slots, unit_mesh, placements, placement_fn(param) if placement_fn else None)
              for param, slots in ownership.owned_params(owned, ignored or set())]
    for group in unit_mesh.groups:
        agreement.check_average(group, unit_mesh.device)
    unit = Unit(modules, params, unit_mesh, placements, policy, offload)
    unit.reshard_after_forward, unit.keep_mesh = reshard, keep_mesh
    for param in params:
        param.start_version = param.version
    hooks = UnitHooks(unit, auto_reshard=reshard_after_forward is None)
    for each in modules:
        each.__dict__["_fsdp_ref_hooks"] = hooks
        each.__class__ = sharded_class(type(each))
    optimizers.watch()
    clipping.prepare()
    return module


def _after_forward(choice: bool | int | None, mesh: UnitMesh) -> tuple[bool, UnitMesh | None]:
    """`reshard_after_forward` as (free everything?, the smaller group that keeps a part)."""
    if choice is None or isinstance(choice, bool):
        return choice is not False, None
    if not isinstance(choice, int):
        raise ValueError(f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {choice}")
    if not 1 <= choice <= mesh.size or mesh.size % choice:
        raise ValueError(f"If passing reshard_after_forward as an int, it should be a factor of {mesh.size}, not {choice}")
    if choice == 1:
        warnings.warn("reshard_after_forward=1 (int) means resharding parameters to world size 1, instead of "
                      "reshard_after_forward=True (bool)", stacklevel=4)
        return False, None
    return True, None if choice == mesh.size else mesh.part(choice)


def _start_equal(model: nn.Module, mesh: UnitMesh) -> None:
    """Everyone takes rank 0's weights and buffers: along the shards first, then along the replicas."""
    for group in (group for group in mesh.groups if group.size() > 1):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device.type != "meta" and not isinstance(tensor, DTensor):
                collectives.broadcast(tensor.detach(), group, Label(name, "start"))
