"""What a training script calls. `fully_shard` and `FSDPModule` have the names, arguments and meaning of torch.distributed.fsdp.

    for block in model.blocks:
        fully_shard(block)                        # inner units first
    fully_shard(model)                            # the root takes what is left
    optimizer = torch.optim.AdamW(model.parameters())          # after sharding: it must see the shards
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from .. import collectives, world
from ..collectives import Label
from ..errors import ConfigError, WorldError
from ..placements import ZERO3, Placement, Placements
from . import optimizers, ownership, wrap
from .hooks import UnitHooks, hooks_of
from .param import ShardedParam
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .unit import Unit


def fully_shard(module: nn.Module | list[nn.Module], *, mesh: DeviceMesh | None = None, reshard_after_forward: bool | None = None,
                shard_placement_fn: Callable | None = None, mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
                offload_policy: OffloadPolicy = OffloadPolicy(), ignored_params: set[nn.Parameter] | None = None) -> Any:
    """Shard the parameters of `module` that no inner unit owns, as one unit, in place; returns `module` (now also an FSDPModule).

    The parameters become DTensors of the same shape whose rows are spread over the ranks of `mesh` by torch.chunk's rule. Before
    forward they are all-gathered in one collective; afterwards they are freed; backward gathers again, then reduce-scatters the
    mean of the gradients to the owners of the rows. Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py.

    Args:
        module: a module, or a list of modules that are gathered together (they share one unit).
        mesh: a 1-D device mesh; default: all ranks.
        reshard_after_forward: free the weights after forward (True), keep them until backward (False), or keep them only for the
            root (None): its backward begins at once.
        mp_policy: dtypes of compute, reduction and output.
        ignored_params: parameters that stay as they are, on every rank, without reduction of their gradients.

    Raises:
        ValueError: a container without forward, a mesh that is not 1-D, a scalar parameter.
        ConfigError: an option this engine does not run (`shard_placement_fn`, an `offload_policy`, an int `reshard_after_forward`).
    """
    if shard_placement_fn is not None or type(offload_policy) is not OffloadPolicy or type(reshard_after_forward) not in (bool, type(None)):
        raise ConfigError("this engine shards rows (dim 0), keeps shards on the device that computes, and takes True, False or None for "
                          "reshard_after_forward; leave shard_placement_fn and offload_policy out, or use torch.distributed.fsdp for them")
    return _apply(module, ZERO3, mesh, reshard_after_forward, mp_policy, ignored_params)


def data_parallel(model: nn.Module, placements: Placements, mesh: DeviceMesh | None = None, *, units: Iterable[nn.Module] | None = None,
                  mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(), offload_policy: OffloadPolicy = OffloadPolicy(),
                  ignored_params: set[nn.Parameter] | None = None) -> nn.Module:
    """Train `model` data-parallel with its state placed as the row `placements` says (`DDP`, `ZERO3`); returns `model`.

    All ranks start from rank 0's weights and buffers, as in torch's DistributedDataParallel.

    Args:
        units: modules that become a unit each, inner ones first (default: `wrap.blocks(model)`); the model itself takes the rest.

    Raises:
        ConfigError: a row that this engine does not run, or a low-precision `mp_policy` with replicated weights.
    """
    runs = (Placement.REPLICATE,) * 3, (Placement.SHARD,) * 3
    if (placements.parameter, placements.gradient, placements.optimizer) not in runs or placements.replicas:
        raise ConfigError(f"this engine runs the rows DDP and ZeRO-3 of the ladder, not {placements.name}; choose DDP or ZERO3")
    if type(offload_policy) is not OffloadPolicy:
        raise ConfigError("this engine keeps shards on the device that computes; leave offload_policy out")
    if placements.parameter is Placement.REPLICATE and mp_policy.param_dtype is not None:
        raise ConfigError(f"{placements.name} computes with the weights the optimizer updates, so they cannot be cast; "
                          "use ZERO3 or torch.autocast")
    mesh = mesh or _default_mesh()
    _validate_mesh(mesh)
    _start_equal(model, mesh)
    for module in (wrap.blocks(model) if units is None else units):
        _apply(module, placements, mesh, None, mp_policy, ignored_params)
    return _apply(model, placements, mesh, None, mp_policy, ignored_params)


def _apply(module: nn.Module | list[nn.Module], placements: Placements, mesh: DeviceMesh | None, reshard_after_forward: bool | None,
           policy: MixedPrecisionPolicy, ignored: set[nn.Parameter] | None) -> Any:
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    for each in modules:
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {each}")
        if hooks_of(each) is not None:
            raise AssertionError(f"fully_shard has already been applied to this {type(each).__name__}; apply it once a module")
    mesh = mesh or _default_mesh()
    _validate_mesh(mesh)
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device(mesh.device_type)
    owned = ownership.owned_modules(modules)
    ownership.move(owned, device, ignored or set())
    params = [ShardedParam(param, slots, mesh, placements) for param, slots in ownership.owned_params(owned, ignored or set())]
    unit = Unit(modules, params, mesh, placements, policy, device, reshard_after_forward is not False)
    hooks = UnitHooks(unit, auto_reshard=reshard_after_forward is None)
    for each in modules:
        each.__dict__["_fsdp_ref_hooks"] = hooks
        each.__class__ = _fsdp_class(type(each))
    optimizers.watch()
    return module


def _default_mesh() -> DeviceMesh:
    """All ranks in a row. A process without a process group joins one first (torchrun's, or a world of one)."""
    if not dist.is_initialized():
        world.start()
    kinds = {device.type for device in dist.group.WORLD._device_types}
    here = world.current()
    kind = here.device.type if here else ("cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, (dist.get_world_size(),))


def _validate_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2:
        raise ConfigError(f"this engine shards over one mesh dimension and {mesh} has two; pass mesh['name'] of the one to shard over")
    if mesh.get_coordinate() is None:
        raise WorldError(f"rank {dist.get_rank()} is not part of {mesh}; a mesh must hold every rank that runs the model")


def _start_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    """Everyone takes rank 0's weights and buffers."""
    if mesh.size() > 1:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device.type != "meta" and not isinstance(tensor, DTensor):
                collectives.broadcast(tensor.detach(), mesh.get_group(), Label(name, "start"))


@functools.cache
def _fsdp_class(cls: type[nn.Module]) -> type[nn.Module]:
    """FSDP<Class>: the class itself, with FSDPModule's methods in front. isinstance(module, Class) stays true."""
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _no_deepcopy})


def _no_deepcopy(*_: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


class UnshardHandle:
    """What `FSDPModule.unshard(async_op=True)` returns."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Return when the weights are whole and registered on the module."""
        self._unit.wait_unshard()


class FSDPModule:
    """The methods a sharded module has besides its own (torch's names and meaning)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Indexing a container (`sequential[1:]`) builds a new one of the same class: give it the original class."""
        original = cls.__mro__[2]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's weights now. With `async_op`, returns a handle whose `wait` finishes the gather."""
        unit = self._hooks.unit
        unit.repack_if_moved()
        unit.unshard()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's whole weights; the module holds the shards again."""
        self._hooks.unit.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward keeps whole gradients on each rank, without communication, until a backward with True reduces their sum."""
        for unit in self._units(recurse):
            unit.sync_gradients = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: more backwards follow in this step; reductions need not be finished and the forward order is kept."""
        (self._hooks.schedule or self._hooks).is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change `reshard_after_forward` from the next forward on."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for module in self.modules() if recurse else (self,):
            if (hooks := hooks_of(module)) is not None:
                hooks.auto_reshard, hooks.unit.reshard_after_forward = False, reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: keep the whole weights after backward too (for several backwards in a row)."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units whose gather starts as soon as this one's weights are there, in forward."""
        self._hooks.forward_prefetch = [_unit_of(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The same in backward, in place of the default (the unit that ran before this one)."""
        self._hooks.backward_prefetch = [_unit_of(module) for module in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the *sum* of the gradients by `factor` instead of by the number of ranks (1.0: plain sum)."""
        for unit in self._units(recurse=False):
            unit.divide_factor = factor

    def reset_iter_state(self) -> None:
        """After an exception inside a step: forget that step, so that the next forward starts clean. Call it on the root, on every rank."""
        if self._hooks.schedule is not None:
            self._hooks.schedule.reset()

    @property
    def _hooks(self) -> UnitHooks:
        return hooks_of(self)

    def _units(self, recurse: bool) -> list[Unit]:
        found = [hooks_of(module) for module in (self.modules() if recurse else (self,))]
        return list({id(hooks.unit): hooks.unit for hooks in found if hooks is not None}.values())

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`.to`, `.cuda`, `.double`, `to_empty`: they give the shards other memory, so the flat shard is laid out anew."""
        units = self._units(recurse=True)
        for unit in units:
            unit.reshard()
        super()._apply(*args, **kwargs)
        for unit in units:
            unit.repack_if_moved()
        return self


def _unit_of(module: nn.Module) -> Unit:
    hooks = hooks_of(module)
    if hooks is None:
        raise ValueError(f"only modules that fully_shard was applied to can be prefetched, and this {type(module).__name__} is not one")
    return hooks.unit


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.<method_name>(...)` gather and free like forward does (`generate`, `encode`, ...). Does nothing on other modules.

    Raises:
        ValueError: the module has no such method.
    """
    hooks = hooks_of(module)
    if hooks is None:
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"{type(module)} does not have a method {method_name}")

    @functools.wraps(method)
    def with_hooks(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.pre_forward(module, args, kwargs)
        hooks.inside_method += 1
        try:
            output = method(*args, **kwargs)
        finally:
            hooks.inside_method -= 1
        return hooks.post_forward(module, args, output)

    module.__dict__[method_name] = with_hooks
