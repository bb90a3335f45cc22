"""A weight that gathers itself: the idea of SimpleFSDP (arXiv 2411.00284; torchtitan's simple_fsdp experiment).

The whole method is one autograd function: its forward is an all-gather, its backward the averaged reduce-scatter. Where a module reads
`self.weight` it finds a property that applies the function to the shard; autograd does the rest. A (5, 2) weight on 2 ranks:

    at rest       rank 0: rows 0 1 2               rank 1: rows 3 4
    forward       both: 0 1 2 3 4 p                and the weight is its beginning (p: a row of padding)
    backward      both: 0 1 2 3 4 0                gradients of the whole weight, other numbers on every rank
                  rank 0: mean of 0 1 2            rank 1: mean of 3 4

What it gains over the engine: there are no units, no hooks and no states, and frozen weights, ties and recomputation need no thought; a
compiler sees plain operations only. What it costs: autograd keeps every gathered weight that backward will read, so at the end of
forward the whole model is in memory. `checkpoint=True` keeps a note in its place and gathers again in backward: one more gather for each
weight that backward reads, for a peak like the engine's. And messages are as small as the parameters.

Left out: prefetch and bucketing, which SimpleFSDP leaves to torch.compile; every collective is waited for at once, so none is hidden.
To read a weight is a collective: all ranks must read, and each read is a gather. This module must never keep a gathered weight itself.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .. import collectives, ledger
from ..collectives import Label
from ..errors import ConfigError
from ..ledger import Category, Lane
from ..nested import need_gradient
from ..placements import chunk_rows
from .support import book_while_alive, claims, hold_shard, in_backward, ranks_of


def differentiable_shard(module: nn.Module, group: dist.ProcessGroup | None = None, *, checkpoint: bool = False) -> nn.Module:
    """Keep this rank's rows of every parameter (a DTensor under the original name) and gather where one is read; returns `module`.

    Args:
        group: the ranks to shard over (default: all).
        checkpoint: free a gathered weight after its use in forward and gather it again where backward reads it.

    Raises:
        ConfigError: a parameter is a scalar, on the meta device or sharded already, or belongs to a torch RNN, which keeps a list of its
            weights and would not read them here. Nothing has been changed then.
    """
    places = next(iter(claims(module, {module}).values()), {})
    for param, ((child, _, name), *_) in places.items():
        if param.ndim == 0 or isinstance(child, nn.RNNBase):
            raise ConfigError(f"{name} is {'a scalar' if param.ndim == 0 else 'a weight of a torch RNN'}, which has no rows to gather on "
                              "reading; make it a 1-D parameter, or use fsdp_ref.fully_shard")
    group, _, _ = ranks_of(group)
    for param, held in places.items():
        rows = RowShard(held[0][2], param, group)
        for child, attribute, _ in held:
            child._parameters[attribute] = rows.shard
            child.__dict__.setdefault("_row_shards", {})[attribute] = rows
    for child in module.modules():
        if child is module or "_row_shards" in child.__dict__:
            read = tuple(child.__dict__.get("_row_shards", ()))
            child.__class__ = _gathering_class(type(child), read, child is module, checkpoint)
    return module


class Gather(torch.autograd.Function):
    """(own rows, ...) -> (all rows, ...), and back. Its two directions are each other's transpose, but for the mean."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, rows: RowShard) -> torch.Tensor:
        ctx.rows = rows
        return rows.gather(own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rows.reduce(grad), None


class RowShard:
    """One parameter: `shard` is a DTensor of its shape of which this rank holds some rows. `gather` and `reduce` are the collectives."""

    def __init__(self, name: str, param: nn.Parameter, group: dist.ProcessGroup) -> None:
        self.name, self.shape = name, param.shape
        self.group, self.size, rank = ranks_of(group)
        self.chunk, first, self.own = part = chunk_rows(self.shape[0], self.size, rank)
        local = param.detach()[first : first + self.own].clone(memory_format=torch.contiguous_format)
        self.shard = nn.Parameter(DTensor.from_local(local, DeviceMesh.from_group(group, local.device.type), [Shard(0)], run_check=False,
                                                     shape=self.shape, stride=torch.empty(self.shape, device="meta").stride()),
                                  requires_grad=param.requires_grad)
        books = {"rest": ledger.allocate(Category.SHARDED_PARAM, name, local.nbytes),
                 "shards": hold_shard(name, name, local, tuple(self.shape), part)}
        weakref.finalize(self, ledger.close_books, books)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """(own rows, ...) on every rank -> (all rows, ...), a view of the gathered buffer, whose bytes are on the books while it lives."""
        buffer = own.new_empty(self.size * self.chunk, *self.shape[1:])
        buffer.untyped_storage().gathered_from = self        # for `checkpoint`: views of it, such as weight.t(), share the storage
        book_while_alive(Category.UNSHARDED_PARAM, self.name, buffer)
        with _booked(Category.ALL_GATHER, self.name, own.new_zeros(self.chunk, *self.shape[1:])) as padded:
            padded[: self.own] = own
            if buffer.numel():
                label = Label(self.name, "backward" if in_backward() else "forward")
                collectives.all_gather(buffer.view(-1), padded.view(-1), self.group, label).wait()
        return buffer[: self.shape[0]]

    def reduce(self, grad: torch.Tensor) -> torch.Tensor:
        """(all rows, ...), this rank's gradient -> (own rows, ...), the mean. `grad` may be autograd's, so it is copied, and padded."""
        mine = grad.new_empty(self.chunk, *self.shape[1:])
        book_while_alive(Category.SHARDED_GRAD, self.name, mine)
        token = ledger.allocate(Category.UNSHARDED_GRAD, self.name, grad.nbytes, (grad,))
        with _booked(Category.REDUCE_SCATTER, self.name, grad.new_zeros(self.size * self.chunk, *self.shape[1:])) as padded:
            padded[: self.shape[0]] = grad
            if padded.numel():
                collectives.reduce_scatter(mine.view(-1), padded.view(-1), self.group, Label(self.name, "backward")).wait()
        ledger.free(token)
        return mine[: self.own]


@functools.cache
def _gathering_class(cls: type[nn.Module], read: tuple[str, ...], is_root: bool, checkpoint: bool) -> type[nn.Module]:
    """`cls` with a property in front of every parameter; the root's forward also notes its time and what autograd may save."""

    def property_of(attribute: str) -> property:
        def gathered(self: nn.Module) -> torch.Tensor:
            return Gather.apply(self._parameters[attribute].to_local(), self._row_shards[attribute])
        return property(gathered)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with ledger.span(Lane.COMPUTE, "forward", "(root)", "forward"), _notes_for_weights() if checkpoint else contextlib.nullcontext():
            output = cls.forward(self, *args, **kwargs)
        for tensor in need_gradient(output):
            tensor.register_hook(_time_backward)
        return output

    members: dict[str, Any] = {attribute: property_of(attribute) for attribute in read}
    return type(f"Gathering{cls.__name__}", (cls,), members | ({"forward": forward} if is_root else {}))


def _notes_for_weights() -> saved_tensors_hooks:
    """Where autograd would save (a view of) a gathered weight, it saves how to make it again; everything else as always."""

    def pack(tensor: torch.Tensor) -> Any:
        rows = getattr(tensor.untyped_storage(), "gathered_from", None)
        return tensor.detach() if rows is None else (rows, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        rows, *view = saved
        return rows.gather(rows.shard.detach().to_local()).as_strided(*view)

    return saved_tensors_hooks(pack, unpack)


def _time_backward(grad: torch.Tensor) -> None:
    began = ledger.now()
    Variable._execution_engine.queue_callback(
        lambda: ledger.add_event(Lane.COMPUTE, "backward", "(root)", "backward", began, ledger.now()))


@contextlib.contextmanager
def _booked(category: Category, name: str, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    token = ledger.allocate(category, name, buffer.nbytes, (buffer,))
    try:
        yield buffer
    finally:
        ledger.free(token)
