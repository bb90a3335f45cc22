"""One reduction of one unit's gradients: copy in, reduce, put the result where it rests.

What is done follows from the row: PARTIAL -> SHARD is a reduce-scatter whose result goes to the shards' `.grad`; PARTIAL -> REPLICATE
(DDP) is an all-reduce whose result becomes the parameters' `.grad`. The mean is over all ranks of the group, so with equal batches the
result is the gradient of the mean loss of the global batch.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .. import collectives, ledger
from ..collectives import Label, Pending
from ..ledger import Category
from ..placements import Placement
from .param import ShardedParam

if TYPE_CHECKING:
    from .unit import Unit


class Reduction:
    """A reduction on its way. The gradients handed in are copied into one buffer and dropped before the constructor returns."""

    def __init__(self, unit: Unit, pairs: list[tuple[ShardedParam, torch.Tensor]]) -> None:
        self.unit = unit
        self.params = [param for param, _ in pairs]
        grads = [grad for _, grad in pairs]
        self.dtype = _reduction_dtype(unit, grads)
        self.op, before, self.divide_after = _division(unit, self.dtype)
        scatter = unit.placements.gradient is Placement.SHARD
        self.buffer = self._copy_in_chunks(grads) if scatter else self._copy_in_whole(grads)
        category = Category.REDUCE_SCATTER if scatter else Category.UNSHARDED_GRAD
        self.token = ledger.allocate(category, unit.name, self.buffer.numel() * self.buffer.element_size())
        if scatter:
            weakref.finalize(self, ledger.free, self.token)                         # also when an exception ends the step before
        if before != 1:
            self.buffer.div_(before)
        if unit.reduce_stream is not None:
            unit.reduce_stream.wait_stream(torch.cuda.current_stream())
        self.pending, self.output = self._start(scatter)

    def _copy_in_chunks(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """(world, sum of padded chunks): row r holds rank r's rows of every gradient, zeros where a chunk is padded."""
        world = self.unit.world_size
        width = sum(param.numel for param in self.params)
        buffer = torch.empty((world, width), dtype=self.dtype, device=grads[0].device)
        full = [grad.to(self.dtype) for grad in grads if grad.numel()]
        if full:
            torch._chunk_cat(full, 0, world, out=buffer)                            # pad, cut and concatenate in one pass
        return buffer

    def _copy_in_whole(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([grad.reshape(-1).to(self.dtype) for grad in grads])

    def _start(self, scatter: bool) -> tuple[Pending | None, torch.Tensor]:
        unit, label = self.unit, Label(self.unit.name, "backward")
        if unit.world_size == 1:
            return None, self.buffer.view(-1)
        if not scatter:
            return collectives.all_reduce(self.buffer, unit.group, label, op=self.op, stream=unit.reduce_stream), self.buffer
        own = self.buffer[unit.rank]
        output = torch.empty_like(own) if own.is_cuda else own                      # [Note: gloo's reduce-scatter]
        return collectives.reduce_scatter(output, self.buffer.view(-1), unit.group, label, op=self.op, stream=unit.reduce_stream), output

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, divide if the user gave a factor of their own, and hand the gradients over."""
        if self.pending is not None:
            self.pending.wait()
        if self.divide_after != 1:
            self.output.div_(self.divide_after)
        if self.unit.placements.gradient is Placement.SHARD:
            self._hand_over_shards()
        else:
            self._hand_over_whole()

    def drop(self) -> None:
        """Wait, and throw the result away."""
        if self.pending is not None:
            self.pending.wait()
        self.buffer = self.output = None
        ledger.free(self.token)

    def _hand_over_shards(self) -> None:
        """The output is this rank's padded chunks; each parameter's `.grad` becomes a view of the rows that are real."""
        dtypes = {param.dtype for param in self.params}
        dtype = dtypes.pop() if len(dtypes) == 1 else self.dtype                    # mixed: each is cast by itself, below
        flat = self.output.to(dtype, copy=True) if not self.output.is_cuda else self.output.to(dtype)   # let go of the big buffer
        self.buffer = self.output = None
        ledger.free(self.token)
        created = [param for param in self.params if param.sharded.grad is None]
        token = ledger.allocate(Category.SHARDED_GRAD, self.unit.name, flat.numel() * flat.element_size()) if created else 0
        start = 0
        for param in self.params:
            own = flat[start : start + param.rows * math.prod(param.shape[1:])].view(param.rows, *param.shape[1:])
            param.add_gradient(own.to(param.dtype))
            start += param.numel
        if created and (grad := created[-1].sharded.grad) is not None:
            weakref.finalize(grad, ledger.free, token)                              # zero_grad tells nobody
        else:
            ledger.free(token)

    def _hand_over_whole(self) -> None:
        """DDP: `.grad` becomes a view of the reduced buffer, so the result is not copied back."""
        start = 0
        for param in self.params:
            view = self.buffer[start : start + param.full.numel()].view(param.shape)
            mean = view.to(param.dtype)
            param.add_whole_gradient(mean)
            start += param.full.numel()
        weakref.finalize(mean, ledger.free, self.token)                             # it is, or was added to, the `.grad` to be
        self.buffer = self.output = None


def _division(unit: Unit, dtype: torch.dtype) -> tuple[dist.ReduceOp.RedOpType, float, float]:
    """How the sum becomes a mean: the operation, and what to divide by before it and after it.

    fp16 ends at 65504: a sum over many ranks would overflow and the mean of it come too late, so about the root of the divisor goes
    first (torch's rule, `_get_gradient_divide_factors`: 8 = 4 * 2, 4 = 2 * 2, 2 = 2 * 1).
    """
    total = float(unit.world_size if unit.divide_factor is None else unit.divide_factor)
    if dtype is torch.float16:
        before = 1.0
        while total % before == 0 and total / before > before:
            before *= 2
        return dist.ReduceOp.SUM, before, total / before
    return (dist.ReduceOp.AVG, 1, 1) if unit.divide_factor is None else (dist.ReduceOp.SUM, 1, total)


def _reduction_dtype(unit: Unit, grads: list[torch.Tensor]) -> torch.dtype:
    """The policy's reduce_dtype, else the gradients' own; they must agree, since they share a buffer."""
    if unit.policy.reduce_dtype is not None:
        return unit.policy.reduce_dtype
    dtypes = {grad.dtype for grad in grads}
    if len(dtypes) > 1:
        raise AssertionError(f"FSDP reduce-scatter expects uniform gradient dtype but got {dtypes} in {unit.name}; "
                             "give the unit a MixedPrecisionPolicy(reduce_dtype=...) or split it")
    return dtypes.pop()
