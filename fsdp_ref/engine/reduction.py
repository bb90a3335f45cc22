"""One reduction of one unit's gradients: copy in, reduce, put the result where it rests.

What is done follows from the row: PARTIAL -> SHARD is a reduce-scatter whose result goes to the shards' `.grad`; PARTIAL -> REPLICATE
(DDP) is an all-reduce whose result becomes the parameters' `.grad`; HSDP does the first inside a group of shards and the second, on the
rows that are left, across the groups. The mean is over all ranks, so with equal batches the result is the gradient of the mean loss of
the global batch.

    gradients          rank 0: a0 a1, b0 b1 b2                  rank 1: the same rows, other numbers
    copy in            both:   buffer      a0 b0 b1 | a1 b2 0   (gradients freed)
    reduce-scatter     rank 0: a0 b0 b1                         rank 1: a1 b2 0       each the mean over both ranks
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .. import collectives, ledger
from ..collectives import Label
from ..ledger import Category
from ..placements import Placement
from .param import ShardedParam

if TYPE_CHECKING:
    from .unit import Unit


class Reduction:
    """A reduction on its way. The gradients handed in are copied into one buffer and dropped before the constructor returns."""

    def __init__(self, unit: Unit, pairs: list[tuple[ShardedParam, torch.Tensor]]) -> None:
        self.unit, self.mesh = unit, unit.mesh
        self.params = [param for param, _ in pairs]
        grads = [grad for _, grad in pairs]
        self.dtype = _reduction_dtype(unit, grads)
        self.op, before, self.divide_after = _division(unit, self.dtype)
        self.buffer = self._copy_in(grads)
        self.tokens: list[int] = []
        self._enter(Category.REDUCE_SCATTER if unit.placements.gradient is Placement.SHARD else Category.UNSHARDED_GRAD, self.buffer)
        if before != 1:
            self.buffer.div_(before)
        if unit.reduce_stream is not None:
            unit.reduce_stream.wait_stream(torch.cuda.current_stream())
        self.at_replicas = False
        self._start()

    def _copy_in(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """(shards, sum of padded chunks): row r holds rank r's rows of every gradient, zeros where a chunk is padded."""
        buffer = torch.empty((self.mesh.size, sum(p.numel for p in self.params)), dtype=self.dtype, device=grads[0].device)
        chunks = [(grad if p.dim == 0 else p.by_rank(grad.contiguous())).to(self.dtype).contiguous()                # [Note: columns]
                  for p, grad in zip(self.params, grads, strict=True) if grad.numel()]
        if chunks:                                                                  # pad, cut and concatenate in one pass
            torch._chunk_cat([chunk if chunk.ndim else chunk.view(1) for chunk in chunks], 0, self.mesh.size, out=buffer)
        return buffer

    def _start(self) -> None:
        own, unit = self.buffer[self.mesh.rank], self.unit
        self.pending, self.output = None, own
        if self.mesh.size > 1:
            if unit.placements.gradient is Placement.SHARD:
                self.output = torch.empty_like(own)                                 # ZeRO-1 keeps the whole buffer
                self._enter(Category.SHARDED_GRAD, self.output)
            self.pending = collectives.reduce_scatter(self.output, self.buffer.view(-1), self.mesh.group, Label(unit.name, "backward"),
                                                      op=self.op, stream=unit.reduce_stream)
        else:
            self.advance()

    @torch.no_grad()
    def advance(self) -> None:
        """HSDP, once the shards are reduced: add what earlier micro-batches kept back, and go on to the replicas, or keep it back too."""
        if self.mesh.replicas is None or self.at_replicas:
            return
        self.at_replicas = True
        self._wait()
        for param, own in self._chunks(self.output):
            if param.partial is not None:
                own.add_(param.partial)
            param.partial = None if self.unit.gradients.sync_replicas else own
        if not self.unit.gradients.sync_replicas:
            self._keep_books(Category.SHARDED_GRAD, self.output, self.output)
            self.buffer = self.output = None
            return
        stream = self.unit.reduce_stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        label = Label(self.unit.name, "backward")
        self.pending = collectives.all_reduce(self.output, self.mesh.replicas, label, op=self.op, stream=stream)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, divide if the user gave a factor of their own, and hand the gradients over."""
        self.advance()
        if self.output is None:
            return
        self._wait()
        self.unit.gradients.call_hook(self.output)
        if self.divide_after != 1:
            self.output.div_(self.divide_after)
        self._hand_over()

    def drop(self) -> None:
        """Wait, and throw the result away."""
        self._wait()
        self.buffer = self.output = None
        self._strike()

    def _wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def _chunks(self, flat: torch.Tensor) -> list[tuple[ShardedParam, torch.Tensor]]:
        """Each parameter with its padded chunk of `flat` (1-D, one row of the buffer)."""
        pieces = flat.split([param.numel for param in self.params])
        return [(param, own.view(param.chunk_shape)) for param, own in zip(self.params, pieces, strict=True)]

    def _hand_over(self) -> None:
        """The output is this rank's padded chunks; each parameter's `.grad` becomes a view of the rows that are real."""
        dtypes = {param.dtype for param in self.params}
        dtype = dtypes.pop() if len(dtypes) == 1 else self.dtype                    # mixed: each is cast by itself, below
        whole_rests = self.unit.placements.gradient is Placement.REPLICATE
        category, held = (Category.UNSHARDED_GRAD, self.buffer) if whole_rests else (Category.SHARDED_GRAD, self.output)
        flat = self.output.to(self.unit.home, dtype)
        self.buffer = self.output = None
        self._strike()
        created = [param for param in self.params if param.sharded.grad is None]
        for param, own in self._chunks(flat):
            param.add_gradient(own.to(param.dtype))
        if created and (grad := created[-1].sharded.grad) is not None:
            self._keep_books(category, held, grad)                                  # zero_grad tells nobody

    def _keep_books(self, category: Category, held: torch.Tensor, owner: torch.Tensor) -> None:
        """Enter the memory of `held` into the books for as long as `owner` lives."""
        self._strike()
        weakref.finalize(owner, ledger.free, ledger.allocate(category, self.unit.name, held.nbytes, (held, owner)))

    def _enter(self, category: Category, held: torch.Tensor) -> None:
        self.tokens.append(ledger.allocate(category, self.unit.name, held.nbytes, (held,)))
        weakref.finalize(self, ledger.free, self.tokens[-1])                        # also when an exception ends the step before

    def _strike(self) -> None:
        while self.tokens:
            ledger.free(self.tokens.pop())


def _division(unit: Unit, dtype: torch.dtype) -> tuple[dist.ReduceOp.RedOpType, float, float]:
    """How the sum becomes a mean: the operation, and what to divide by before it and after it.

    fp16 ends at 65504: a sum over many ranks would overflow and the mean of it come too late, so about the root of the divisor goes
    first (torch's rule, `_get_gradient_divide_factors`: 8 = 4 * 2, 4 = 2 * 2, 2 = 2 * 1).
    """
    factor = unit.gradients.divide_factor
    total = float(unit.mesh.ranks if factor is None else factor)
    if dtype is torch.float16:
        before = 1.0
        while total % before == 0 and total / before > before:
            before *= 2
        return dist.ReduceOp.SUM, before, total / before
    averages = factor is None and not unit.gradients.force_sum
    return (dist.ReduceOp.AVG, 1, 1) if averages else (dist.ReduceOp.SUM, 1, total)


def _reduction_dtype(unit: Unit, grads: list[torch.Tensor]) -> torch.dtype:
    """The policy's reduce_dtype, else the gradients' own; they must agree, since they share a buffer."""
    if unit.policy.reduce_dtype is not None:
        return unit.policy.reduce_dtype
    dtypes = {grad.dtype for grad in grads}
    if len(dtypes) > 1:
        raise AssertionError(f"FSDP reduce-scatter expects uniform gradient dtype but got {dtypes} in {unit.name}; "
                             "give the unit a MixedPrecisionPolicy(reduce_dtype=...) or split it")
    return dtypes.pop()
