"""The gradients of one unit between backward and the optimizer: kept, reduced, or forgotten. reduction.py does one reduction.

Where they rest follows from the row. ZeRO-2 and ZeRO-3 reduce a unit's gradients as soon as backward has made them and keep this rank's
rows. ZeRO-1 lets the whole gradients stand until backward is over ("at the step"), reduces then, and keeps the whole memory. DDP reduces
at once and keeps the whole result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .. import ledger
from ..ledger import Category
from ..placements import Placement
from .reduction import Reduction

if TYPE_CHECKING:
    from .unit import Unit


class Gradients:
    """See the module docstring. The flags are set by `FSDPModule`'s methods."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.sync = True                                    # False: keep whole gradients, no communication
        self.sync_replicas = True                           # HSDP, False: reduce-scatter, but keep the sum back from the replicas
        self.reduce_unused = False                          # zeros for parameters without a gradient
        self.force_sum = False                              # SUM and a division, never AVG
        self.divide_factor: float | None = None
        self.hook: Callable[[torch.Tensor], None] | None = None     # the user's, on what was reduced
        self.hook_stream: torch.cuda.Stream | None = None
        self.reduction: Reduction | None = None
        self._token = 0

    @property
    def at_the_step(self) -> bool:
        """True where reductions wait for the end of backward (ZeRO-1)."""
        return self.unit.sharded and self.unit.placements.gradient is Placement.REPLICATE

    def expect(self) -> None:
        """Backward of this unit begins: from now on whole gradients come into being.

        They are entered now, at once; a recording of temporaries sees each of them come and needs only to be told whose they are.
        """
        params = [param for param in self.unit.params if param.full is not None]
        if not self._token and not ledger.sees_results() and all(param.full.grad is None for param in params):
            nbytes = sum(param.full.numel() * param.full.element_size() for param in params if param.full.requires_grad)
            self._token = ledger.allocate(Category.UNSHARDED_GRAD, self.unit.name, nbytes)

    def reduce(self) -> bool:
        """Start the reduction of what backward left on the whole parameters; False if that is nothing. It is freed at once."""
        waiting = [p for p in self.unit.params if p.has_gradient or (p.full is not None and p.partial is not None)
                   or (self.reduce_unused and p.full is not None and p.requires_grad)]
        self.finish()
        pairs = [(param, param.take_gradient()) for param in waiting]
        ledger.own((grad for _, grad in pairs), Category.UNSHARDED_GRAD, self.unit.name)
        if pairs:
            self.reduction = Reduction(self.unit, pairs)
        self._strike()
        return bool(pairs)

    def keep(self) -> None:
        """A backward without sync is over: accumulate in the dtype of the reduction (torch's rule)."""
        for param in (param for param in self.unit.params if param.full is not None):
            if self.unit.policy.reduce_dtype is not None:
                param.keep_gradient(self.unit.policy.reduce_dtype)
            ledger.own((param.full.grad, param.kept), Category.UNSHARDED_GRAD, self.unit.name)

    def finish(self) -> None:
        """Wait for the reduction and put its result where the optimizer looks for it."""
        reduction, self.reduction = self.reduction, None
        if reduction is not None:
            reduction.finish()

    def call_hook(self, reduced: torch.Tensor) -> None:
        """The user's hook on a reduction's result (see `FSDPModule.set_all_reduce_hook`)."""
        if self.hook is None:
            return
        if self.hook_stream is None:
            self.hook(reduced)
            return
        self.hook_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.hook_stream):
            self.hook(reduced)
        torch.cuda.current_stream().wait_stream(self.hook_stream)

    def drop(self) -> None:
        """Forget the whole gradients of a step that was cut short, and a reduction of them that is on its way."""
        reduction, self.reduction = self.reduction, None
        if reduction is not None:
            reduction.drop()
        for param in self.unit.params:
            param.drop_gradients()
        self._strike()

    def _strike(self) -> None:
        ledger.free(self._token)
        self._token = 0
