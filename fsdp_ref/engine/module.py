"""The methods of a sharded module: `FSDPModule`, with the names, arguments and meaning of torch.distributed.fsdp.FSDPModule.

A sharded module keeps its class and gets FSDPModule in front of it (`FSDPGPT`, say). The methods only set what units and schedule read,
or ask a unit to gather or free; nothing is decided here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from ..arguments import one_or_more
from .hooks import UnitHooks, hooks_of, units_below
from .unit import Unit


@functools.cache
def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
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
            unit.gradients.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Hybrid sharding. False: backward reduce-scatters inside the shard group and keeps the result back from the replicas, until a
        backward with True all-reduces the sum: the slow link is used once for many micro-batches."""
        for unit in self._units(recurse):
            unit.gradients.sync_replicas = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: more backwards follow in this step; reductions need not be finished and the forward order is kept."""
        (self._hooks.schedule or self._hooks).is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change `reshard_after_forward` from the next forward on."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for hooks in units_below(self._hooks) if recurse else (self._hooks,):
            hooks.auto_reshard, hooks.unit.reshard_after_forward, hooks.unit.keep_mesh = False, reshard_after_forward, None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: keep the whole weights after backward too (for several backwards in a row)."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not gather this unit. For weights that backward does not read (an embedding's)."""
        self._hooks.unit.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units whose gather starts as soon as this one's weights are there, in forward."""
        self._hooks.forward_prefetch = [hooks.unit for hooks in _all_hooks(modules)]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The same in backward, in place of the default (the unit that ran before this one)."""
        self._hooks.backward_prefetch = [hooks.unit for hooks in _all_hooks(modules)]

    def set_max_gathers_in_flight(self, gathers: int | None) -> None:
        """Root only: at most so many gathers on their way at once, however much is prefetched (None: no limit). Ours; not in torch."""
        self._hooks.max_in_flight = gathers if gathers is None else one_or_more(gathers, "gathers")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Root only: reductions that may still be on their way when another one starts (default 1). More overlap, more memory."""
        for hooks in units_below(self._hooks) if recurse else (self._hooks,):
            hooks.max_reductions = one_or_more(max_input_buffers, "max_input_buffers")

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the *sum* of the gradients by `factor` instead of by the number of ranks (1.0: plain sum)."""
        self._hooks.unit.gradients.divide_factor = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor          # its old name

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None) -> None:
        """Call `hook(output)` on this unit's reduced gradients before they are divided and handed over; it may change them in place.

        `output`: 1-D, this rank's padded rows of every parameter, in the reduction's dtype; after the replicas' all-reduce if there are
        replicas. A `stream` (CUDA) to run it in is for units without replicas.
        """
        gradients = self._hooks.unit.gradients
        if stream is not None and gradients.unit.placements.replicas:
            raise ValueError("stream cannot be set when using native HSDP")
        gradients.hook, gradients.hook_stream = hook, stream

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Root only: the next forward's gathers wait for `event` instead of all that the current stream holds. Used up by one forward."""
        self._hooks.post_optim_event = event

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """True: reduce with SUM and divide afterwards, never with AVG."""
        self._hooks.unit.gradients.force_sum = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True: parameters that got no gradient are reduced as zeros, so that ranks which used different ones still match."""
        for unit in self._units(recurse):
            unit.gradients.reduce_unused = reduce_scatter_unused_params

    def reset_iter_state(self) -> None:
        """After an exception inside a step: forget that step, so that the next forward starts clean. Call it on the root, on every rank."""
        if self._hooks.schedule is not None:
            self._hooks.schedule.reset()

    @property
    def _hooks(self) -> UnitHooks:
        return hooks_of(self)

    def _units(self, recurse: bool) -> list[Unit]:
        return [hooks.unit for hooks in (units_below(self._hooks) if recurse else (self._hooks,))]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`.to`, `.cuda`, `.double`, `to_empty`: they give the shards other memory, so the flat shard is laid out anew."""
        units = self._units(recurse=True)
        for unit in units:
            unit.reshard()
        super()._apply(*args, **kwargs)
        for unit in units:
            unit.repack_if_moved()
        return self


def _all_hooks(modules: Iterable[nn.Module]) -> list[UnitHooks]:
    modules = list(modules)
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}; apply fully_shard to it first")
    return [hooks_of(module) for module in modules]


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots (the chunks of one pipeline stage, say) use the same CUDA streams, so that their buffers share memory.

    Call it before their first forward. On the CPU all units of a process group share one wire anyway.

    Raises:
        ValueError: one of them is not sharded.
    """
    hooks = _all_hooks(modules)
    for other in hooks[1:]:
        other.streams = hooks[0].streams


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
