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

from .. import agreement, optimizers
from .unit import State, Unit

if TYPE_CHECKING:
    from .hooks import UnitHooks


class Schedule:
    """See the module docstring. `all` are the hooks of every unit below the root (itself included), in the order of modules."""

    def __init__(self, root: UnitHooks, everyone: list[UnitHooks]) -> None:
        self.root, self.all = root, everyone
        self.order: list[Unit] = []                         # forwards with gradients on, until backward has met them
        self.forwards: list[Unit] = []                      # all forwards of this pass
        self.last_forwards: list[Unit] = []                 # and of the pass before
        self.prefetched: list[Unit] = []
        self.reducing: list[Unit] = []
        self.forward_root: UnitHooks | None = None
        self.callback_queued = False
        self.is_last_backward = root.is_last_backward
        self._name_units(root.modules[0])
        _refuse_split_ties(self.all)
        units = [hooks.unit for hooks in self.all]
        for group in {id(group): group for unit in units for group in unit.mesh.groups}.values():
            members = [unit for unit in units if group in unit.mesh.groups]
            order = [f"{unit.name} as unit number {number}" for number, unit in enumerate(members)]
            starts = {name: start for unit in members for name, start in unit.starts().items()}
            agreement.check([*order, *(line for unit in members for line in unit.describe())], group, starts)
        if root.unit.device.type == "cuda":
            root.streams[:] = root.streams or (torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1))
            for hooks in self.all:
                hooks.unit.gather_stream, hooks.unit.reduce_stream = root.streams

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
            if empty := [p.name for p in unit.params if p.local.is_meta and unit.device.type != "meta"]:     # plan computes there
                raise RuntimeError("FSDP parameters should be materialized from meta device before training, but the following were still "
                                   f"on meta device: {empty}\nFor example, call module.to_empty(device) to materialize to device and "
                                   "module.reset_parameters() on each module to initialize values.")
            unit.enter_books()

    def begin_forward(self, hooks: UnitHooks) -> None:
        """The first unit of a forward pass: later gathers must see what the optimizer wrote on the current stream."""
        self.forward_root = hooks
        optimizers.show_dtensors()
        self.last_forwards, self.forwards = self.forwards, []
        stepped, hooks.post_optim_event = hooks.post_optim_event, None
        if (stream := hooks.unit.gather_stream) is not None:
            stream.wait_event(stepped or torch.cuda.current_stream().record_event())

    def end_forward(self) -> None:
        """The last unit of a forward pass: what was prefetched and not used would be old after the optimizer's next step."""
        self.forward_root = None
        for unit in self.prefetched:
            if unit.state is State.GATHERING:
                unit.reshard()
        self.prefetched.clear()

    def following(self) -> list[Unit]:
        """The units to gather ahead: those that followed the current one in the last forward pass, if this pass goes the same way."""
        here, ahead = len(self.forwards), self.root.prefetch_ahead
        if not ahead or self.forwards[-1:] != self.last_forwards[here - 1 : here]:
            return []
        return self.last_forwards[here : here + ahead]

    def prefetch(self, units: list[Unit], phase: str) -> None:
        """Start gathers that are not needed yet, as many as may be on their way at once.

        [Note: gathers in flight] Each one holds a buffer of a unit's size until it is copied out. What is over the limit is gathered when
        it is needed, as if nobody had asked for it ahead.
        """
        for unit in units:
            limit = self.root.max_in_flight
            if limit is not None and sum(hooks.unit.gather is not None for hooks in self.all) >= limit:
                return
            unit.unshard(phase)
            if phase == "forward":
                self.prefetched.append(unit)

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
        """Start the reduction of a unit's gradients. Few others are on their way meanwhile, which bounds the memory of buffers."""
        while len(self.reducing) >= self.root.max_reductions:
            self.reducing.pop(0).gradients.finish()
        for other in self.reducing:
            if other.gradients.reduction is not None:
                other.gradients.reduction.advance()
        if unit.gradients.reduce():
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
        for unit in (hooks.unit for hooks in reversed(self.all)):
            if unit.gradients.at_the_step and unit.gradients.sync:
                self.reduce(unit)
        if self.is_last_backward:
            while self.reducing:
                self.reducing.pop(0).gradients.finish()
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
            self.reducing.pop(0).gradients.drop()
        for hooks in self.all:
            hooks.forget()
            hooks.unit.gradients.drop()
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
