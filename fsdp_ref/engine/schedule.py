"""What all units under one root share: the order of forwards, the reductions on their way, and the end of backward.

There is one `Schedule` for the tree that a root module spans. It is made at the root's first forward, when everything has been sharded
and so the names are known. hooks.py says when its methods are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd import Variable

from .unit import State, Unit

if TYPE_CHECKING:
    from .hooks import UnitHooks


class Schedule:
    """See the module docstring. `all` are the hooks of every unit below the root (itself included), in the order of modules."""

    def __init__(self, root: UnitHooks, everyone: list[UnitHooks]) -> None:
        self.all = everyone
        self.order: list[Unit] = []
        self.reducing: list[Unit] = []
        self.forward_root: UnitHooks | None = None
        self.callback_queued = False
        self.is_last_backward = root.is_last_backward
        self._name_units(root.modules[0])
        _refuse_split_ties(self.all)
        if root.unit.device.type == "cuda":
            gather, reduce = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
            for hooks in self.all:
                hooks.unit.gather_stream, hooks.unit.reduce_stream = gather, reduce

    def _name_units(self, root: nn.Module) -> None:
        """Give units and parameters the names they have below the root, in messages, books and pictures."""
        names = {id(module): name for name, module in root.named_modules()}
        for hooks in self.all:
            unit = hooks.unit
            unit.repack_if_moved()
            unit.name = ", ".join(names.get(id(module)) or "(root)" for module in unit.modules)
            for param in unit.params:
                module, attribute = param.slots[0]
                path = names.get(id(module), "")
                param.name = f"{path}.{attribute}" if path else attribute
            if empty := [p.name for p in unit.params if p.local.is_meta]:
                raise RuntimeError("FSDP parameters should be materialized from meta device before training, but the following were still "
                                   f"on meta device: {empty}\nFor example, call module.to_empty(device) to materialize to device and "
                                   "module.reset_parameters() on each module to initialize values.")
            unit.enter_books()

    def begin_forward(self, hooks: UnitHooks) -> None:
        """The first unit of a forward pass: later gathers must see what the optimizer wrote on the current stream."""
        self.forward_root = hooks
        if hooks.unit.gather_stream is not None:
            hooks.unit.gather_stream.wait_stream(torch.cuda.current_stream())

    def remember(self, unit: Unit) -> None:
        """`unit` has run forward with gradients on. [Note: order with multiplicity]"""
        unit.forward_indices.append(len(self.order))
        self.order.append(unit)

    def previous(self, unit: Unit) -> Unit | None:
        """The unit whose forward came before the use of `unit` that backward meets now."""
        if not unit.forward_indices:
            return None
        index = unit.forward_indices.pop()
        return self.order[index - 1] if index else None

    def reduce(self, unit: Unit) -> None:
        """Start the reduction of a unit's gradients. At most one other is on its way meanwhile, which bounds the memory of buffers."""
        while len(self.reducing) > 1:
            self.reducing.pop(0).finish_reduction()
        if unit.start_reduction():
            self.reducing.append(unit)

    def queue_callback(self) -> None:
        """Have `end_backward` run when autograd has nothing left to do."""
        if not self.callback_queued:
            self.callback_queued = True
            Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        """Post-backward for the units that got no call of their own; all reductions done; ready for the next step."""
        self.callback_queued = False
        self.forward_root = None
        for hooks in self.all:
            hooks.end_backward()
        if self.is_last_backward:
            while self.reducing:
                self.reducing.pop(0).finish_reduction()
            for hooks in self.all:
                hooks.unit.restore_gradients()
            self.forget_order()

    def forget_order(self) -> None:
        """Nothing is left to run backward; gathers that were prefetched for nothing are undone."""
        self.order.clear()
        for hooks in self.all:
            hooks.unit.forward_indices.clear()
            if hooks.unit.state is State.GATHERING:
                hooks.unit.reshard()

    def reset(self) -> None:
        """Forget a step that an exception cut short: finish what is on its way, free, drop its gradients."""
        while self.reducing:
            self.reducing.pop(0).drop_gradients()
        for hooks in self.all:
            hooks.forget()
            hooks.unit.drop_gradients()
            hooks.unit.reshard()
        self.forget_order()
        self.forward_root, self.callback_queued = None, False


def _refuse_split_ties(everyone: Sequence[UnitHooks]) -> None:
    """A parameter that two units use would be gathered twice and reduced twice; only one unit may own it."""
    owner: dict[object, tuple[Unit, str]] = {}
    for unit in (hooks.unit for hooks in everyone):
        for param in unit.params:
            if param.identity in owner and owner[param.identity][0] is not unit:
                other, name = owner[param.identity]
                raise ValueError(f"Parameter '{param.name}' of {unit.name} is shared with a parameter already managed by another FSDP "
                                 f"group ('{name}' of {other.name}). For shared/tied parameters, use fully_shard([module_a, module_b]) "
                                 "to place them in the same FSDP group.")
            owner[param.identity] = (unit, param.name)
